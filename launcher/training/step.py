"""One training step's forward and backward passes over this rank's samples, and the sums that they produce.

Shape letters: B micro-batch, S sequence, E experts.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data.batch import IGNORED, Batch
from data.dataset import Dataset
from launcher.training.batches import NarrowBatch, prepare
from launcher.training.samples import Samples
from modeling.config import ModelConfig
from modeling.decoder import Output
from modeling.dropout import Draws
from modeling.metrics import metrics_of
from modeling.moe import RoutingStats
from parallel.batch import MicroBatch, cut_micro_batch, share_of_batch
from parallel.mesh import Mesh, max_over_ranks, sum_over_ranks
from parallel.processes.stop import StopRequest, elected
from parallel.zero.engine import Engine

# (the run's seed, the update's number from 1): dropout's masks depend on these and on the place in the batch.
DrawnFrom = tuple[int, int]


@dataclass
class Totals:
    """Sums and maxima over the whole global batch, the same on every rank."""

    loss: float  # sum of the targets' cross-entropies
    z_loss: float  # sum of their squared logsumexps
    further_losses: list[float]  # by depth, the sum of the cross-entropies of tokens further ahead
    counts: dict[int, np.ndarray]  # layer -> token-expert pairs processed by each expert
    metrics: dict[str, dict[int, float]]  # name in RoutingStats -> layer -> sum, or largest value
    stop_signal: int | None  # the signal by which some rank was asked to stop


def read_micro_batch(
    dataset: Samples,
    indices: np.ndarray,
    mesh: Mesh,
    balance_scale: float = 0.0,
    z_scale: float = 0.0,
    *,
    expects_padding: bool = False,
    drawn_from: DrawnFrom | None = None,
    ahead_scales: Sequence[float] = (),
) -> MicroBatch:
    """This rank's share of the samples, on its device. Ranks of cp, tp and pp read the same samples.

    ``balance_scale`` and ``z_scale`` are the weights of a sequence's balance loss and of a token's router z-loss in the
    total loss; ``ahead_scales`` are, by depth, those of a token further ahead. With ``expects_padding`` the model runs
    the operations that skip padding even where there is none. ``drawn_from`` seeds dropout; None drops nothing.
    """
    read = dataset.read(indices)
    given = prepare(read, mesh) if isinstance(read, Batch) else read
    samples_B, places_S = torch.from_numpy(indices.astype(np.int64)), torch.arange(given.seq_len)
    draws = None if drawn_from is None else Draws(*drawn_from, samples_B, places_S)
    if isinstance(given, NarrowBatch):
        batch, draws = given.spread(mesh.device), None if draws is None else draws.to(mesh.device)
    else:
        batch = given
    inputs = (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)
    has_padding, scales = expects_padding or batch.has_padding, (balance_scale, z_scale)
    further = {"ahead_scales": ahead_scales, "next_BS": batch.next_BS}
    cut = cut_micro_batch(*inputs, mesh, *scales, has_padding=has_padding, draws=draws, **further)
    if not isinstance(given, NarrowBatch):
        return cut.to(mesh.device)
    if mesh.device.type != "cpu":  # on a CPU a context finds what it needs when it is asked
        given.tell(cut.context)
    return cut


@dataclass(frozen=True)
class Weights:
    """The weight of each kind of loss of one batch in the total that is differentiated."""

    target: float  # a target's cross-entropy; the engine's factor comes on top
    balance: float  # a sequence's balance loss
    z: float  # a token's router z-loss
    further: tuple[float, ...] = ()  # by depth, the cross-entropy of a token further ahead


def weights_of(engine: Engine, dataset: Samples, indices: np.ndarray) -> Weights:
    """The weights of the losses for the batch of the samples ``indices``: each loss counts as a mean over the batch."""
    n_targets, n_tokens = dataset.count(indices)
    return Weights(
        target=1 / max(1, n_targets),
        balance=engine.loss_factor / len(indices),
        z=engine.loss_factor / max(1, n_tokens),
        further=tuple(further_scales(engine, dataset, indices)),
    )


def accumulate_gradients(
    engine: Engine,
    dataset: Samples,
    indices: np.ndarray,
    micro_batch_size: int,
    stop: StopRequest,
    drawn_from: DrawnFrom,
    weights: Weights | None = None,
) -> Totals:
    """Runs the whole batch forward and backward, leaves gradients in the engine and returns sums. All ranks call it.

    ``drawn_from`` seeds dropout. ``weights`` are computed from ``indices`` unless given, as for a part of a batch.

    The loss is the sum of the cross-entropies divided by the number of targets of the whole batch, which every rank
    counts before its first backward pass; so it depends neither on micro-batches nor on ranks. Where no target
    counts, it and its gradients are 0; the caller has to drop those of the auxiliary losses.
    """
    mesh = engine.mesh
    weights = weights or weights_of(engine, dataset, indices)
    mine = share_of_batch(indices, micro_batch_size, mesh)
    same_graph = engine.needs_equal_graphs  # the way around padding saves something before the experts
    moment = drawn_from if engine.model_config.has_dropout else None
    scales: dict[str, Any] = {"balance_scale": weights.balance, "z_scale": weights.z, "ahead_scales": weights.further}
    batches = (
        read_micro_batch(dataset, part, mesh, **scales, expects_padding=same_graph, drawn_from=moment) for part in mine
    )
    sums = Sums(engine.model_config)
    if engine.pipeline is not None:
        for output in engine.run_pipeline(list(batches), weights.target):
            sums.add(output)
        return sums.over_ranks(mesh, stop)
    for number, batch in enumerate(batches):
        output = engine.model(batch.tokens_BS, batch.context, batch.targets_BS, ahead=batch.ahead)
        engine.backward(output.loss, weights.target, last=number == len(mine) - 1)
        sums.add(output)
    return sums.over_ranks(mesh, stop)


def further_scales(engine: Engine, dataset: Samples, indices: np.ndarray) -> list[float]:
    """By depth, the weight of the cross-entropy of one token further ahead in the total; empty without model.mtp.

    Each depth's loss is the mean over its own targets of the whole batch, and model.mtp.coefficient weighs the mean
    over the depths.
    """
    mtp = engine.model_config.mtp
    if mtp is None:
        return []
    factor = engine.loss_factor * mtp.coefficient / mtp.depth
    return [factor / max(1, count) for count in dataset.count_further(indices, mtp.depth)]


def further_losses(totals: Totals, counts: Sequence[int]) -> dict[str, float]:
    """The fields "mtp/loss_k" of a row of metrics.jsonl: the mean cross-entropy of the tokens k + 1 places ahead.

    ``counts`` are the numbers of targets by depth, in the whole batch.
    """
    pairs = enumerate(zip(totals.further_losses, counts, strict=True), 1)
    return {f"mtp/loss_{k}": loss / max(1, count) for k, (loss, count) in pairs}


def agree_to_stop(stop: StopRequest, mesh: Mesh) -> int | None:
    """The signal by which some rank was asked to stop, the same on all ranks, or None. All ranks call it; 16 bytes.

    It is called after long work between steps. Within a step, ranks exchange this along with the step's sums.
    """
    return elected(sum_over_ranks(torch.tensor(stop.votes(), dtype=torch.float64), mesh).tolist())


@torch.no_grad()
def evaluate(
    run: Callable[[list[MicroBatch]], Iterable[Output]],
    config: ModelConfig,
    dataset: Dataset,
    n_sequences: int,
    micro_batch_size: int,
    mesh: Mesh,
    first: int = 0,
) -> float:
    """Mean cross-entropy per target of ``n_sequences`` held-out samples from ``first`` on. All ranks call it.

    ``run`` makes the forward passes. Every rank makes the same number of them, with the same shapes, since ranks wait
    for each other within them: missing samples are filled with ones whose targets do not count.
    """
    indices = np.arange(first, min(first + n_sequences, dataset.n_samples))
    n_targets, _ = dataset.count(indices)
    batches = []
    for start in range(0, len(indices), micro_batch_size * mesh.dp.degree):
        own = start + mesh.dp.rank * micro_batch_size
        part = indices[own : own + micro_batch_size]
        filled = np.concatenate([part, np.zeros(micro_batch_size - len(part), dtype=part.dtype)])
        batch = read_micro_batch(dataset, filled, mesh)
        batch.targets_BS[len(part) :] = IGNORED
        batches.append(batch)
    sums = Sums(config)
    for output in run(batches):
        sums.add(output)
    return sums.over_ranks(mesh, StopRequest()).loss / max(1, n_targets)


class Sums:
    """Running sums and maxima over this rank's forward passes, kept on the device until the step's end."""

    def __init__(self, config: ModelConfig) -> None:
        self.moe_layers = [layer for layer in config.all_layers if config.is_moe_layer(layer)]
        self.n_experts = config.moe.n_experts if config.moe is not None else 0
        self.loss: Tensor | float = 0.0
        self.z_loss: Tensor | float = 0.0
        self.further_losses: list[Tensor | float] = [0.0 for _ in config.mtp_layers]
        self.layers: dict[int, Tensor] = {}  # MoE layer on this rank -> fp64 row: summed metrics, then experts' counts
        self.maxima: dict[int, Tensor] = {}  # MoE layer on this rank -> fp64 row: metrics whose largest value counts

    def add(self, output: Output) -> None:
        """Adds the losses and routing statistics of one forward pass."""
        if output.loss is not None:
            assert output.z_loss is not None
            self.loss, self.z_loss = self.loss + output.loss.detach(), self.z_loss + output.z_loss
        for depth, loss in enumerate(output.further_losses):
            self.further_losses[depth] = self.further_losses[depth] + loss
        for layer, stats in output.stats.items():
            row = torch.cat([_scalars(stats, "sum"), stats.counts_E.double()])
            self.layers[layer] = self.layers[layer] + row if layer in self.layers else row
            most = _scalars(stats, "max")
            self.maxima[layer] = torch.maximum(self.maxima[layer], most) if layer in self.maxima else most

    def over_ranks(self, mesh: Mesh, stop: StopRequest) -> Totals:
        """The totals over all ranks: one all-reduce of a small fp64 vector on the device, and one for maxima, if any.

        All ranks call it. On CUDA the host waits for the sums to be copied.
        """
        votes = stop.votes()
        total = sum_over_ranks(self.packed(mesh, votes), mesh).cpu()
        n_losses, summed = 2 + len(self.further_losses), metrics_of(RoutingStats, "sum")
        told, losses, rows = total.split([len(votes), n_losses, len(total) - len(votes) - n_losses])
        rows = rows.view(len(self.moe_layers), len(summed) + self.n_experts)
        by_layer = dict(zip(self.moe_layers, rows, strict=True))
        return Totals(
            loss=float(losses[0]),
            z_loss=float(losses[1]),
            further_losses=losses[2:].tolist(),
            counts={layer: row[len(summed) :].to(torch.int64).numpy() for layer, row in by_layer.items()},
            metrics=_by_name(summed, by_layer) | self.maxima_over_ranks(mesh),
            stop_signal=elected(told.tolist()),
        )

    def packed(self, mesh: Mesh, votes: Sequence[float]) -> Tensor:
        """This rank's summand of the totals, fp64 on the device: votes to stop, losses, and each MoE layer's row.

        Ranks of tp hold the same losses, and ranks of tp and cp the same sums over sequences, so each adds its share.
        The votes to stop are included so that all ranks learn of a request after the same step. Numbers that the host
        knows are filled in on the device: copying them would make a CUDA device's host wait.
        """
        double: dict[str, Any] = {"dtype": torch.float64, "device": mesh.device}
        known = [torch.full((), float(vote), **double) for vote in votes]
        sums = (self.loss, self.z_loss, *self.further_losses)
        losses = [each.double() if isinstance(each, Tensor) else torch.full((), each, **double) for each in sums]
        summed = metrics_of(RoutingStats, "sum")
        for row in self.layers.values():
            for column, metric in enumerate(summed.values()):
                row[column] /= mesh.tp.degree * mesh.cp.degree if metric.mean_over == "sequences" else 1
        rows = self.on_all_layers(self.layers, len(summed) + self.n_experts, 0.0, mesh)
        return torch.cat([torch.stack(known), torch.stack(losses) / mesh.tp.degree, rows])

    def maxima_over_ranks(self, mesh: Mesh) -> dict[str, dict[int, float]]:
        """The metrics that are reduced by their largest value: name -> layer -> value. All ranks call it."""
        names = metrics_of(RoutingStats, "max")
        rows = self.on_all_layers(self.maxima, len(names), -math.inf, mesh)
        total = max_over_ranks(rows, mesh).cpu() if len(rows) else rows.cpu()
        return _by_name(names, dict(zip(self.moe_layers, total.view(len(self.moe_layers), len(names)), strict=True)))

    def on_all_layers(self, rows: dict[int, Tensor], n_columns: int, nothing: float, mesh: Mesh) -> Tensor:
        """The rows of all MoE layers as one flat vector; ``nothing`` stands for layers that other ranks hold."""
        empty = torch.full((n_columns,), nothing, dtype=torch.float64, device=mesh.device)
        return torch.cat([empty[:0], *(rows.get(layer, empty) for layer in self.moe_layers)])


def _scalars(stats: RoutingStats, reduce: Literal["sum", "max"]) -> Tensor:
    """The metrics of ``stats`` that are reduced in this way, as one fp64 vector."""
    values = [getattr(stats, name).double() for name in metrics_of(RoutingStats, reduce)]
    return torch.stack(values) if values else stats.counts_E.new_empty(0, dtype=torch.float64)


def _by_name(names: Iterable[str], rows: Mapping[int, Tensor]) -> dict[str, dict[int, float]]:
    """Name -> layer -> value, from each layer's row with a column for each name."""
    return {name: {layer: float(row[column]) for layer, row in rows.items()} for column, name in enumerate(names)}
