"""Records one step in detail on each rank: targets' losses, routers' choices, gradient and update norms.

Recording changes no number of the step. Shape letters: N this rank's samples, P positions, T tokens, K top_k,
E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.prove.compare.outputs import in_backward
from launcher.prove.compare.routing import routers_of
from launcher.training.worst import Held, add_up, held_sums
from modeling.loss import Losses
from modeling.router import ReviseChoice, keep_choice
from parallel.batch import share_of_batch
from parallel.context_parallel.part import held_positions
from parallel.zero.engine import Engine, StepResult


@dataclass
class Weighed:
    """This rank's shares of one logical tensor's squared norms: gradient, weight and update."""

    held: Held
    update: float = 0.0


@dataclass
class StepSeen:
    """The details of one step as one rank has them, or merged over all ranks.

    Each entry of ``losses`` has sample indices [N], positions [P] and the targets' losses [N, P].
    """

    losses: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    counts: dict[int, np.ndarray] = field(default_factory=dict)  # layer -> tokens that chose each expert
    tensors: dict[str, Weighed] = field(default_factory=dict)

    def losses_of(self, indices: np.ndarray, seq_len: int) -> np.ndarray:
        """The loss of each target of the samples ``indices``, fp32 [samples, positions]; NaN where none is known."""
        rows = {int(sample): row for row, sample in enumerate(indices.tolist())}
        found = np.full((len(indices), seq_len), np.nan, np.float32)
        for samples_N, positions_P, losses_NP in self.losses:
            of_samples = np.array([rows[int(sample)] for sample in samples_N])
            found[of_samples[:, None], positions_P] = losses_NP
        return found


class WatchedEngine(Engine):
    """An engine that records each tensor's gradient, weight and update norm while ``watching`` is not None."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.watching: dict[str, Weighed] | None = None
        super().__init__(*arguments, **options)

    def step(self, lr: float) -> StepResult:
        """Applies the step like ``Engine.step``; while watching it also holds a copy of this rank's fp32 masters."""
        if self.watching is None:
            return super().step(lr)
        self.note_gradients(self.watching)
        owned = [fragment for fragment in self.fragments if fragment.is_owner]
        before = [self.pieces(fragment)["weight"].clone() for fragment in owned]
        result = super().step(lr)
        for fragment, weight in zip(owned, before, strict=True):
            update = self.pieces(fragment)["weight"] - weight
            square = float(torch.linalg.vector_norm(update, dtype=torch.float64)) ** 2
            self.watching[fragment.name].update += square
        return result

    def discard(self) -> StepResult:
        """Drops the gradients like ``Engine.discard``, after recording them; the recorded update is zero."""
        if self.watching is not None:
            self.note_gradients(self.watching)
        return super().discard()

    def note_gradients(self, into: dict[str, Weighed]) -> None:
        """Records the norms of the gradients before clipping and of the weights before the update."""
        for name, held in held_sums(self).items():
            into[name] = Weighed(held)


class StepWatch:
    """Records one step of an engine: create it before the step, call ``seen`` after it, and ``close`` to stop."""

    def __init__(self, engine: WatchedEngine, indices: np.ndarray, micro_batch_size: int) -> None:
        self.engine = engine
        self.mine = share_of_batch(indices, micro_batch_size, engine.mesh)
        self.passes: list[list[Tensor]] = []  # for each pass of the head, the losses of its chunks
        self.counts: dict[int, Tensor] = {}
        engine.watching = {}
        if engine.model.head is not None:
            engine.model.head.watch = self.watch_head
        moe = engine.model_config.moe
        for layer, router in routers_of(engine.model).items():
            assert moe is not None
            router.revise_choice = self.counting(layer, moe.n_experts)

    def watch_head(self, losses: Losses) -> Losses:
        """The hook ``modeling.loss.Head.watch``: wraps the loss function so that each chunk's losses are kept."""
        chunks: list[Tensor] = []
        self.passes.append(chunks)

        def noting(logits_TV: Tensor, targets_T: Tensor, wants: bool) -> tuple[Tensor, Tensor, Tensor | None]:
            found = losses(logits_TV, targets_T, wants)
            chunks.append(found[0].detach().clone())
            return found

        return noting

    def counting(self, layer: int, n_experts: int) -> ReviseChoice:
        """The hook ``modeling.router.Router.revise_choice`` of one layer: counts tokens by expert, changes nothing.

        Choices made again when activations are recomputed in the backward pass are not counted.
        """

        def revise_choice(_: Tensor, indices_TK: Tensor) -> Tensor:
            if not in_backward():
                counts_E = torch.bincount(indices_TK.flatten(), minlength=n_experts)
                self.counts[layer] = self.counts[layer] + counts_E if layer in self.counts else counts_E
            return indices_TK

        return revise_choice

    def close(self) -> None:
        """Removes the hooks from the engine, so that another step may be watched."""
        self.engine.watching = None
        if self.engine.model.head is not None:
            self.engine.model.head.watch = None
        for router in routers_of(self.engine.model).values():
            router.revise_choice = keep_choice

    def seen(self, seq_len: int, n_further: int) -> StepSeen:
        """The details of the step on this rank.

        ``n_further`` is the number of multi-token-prediction passes of the head that follow each micro-batch's own
        pass and are left out. All tp ranks have the same losses, so only tp rank 0 returns them; each cp rank returns
        those of its part of the sequences.
        """
        mesh, watching = self.engine.mesh, self.engine.watching
        assert watching is not None
        seen = StepSeen(tensors=watching)
        seen.counts = {layer: counts_E.cpu().numpy() for layer, counts_E in self.counts.items()}
        if mesh.tp.rank == 0 and self.passes:
            positions_P = (
                held_positions(seq_len, mesh.cp.rank, mesh.cp.degree) if mesh.cp.degree > 1 else torch.arange(seq_len)
            )
            for samples_N, chunks in zip(self.mine, self.passes[:: 1 + n_further], strict=True):
                losses_NP = torch.cat(chunks).float().cpu().view(len(samples_N), len(positions_P))
                seen.losses.append((samples_N, positions_P.numpy(), losses_NP.numpy()))
        return seen


def gather_seen(mine: StepSeen, engine: Engine) -> StepSeen | None:
    """The details of all ranks merged, on rank 0; None elsewhere. All ranks call it (a gather to rank 0)."""
    mesh = engine.mesh
    everyone: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
    dist.gather_object(mine, everyone, dst=0, group=mesh.control)
    return merged(everyone, list(engine.layout)) if everyone is not None else None


def merged(parts: Sequence[StepSeen], names: Sequence[str]) -> StepSeen:
    """The parts of all ranks summed up, with the tensors in the order of ``names``."""
    total = StepSeen([piece for part in parts for piece in part.losses])
    for part in parts:
        for layer, counts_E in part.counts.items():
            total.counts[layer] = total.counts[layer] + counts_E if layer in total.counts else counts_E
    for name in names:
        found = [part.tensors[name] for part in parts if name in part.tensors]
        if found:
            total.tensors[name] = Weighed(add_up([each.held for each in found]), sum(each.update for each in found))
    total.counts = dict(sorted(total.counts.items()))
    return total
