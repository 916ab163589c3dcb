"""The samples of a run's steps: which they are, and how they come to this rank, read ahead by a thread.

Shape letters: B micro-batch, S sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.dataset import Dataset
from data.order import take
from data.read_ahead import ReadAhead
from launcher.config.tree import RunConfig, TrainConfig
from parallel.batch import share_of_batch
from parallel.mesh import Mesh


@dataclass(frozen=True)
class HostBatch:
    """A batch as tensors in the host's memory, page-locked where a GPU is to copy it. See ``data.batch.Batch``."""

    tokens_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor
    has_padding: bool


# What a step asks for its samples: a dataset, or what reads one ahead.
Samples = Dataset | ReadAhead[HostBatch]


def on_host(batch: Batch, device: torch.device) -> HostBatch:
    """The batch's arrays as tensors. For a CUDA device they are copied into page-locked memory: of any thread."""
    arrays = (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":
        with torch.cuda.device(device):  # another thread's device would be the first one, which belongs to rank 0
            tensors = [tensor.pin_memory() for tensor in tensors]
    return HostBatch(*tensors, has_padding=batch.has_padding)


def open_samples(config: RunConfig, dataset: Dataset, mesh: Mesh) -> ReadAhead[HostBatch]:
    """What reads the steps' samples for this rank, data.read_ahead steps ahead. ``expect`` says where the run is."""
    return ReadAhead(
        dataset,
        lambda indices: share_of_batch(indices, config.train.micro_batch_size, mesh),
        lambda batch: on_host(batch, mesh.device),
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
