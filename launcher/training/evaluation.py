"""`roundtable eval`: the held-out loss of a checkpoint, on one process."""

import contextlib
import json
import math
from pathlib import Path

import numpy as np
import torch

from data.dataset import Dataset, open_dataset
from data.errors import DataError
from launcher.commands.trained import Trained, load_decoder, open_trained
from launcher.console import say, tell
from launcher.errors import UserError
from launcher.training.step import evaluate
from modeling.dtypes import DTYPES
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
    heldout = open_heldout(trained)
    n_sequences = min(sequences or config.train.eval_sequences, heldout.n_samples)
    loss = loss_of(trained, heldout, n_sequences)
    if heldout.count(np.arange(n_sequences))[0] == 0:
        tell("no held-out target counts: each document has one token; set data.heldout_path")
    step = trained.checkpoint.step
    if as_json:
        say(json.dumps({"step": step, "eval_loss": loss, "perplexity": perplexity(loss), "sequences": n_sequences}))
    else:
        say(f"step {step}: held-out loss {loss:.4f} (perplexity {perplexity(loss):.2f}) over {n_sequences} sequences")
    return 0


def perplexity(loss: float) -> float:
    """The exponential of the loss; infinite where no float holds it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def loss_of(trained: Trained, dataset: Dataset, n_sequences: int) -> float:
    """The checkpoint's token cross-entropy on the first samples of the dataset, in the run's precision."""
    config = trained.config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_decoder(trained, device, DTYPES[config.train.precision])
    return evaluate(
        lambda batches: (model(batch.tokens_BS, batch.context, batch.targets_BS) for batch in batches),
        config.model,
        dataset,
        n_sequences,
        config.train.micro_batch_size,
        lone_mesh(device),
    )


def open_heldout(trained: Trained) -> Dataset:
    """The held-out samples of the run, whose relative paths are read from the folder that it was started in."""
    config, folder = trained.config, trained.start_folder
    try:
        with contextlib.chdir(folder):
            return open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="heldout")
    except DataError as error:
        where = f" (relative paths are read from {folder}, where the run was started)"
        raise DataError(*(line + where * (folder != Path.cwd()) for line in error.problems)) from None
