"""`roundtable eval`: the held-out loss of a checkpoint, on one process."""

import json
import math
from pathlib import Path

import torch

from data.dataset import open_dataset
from launcher.errors import UserError
from launcher.step import evaluate
from launcher.trained import load_decoder, open_trained
from modeling.reference import DTYPES
from parallel.mesh import lone_mesh


def evaluate_checkpoint(path: Path | str, sequences: int | None, *, as_json: bool) -> int:
    """Prints the checkpoint's held-out token cross-entropy and perplexity; returns 0.

    ``sequences`` bounds the held-out sequences (None: the config's train.eval_sequences). Computes in the precision
    that the run trains in, so that the number is comparable with its metrics.jsonl.
    """
    trained = open_trained(path)
    config = trained.config
    if sequences is not None and sequences < 1:
        raise UserError(
            [f"--sequences={sequences} must be at least 1; leave it out for the config's train.eval_sequences"]
        )
    heldout = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="heldout")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_decoder(trained, device, DTYPES[config.train.precision])
    n_sequences = min(sequences or config.train.eval_sequences, heldout.n_samples)
    loss = evaluate(
        lambda batches: (model(batch.tokens_BS, batch.context, batch.targets_BS) for batch in batches),
        config.model,
        heldout,
        n_sequences,
        config.train.micro_batch_size,
        lone_mesh(device),
    )
    step = trained.checkpoint.step
    if as_json:
        print(json.dumps({"step": step, "eval_loss": loss, "perplexity": math.exp(loss), "sequences": n_sequences}))
    else:
        print(f"step {step}: held-out loss {loss:.4f} (perplexity {math.exp(loss):.2f}) over {n_sequences} sequences")
    return 0
