"""Computes the log-likelihood of scored tokens under the sharded model, by the forward passes of an evaluation.

Shape letters: R rows, S sequence, B micro-batch, T tokens, V this rank's part of the vocabulary, N scored targets.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.batch import IGNORED
from launcher.tasks.windows import Rows, Window
from modeling.decoder import Output
from modeling.loss import Head, Losses
from parallel.batch import MicroBatch, cut_micro_batch
from parallel.context_parallel.part import held_positions
from parallel.mesh import Mesh

AT_ONCE = 64  # micro-batches in one call of ``run``, so that a pipeline is filled once for so many

Run = Callable[[list[MicroBatch]], Iterable[Output]]


@dataclass(frozen=True)
class Answer:
    """The model's answer for the scored tokens of one window."""

    loglikelihood: float  # the sum of their log-probabilities, in nats
    is_greedy: bool  # each of them is the likeliest token at its position


@dataclass(frozen=True)
class Seen:
    """The scored targets of one pass on one rank: losses, and the likeliest token of its part of the vocabulary."""

    index_N: np.ndarray  # int64: row x seq_len + column
    loss_N: np.ndarray  # fp32
    most_N: np.ndarray  # fp32: the largest logit of this rank's part of the vocabulary
    best_N: np.ndarray  # int64: the token of that logit


class HeadWatch:
    """While entered, records every scored target's loss and likeliest token in each pass of the head.

    Recording changes no number of the pass.
    """

    def __init__(self, head: Head | None, tp_rank: int) -> None:
        """``head`` is None where this rank has none; ``tp_rank`` determines which part of the vocabulary it has."""
        self.head, self.tp_rank = head, tp_rank
        self.passes: list[list[tuple[Tensor, Tensor, Tensor]]] = []

    def __enter__(self) -> "HeadWatch":
        if self.head is not None:
            self.head.watch = self.watch
        return self

    def __exit__(self, *_: object) -> None:
        if self.head is not None:
            self.head.watch = None

    def watch(self, losses: Losses) -> Losses:
        """The hook ``modeling.loss.Head.watch``: wraps the loss function so that each chunk is recorded."""
        chunks: list[tuple[Tensor, Tensor, Tensor]] = []
        self.passes.append(chunks)

        def noting(logits_TV: Tensor, targets_T: Tensor, wants: bool) -> tuple[Tensor, Tensor, Tensor | None]:
            scored_T = targets_T != IGNORED
            most_T, best_T = logits_TV.max(-1)  # before the logits are overwritten
            first_token = self.tp_rank * logits_TV.shape[1]
            found = losses(logits_TV, targets_T, wants)
            columns = (found[0].float(), most_T.float(), best_T + first_token)
            loss_N, most_N, best_N = (column[scored_T].cpu() for column in columns)
            chunks.append((loss_N, most_N, best_N))
            return found

        return noting


@torch.no_grad()
def score(
    run: Run, head: Head | None, windows: Sequence[Window], rows: Rows, micro_batch_size: int, mesh: Mesh
) -> list[Answer] | None:
    """The answer to each window, in order, on rank 0; None elsewhere. All ranks call it with the same rows.

    ``run`` executes forward passes, as for a held-out loss. Every rank executes the same number of passes of the same
    shape, since the passes communicate; micro-batches are filled up with rows whose targets do not count.
    """
    found = []
    for numbers in in_turns(len(rows.tokens_RS), micro_batch_size, mesh):
        with HeadWatch(head, mesh.tp.rank) as watch:
            batches = [micro_batch(rows, own, micro_batch_size, mesh) for own in numbers]
            for _ in run(batches):
                pass
        if head is not None:
            assert len(watch.passes) == len(batches), "one pass of the head for each micro-batch"
            found += [seen(rows, own, chunks, mesh) for own, chunks in zip(numbers, watch.passes, strict=True)]
    everyone = gathered(found, mesh)
    return None if everyone is None else answers(windows, rows, everyone)


