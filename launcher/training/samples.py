"""The samples of a run's steps: which they are, and how they come to this rank, read ahead by a thread."""

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

# What a step asks for its samples: a dataset, or what reads one ahead.
Samples = Dataset | ReadAhead[HostBatch | NarrowBatch]


def open_samples(config: RunConfig, dataset: Dataset, mesh: Mesh) -> ReadAhead[HostBatch | NarrowBatch]:
    """What reads the steps' samples for this rank, data.read_ahead steps ahead. ``expect`` says where the run is."""
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
    """The line where too few samples are left for the step after ``step``; None where there are enough."""
    if stages.end is None or place_after(consumed, train.batches.size_at(step + 1), skipped) <= stages.end:
        return None
    left_out = sum(last - first for first, last in hopped_ranges(0, consumed, skipped))
    rule = f"leaves {stages.end} sequences in all, {left_out} were left out after rollbacks, and too few are left for"
    return f"data.sources.max_epochs {rule} step {step + 1}; step {step} is saved: lower train.steps to {step}"


def steps_to_come(
    train: TrainConfig, step: int, consumed: int, skipped: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Each step after ``step`` and the numbers of its samples, as they are unless the run goes back."""
    for following in range(step + 1, train.steps + 1):
        indices = take(consumed, train.batches.size_at(following), skipped)
        yield following, indices
        consumed = int(indices[-1]) + 1
