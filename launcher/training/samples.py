"""The samples of a run's steps: which they are, and how they come to this rank, read ahead by a thread."""

from collections.abc import Iterator, Sequence

import numpy as np

from data.dataset import Dataset
from data.order import take
from data.read_ahead import ReadAhead
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


def steps_to_come(
    train: TrainConfig, step: int, consumed: int, skipped: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Each step after ``step`` and the numbers of its samples, as they are unless the run goes back."""
    for following in range(step + 1, train.steps + 1):
        indices = take(consumed, train.batches.size_at(following), skipped)
        yield following, indices
        consumed = int(indices[-1]) + 1