def in_turns(n_rows: int, micro_batch_size: int, mesh: Mesh) -> Iterator[list[np.ndarray]]:
    """The row numbers of this rank's micro-batches, AT_ONCE micro-batches at a time.

    Every rank gets the same number of micro-batches; some may be empty.
    """
    starts = range(0, n_rows, micro_batch_size * mesh.dp.degree)
    own = [np.arange(n_rows)[start + mesh.dp.rank * micro_batch_size :][:micro_batch_size] for start in starts]
    for first in range(0, len(own), AT_ONCE):
        yield own[first : first + AT_ONCE]


def micro_batch(rows: Rows, own: np.ndarray, micro_batch_size: int, mesh: Mesh) -> MicroBatch:
    """The rows ``own``, filled up to ``micro_batch_size``, as this rank's micro-batch on its device."""
    filled = np.concatenate([own, np.zeros(micro_batch_size - len(own), np.int64)])
    targets_BS = rows.targets_RS[filled]
    targets_BS[len(own) :] = IGNORED
    arrays = (rows.tokens_RS[filled], targets_BS, rows.positions_RS[filled], rows.documents_RS[filled])
    tokens_BS, targets, positions_BS, documents_BS = (torch.from_numpy(array) for array in arrays)
    whole = (tokens_BS, targets, positions_BS, documents_BS)
    return cut_micro_batch(*whole, mesh, has_padding=rows.has_padding).to(mesh.device)


def seen(rows: Rows, own: np.ndarray, chunks: list[tuple[Tensor, Tensor, Tensor]], mesh: Mesh) -> Seen:
    """The scored targets of one pass with their positions in the rows; a cp rank has those of its positions."""
    seq_len, cp = rows.tokens_RS.shape[1], mesh.cp
    held_S = held_positions(seq_len, cp.rank, cp.degree).numpy() if cp.degree > 1 else np.arange(seq_len)
    index_BS = own[:, None] * seq_len + held_S
    scored_BS = rows.targets_RS[own][:, held_S] != IGNORED
    columns = [torch.cat(column).numpy() for column in zip(*chunks, strict=True)]
    return Seen(index_BS[scored_BS], *columns)


def gathered(found: list[Seen], mesh: Mesh) -> list[Seen] | None:
    """The scored targets of all ranks, rank after rank, on rank 0; None elsewhere. All ranks call it (a gather)."""
    if mesh.control is None:
        return found
    everyone: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
    dist.gather_object(found, everyone, dst=0, group=mesh.control)
    return None if everyone is None else [each for rank in everyone for each in rank]


def answers(windows: Sequence[Window], rows: Rows, everyone: Sequence[Seen]) -> list[Answer]:
    """The answer to each window; losses are summed in fp64 in token order, whichever ranks computed them."""
    loss_RS, best_RS = put_together(rows, everyone)
    found = []
    for window, (row, column) in zip(windows, rows.places, strict=True):
        at = row, slice(column, column + window.n_scored)
        is_greedy = bool((best_RS[at] == rows.targets_RS[at]).all())
        found.append(Answer(-float(loss_RS[at].sum(dtype=np.float64)), is_greedy))
    return found


def put_together(rows: Rows, everyone: Sequence[Seen]) -> tuple[np.ndarray, np.ndarray]:
    """(loss_RS, best_RS): each scored target's loss (fp32; elsewhere NaN) and likeliest token (elsewhere -1).

    All tp ranks have the same loss, and each the likeliest token of its part of the vocabulary; the largest logit wins,
    and of equal ones the first token. Raises RuntimeError where no rank has a scored target.
    """
    n = rows.targets_RS.size
    loss_N, most_N, best_N = np.full(n, np.nan, np.float32), np.full(n, -np.inf, np.float32), np.full(n, -1, np.int64)
    for each in everyone:
        better_N = (best_N[each.index_N] < 0) | (each.most_N > most_N[each.index_N])
        changed_N = each.index_N[better_N]
        most_N[changed_N], best_N[changed_N] = each.most_N[better_N], each.best_N[better_N]
        loss_N[each.index_N] = each.loss_N
    missing = int(((best_N < 0) & (rows.targets_RS.ravel() != IGNORED)).sum())
    if missing:
        raise RuntimeError(f"no rank has told the loss of {missing} of the tasks' tokens")
    return loss_N.reshape(rows.targets_RS.shape), best_N.reshape(rows.targets_RS.shape)
