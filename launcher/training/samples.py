"""Which samples each step of a run takes, and the thread that reads this rank's share of them ahead."""

from collections.abc import Iterator, Sequence

import numpy as np

from data.dataset import Dataset
from data.order import hopped_ranges, place_after, take
from data.read_ahead import ReadAhead
from data.stages import Stages
from launcher.config.tree import RunConfig, TrainConfig
from launcher.training.batches import HostBatch, NarrowBatch, prepare
from parallel.batch import share_of_batch
from parallel.mesh import Mesh

# What a step reads its samples from: a dataset, or a reader that prepares them ahead of time.
Samples = Dataset | ReadAhead[HostBatch | NarrowBatch]


def open_samples(config: RunConfig, dataset: Dataset, mesh: Mesh) -> ReadAhead[HostBatch | NarrowBatch]:
    """A reader that prepares this rank's samples data.read_ahead steps ahead.

    Its ``expect`` has to be called with the steps to come, at the start and after each rollback.
    """
    return ReadAhead(
        dataset,
        lambda indices: share_of_batch(indices, config.train.micro_batch_size, mesh),
        lambda batch: prepare(batch, mesh),
        depth=config.data.read_ahead,
        n_further=config.model.mtp.depth if config.model.mtp is not None else 0,
    )


def why_out_of_data(
    stages: Stages, train: TrainConfig, step: int, consumed: int, skipped: Sequence[tuple[int, int]]
) -> str | None:
    """Why too few samples are left for the step after ``step``; None where there are enough.

    ``consumed`` is the number of the next sample, and ``skipped`` the ranges left out after rollbacks.
    """
    if stages.end is None or place_after(consumed, train.batches.size_at(step + 1), skipped) <= stages.end:
        return None
    left_out = sum(last - first for first, last in hopped_ranges(0, consumed, skipped))
    rule = f"leaves {stages.end} sequences in all, {left_out} were left out after rollbacks, and too few are left for"
    return f"data.sources.max_epochs {rule} step {step + 1}"


def out_of_data_line(why: str, step: int, error: str | None) -> str:
    """The line with which a run ends after ``step``, because of ``why_out_of_data``.

    ``error`` is the reason why that step could not be saved; None: it is saved.
    """
    if error is not None:
        return f"{why}; step {step} could not be saved ({error}): mend that, and start the run again"
    return f"{why}; step {step} is saved: lower train.steps to {step}"


def steps_to_come(
    train: TrainConfig, step: int, consumed: int, skipped: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, np.ndarray]]:
    """(step, numbers of its samples) of each step after ``step`` up to train.steps, as long as no rollback follows.

    ``consumed`` is the number of the next sample, and ``skipped`` the ranges left out after earlier rollbacks.
    """
    for following in range(step + 1, train.steps + 1):
        indices = take(consumed, train.batches.size_at(following), skipped)
        yield following, indices
        consumed = int(indices[-1]) + 1
