"""`roundtable eval`: the held-out loss of a checkpoint, on one process."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from data.dataset import Dataset, open_dataset
from launcher.commands.trained import Trained, load_as_it_trains, open_trained
from launcher.console import say, tell
from launcher.errors import UserError
from launcher.training.run_dir import in_start_folder
from launcher.training.step import evaluate
from launcher.watch.metrics import encode_json
from modeling.decoder import Output
from parallel.batch import MicroBatch
from parallel.mesh import lone_mesh
from parallel.processes.stop import undoing


@undoing()
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
    ranges = heldout.ranges(sequences or config.train.eval_sequences) if config.train.eval_by_source else {}
    loss, *by_source = losses_of(trained, heldout, [(0, n_sequences), *ranges.values()])
    if heldout.count(np.arange(n_sequences))[0] == 0:
        why = "each document may have only one token"
        tell(f"no held-out token counts in the loss ({why}); set data.heldout_path to longer documents")
    step = trained.checkpoint.step
    found = [("", loss, n_sequences)]
    found += [(name, own, n) for (name, (_, n)), own in zip(ranges.items(), by_source, strict=True)]
    if as_json:
        rows = [{"eval_loss": own, "perplexity": perplexity(own), "sequences": n} for _, own, n in found]
        sources = {name: row for (name, *_), row in zip(found[1:], rows[1:], strict=True)}
        say(encode_json({"step": step, **rows[0], **({"sources": sources} if sources else {})}))
        return 0
    for name, own, n in found:
        of = f" of {name}" if name else ""
        say(f"step {step}: held-out loss{of} {own:.4f} (perplexity {perplexity(own):.2f}) over {n} sequences")
    return 0


def perplexity(loss: float) -> float:
    """The exponential of the loss; infinity where that overflows a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def loss_of(trained: Trained, dataset: Dataset, n_sequences: int) -> float:
    """The checkpoint's token cross-entropy on the first samples of the dataset, in the run's precision."""
    return losses_of(trained, dataset, [(0, n_sequences)])[0]


def losses_of(trained: Trained, dataset: Dataset, ranges: Sequence[tuple[int, int]]) -> list[float]:
    """The checkpoint's token cross-entropy on each range (first sample, number of samples), in the run's precision."""
    config = trained.config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_as_it_trains(trained, device)

    def run(batches: list[MicroBatch]) -> Iterator[Output]:
        return (model(batch.tokens_BS, batch.context, batch.targets_BS) for batch in batches)

    size, mesh = config.train.micro_batch_size, lone_mesh(device)
    return [evaluate(run, config.model, dataset, n, size, mesh, first) for first, n in ranges]


def open_heldout(trained: Trained) -> Dataset:
    """The run's held-out samples. Relative paths in its config are resolved from the folder that it was started in.

    Raises UserError where the config names no held-out data, as that of an imported checkpoint does not.
    """
    config = trained.config
    if not config.data.sources and config.data.heldout_path is None:
        rule = "must name what to read, since CHECKPOINT's config has no data.sources"
        raise UserError([f"--text {rule} (it was imported); give --text FILE or --tasks TASK,..."])
    with in_start_folder(trained.run, config):
        return open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="heldout")
