"""One training step's passes over the model: which samples, which share of them, and the sums they leave.

Shape letters: B micro-batch, S sequence, E experts.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.batch import PADDING
from data.dataset import Dataset
from modeling.context import Context
from modeling.decoder import Decoder, Output
from modeling.moe import RoutingStats
from parallel.engine import Engine
from parallel.mesh import Mesh, sum_over_ranks


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences on this rank's device."""

    tokens_BS: Tensor
    targets_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor
    has_padding: bool


@dataclass
class Totals:
    """Sums over the whole global batch, the same on every rank."""

    loss: float  # of the targets' cross-entropies
    counts: dict[int, np.ndarray]  # layer -> token-expert pairs processed by each expert
    entropy: dict[int, float]  # layer -> sum over tokens, nats
    balance_loss: dict[int, float]  # layer -> sum over sequences
    z_loss: dict[int, float]  # layer -> sum over tokens


def share_of_batch(indices: np.ndarray, micro_batch_size: int, mesh: Mesh) -> np.ndarray:
    """This rank's samples, (n, micro_batch_size): a batch's micro-batches are dealt to the ranks of dp in turn."""
    return indices.reshape(-1, micro_batch_size)[mesh.dp.rank :: mesh.dp.degree]


def read_micro_batch(dataset: Dataset, indices: np.ndarray, device: torch.device) -> MicroBatch:
    """The samples, packed, on the device."""
    batch = dataset.read(indices)
    arrays = (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)
    tensors = [torch.from_numpy(array).to(device, non_blocking=True) for array in arrays]
    return MicroBatch(*tensors, has_padding=bool((batch.documents_BS == PADDING).any()))


def accumulate_gradients(engine: Engine, dataset: Dataset, indices: np.ndarray, micro_batch_size: int) -> Totals:
    """The whole batch forward and backward; leaves gradients in the engine and returns the sums. All ranks call it.

    The loss is the sum of the cross-entropies divided by the number of targets of the whole batch, which every rank
    counts before its first backward pass; so it depends neither on micro-batches nor on ranks.
    """
    mesh = engine.mesh
    n_targets, n_tokens = dataset.count(indices)
    scale = engine.loss_scale * mesh.replicas.degree  # DeepSpeed averages gradients over dp x cp
    mine = share_of_batch(indices, micro_batch_size, mesh)
    sums = Sums()
    for number, part in enumerate(mine):
        batch = read_micro_batch(dataset, part, mesh.device)
        context = Context(
            batch.positions_BS,
            batch.documents_BS,
            balance_scale=scale / len(indices),
            z_scale=scale / n_tokens,
            has_padding=batch.has_padding,
        )
        output = engine.model(batch.tokens_BS, context, batch.targets_BS)
        engine.backward(output.loss * (scale / n_targets), last=number == len(mine) - 1)
        sums.add(output)
    return sums.over_ranks(mesh)


@torch.no_grad()
def evaluate(model: Decoder, dataset: Dataset, n_sequences: int, micro_batch_size: int, mesh: Mesh) -> float:
    """Token cross-entropy of the first held-out samples, normalized as the training loss. All ranks call it."""
    indices = np.arange(min(n_sequences, dataset.n_samples))
    n_targets, _ = dataset.count(indices)
    sums = Sums()
    for start in range(0, len(indices), micro_batch_size * mesh.dp.degree):
        first = start + mesh.dp.rank * micro_batch_size
        part = indices[first : first + micro_batch_size]
        # A rank with nothing left still runs: under ZeRO 3 the others wait for its part of the weights.
        batch = read_micro_batch(dataset, part if len(part) else indices[:1], mesh.device)
        context = Context(batch.positions_BS, batch.documents_BS, has_padding=batch.has_padding)
        output = model(batch.tokens_BS, context, batch.targets_BS)
        sums.add(output, weight=1.0 if len(part) else 0.0)
    return sums.over_ranks(mesh).loss / max(1, n_targets)


class Sums:
    """Running sums of this rank's passes, kept in fp64 on the device until the step's end."""

    def __init__(self) -> None:
        self.loss: Tensor | float = 0.0
        self.layers: dict[int, Tensor] = {}  # layer -> entropy, balance loss, z-loss, counts

    def add(self, output: Output, weight: float = 1.0) -> None:
        """Adds one forward pass, times ``weight``."""
        assert output.loss is not None
        self.loss = self.loss + output.loss.detach() * weight
        for layer, stats in output.stats.items():
            row = _layer_row(stats) * weight
            self.layers[layer] = self.layers[layer] + row if layer in self.layers else row

    def over_ranks(self, mesh: Mesh) -> Totals:
        """The sums over all ranks, by one all-reduce of a small fp64 vector. All ranks call it."""
        layers = sorted(self.layers)
        loss = torch.as_tensor(self.loss, dtype=torch.float64, device=mesh.device).reshape(1)
        packed = torch.cat([loss, *(self.layers[layer] for layer in layers)]).cpu()
        total = sum_over_ranks(packed, mesh)
        rows = total[1:].view(len(layers), -1) if layers else torch.zeros(0, 3)
        by_layer = dict(zip(layers, rows, strict=True))
        return Totals(
            loss=float(total[0]),
            counts={layer: row[3:].to(torch.int64).numpy() for layer, row in by_layer.items()},
            entropy={layer: float(row[0]) for layer, row in by_layer.items()},
            balance_loss={layer: float(row[1]) for layer, row in by_layer.items()},
            z_loss={layer: float(row[2]) for layer, row in by_layer.items()},
        )


def _layer_row(stats: RoutingStats) -> Tensor:
    scalars = torch.stack([stats.entropy, stats.balance_loss, stats.z_loss]).double()
    return torch.cat([scalars, stats.counts_E.double()])
