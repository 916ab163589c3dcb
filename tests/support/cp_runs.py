"""Attention over a cp axis of gloo processes: cases, what each rank runs, and the comparison with one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling.context import PADDING, Context
from modeling.score_terms import Alibi, Buckets, ScoreTerms

D_HEAD = 8
HELD = ("out", "dq", "dk", "dv")  # tensors of which each rank has its own positions


@dataclass(frozen=True)
class Case:
    """One attention problem over whole sequences; its tensors are determined by its fields."""

    rows: tuple[tuple[int, ...], ...]  # for each row of the batch, the documents' lengths; a negative one is padding
    n_heads: int = 4
    n_kv_heads: int = 2
    d_v: int = D_HEAD  # channels of a value; of queries and keys D_HEAD
    window: int | None = None
    seed: int = 0
    dtype: torch.dtype = torch.float32
    changed_document: int | None = None  # the document of row 0 whose tokens are replaced by others
    tile: int = 1024
    has_slopes: bool = False
    has_sinks: bool = False
    has_bias: bool = False
    cap: float | None = None
    by_pieces: bool = False  # ring attention by pieces, as with a variable-length kernel, whose formula is used

    def terms(self) -> ScoreTerms:
        """The case's score terms; sinks and bias are leaves that require gradients, one sink above most scores.

        There are slopes or a bias, not both. Distances within short documents fall in several buckets of each kind.
        """
        alibi = Alibi(self.n_heads, range(self.n_heads)) if self.has_slopes and not self.has_bias else None
        sinks_H = torch.linspace(-2, 3, self.n_heads).requires_grad_() if self.has_sinks else None
        if not self.has_bias:
            return ScoreTerms(alibi, sinks_H, cap=self.cap)
        bias_HN = torch.randn(self.n_heads, 6, generator=torch.Generator().manual_seed(self.seed)).requires_grad_()
        return ScoreTerms(None, sinks_H, bias_HN, Buckets(6, 11), self.cap)

    def context(self) -> Context:
        positions, documents = [], []
        for lengths in self.rows:
            positions.append([place if length > 0 else 0 for length in lengths for place in range(abs(length))])
            numbers = [number if length > 0 else PADDING for number, length in enumerate(lengths)]
            documents.append([n for n, length in zip(numbers, lengths, strict=True) for _ in range(abs(length))])
        documents_BN = torch.tensor(documents)
        return Context(torch.tensor(positions), documents_BN, has_padding=bool((documents_BN == PADDING).any()))

    def at_tokens(self, out: Tensor) -> Tensor:
        """The output (B, N, ...) or its gradient with zeros in padding, where results are not defined."""
        is_padding_BN = self.context().documents_BS == PADDING
        return out.masked_fill(is_padding_BN.view(*is_padding_BN.shape, *[1] * (out.dim() - 2)), 0)

    def tensors(self) -> list[Tensor]:
        """q, k, v and the output's gradient, (B, N, heads, C) in natural order."""
        generator, other = (torch.Generator().manual_seed(self.seed + extra) for extra in (0, 1000))
        documents_BN = self.context().documents_BS
        tensors = []
        keys, values = (self.n_kv_heads, D_HEAD), (self.n_kv_heads, self.d_v)
        for heads in ((self.n_heads, D_HEAD), keys, values, (self.n_heads, self.d_v)):
            tensor = torch.randn((*documents_BN.shape, *heads), generator=generator)
            if self.changed_document is not None and len(tensors) < 3:
                changed = documents_BN[0] == self.changed_document
                tensor[0, changed] = 100 * torch.randn(tensor[0, changed].shape, generator=other)
            tensors.append(tensor.to(self.dtype))
        return [*tensors[:3], self.at_tokens(tensors[3])]


@dataclass
class Answer:
    """Outputs and gradients in natural order, and the bytes that each rank sent to others."""

    tensors: dict[str, Tensor]  # out, dq, dk, dv
    sent_forward: tuple[int, ...] = ()
    sent_backward: tuple[int, ...] = ()


def reference(case: Case) -> Answer:
    """The exact answer: one process, by the formula of attention, in fp32 on the same (rounded) inputs."""
    from kernel_references import attend_reference

    *heads, grad = (tensor.float() for tensor in case.tensors())
    heads = [tensor.requires_grad_() for tensor in heads]
    terms = case.terms()
    out = attend_reference(heads[0], heads[1], heads[2], case.context(), case.window, terms)
    return Answer({"out": case.at_tokens(out.detach()), **gradients(out, heads, terms, grad)})


def gradients(out: Tensor, heads: list[Tensor], terms: ScoreTerms, grad: Tensor) -> dict[str, Tensor]:
    """The gradients of the output by queries, keys and values, and by sinks and bias where there are any."""
    leaves = {"dq": heads[0], "dk": heads[1], "dv": heads[2]}
    if terms.sinks_H is not None:
        leaves["dsinks"] = terms.sinks_H
    if terms.bias_HN is not None:
        leaves["dbias"] = terms.bias_HN
    return dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], grad), strict=True))


def run_cases(kind: str, cases: Sequence[Case], cp: int, *, n_axes: int = 1, fault: str | None = None) -> list[Answer]:
    """The answers to the cases on ``n_axes`` cp axes at once, which must agree bit for bit.

    The axes are interleaved: rank = cp_rank * n_axes + axis. ``fault``: a fault of ``cp_faults`` to plant.
    """
    from parallel.context_parallel.part import natural_order
    from parallel.processes.start import run_ranks

    by_rank = run_ranks(attend_rank, cp * n_axes, kind, cases, cp, fault, timeout_seconds=200, threads=1)
    answers = []
    for number in range(len(cases)):
        axes = []
        for axis in range(n_axes):
            shares = [by_rank[rank * n_axes + axis][number] for rank in range(cp)]
            rank_major = {name: torch.cat([share[0][name] for share in shares], dim=1) for name in HELD}
            tensors = {name: part[:, natural_order(part.shape[1], cp)] for name, part in rank_major.items()}
            tensors["out"] = cases[number].at_tokens(tensors["out"])
            for name in ("dsinks", "dbias"):
                if name in shares[0][0]:
                    tensors[name] = sum(share[0][name] for share in shares)
            axes.append(Answer(tensors, *(tuple(share[place] for share in shares) for place in (1, 2))))
        for other in axes[1:]:
            assert all(torch.equal(other.tensors[name], part) for name, part in axes[0].tensors.items())
        answers.append(axes[0])
    return answers


def attend_rank(
    kind: Any, cases: Sequence[Case], cp: int, fault: str | None
) -> list[tuple[dict[str, Tensor], int, int]]:
    """One rank: for each case its share of outputs and gradients, and the bytes that it sent forward and backward."""
    from cp_faults import plant
    from kernel_references import like_flash
    from parallel.context_parallel.context import split_context
    from parallel.context_parallel.core import make_core
    from parallel.context_parallel.part import take_share
    from parallel.mesh import close_mesh

    plant(fault)
    axis = open_axis(cp)
    sent = count_bytes()
    results = []
    for case in cases:
        core = make_core(kind, axis, case.tile, kernel=like_flash() if case.by_pieces else None)
        *heads, grad = (take_share(tensor, axis) for tensor in case.tensors())
        heads = [tensor.requires_grad_() for tensor in heads]
        terms, before = case.terms(), sum(sent)
        out = core(heads[0], heads[1], heads[2], split_context(case.context(), axis), case.window, terms)
        between = sum(sent)
        shares = {"out": out.detach(), **gradients(out, heads, terms, grad)}
        results.append((shares, between - before, sum(sent) - between))
    close_mesh()
    return results


def open_axis(cp: int) -> Any:
    """This process's cp axis of ``cp`` interleaved ranks of the world, so that global and cp ranks differ."""
    import os

    import torch.distributed as dist

    from parallel.mesh import Axis

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    n_axes = world_size // cp
    lines = [tuple(range(first, world_size, n_axes)) for first in range(n_axes)]
    groups = [dist.new_group(list(line)) for line in lines]
    mine = rank % n_axes
    return Axis(rank // n_axes, cp, lines[mine], groups[mine])


def count_bytes() -> list[int]:
    """A list that grows by the bytes of every message that this process sends to another one from now on."""
    import torch.distributed as dist

    sent: list[int] = []
    all_to_all, exchange = dist.all_to_all_single, dist.batch_isend_irecv

    def counted_all_to_all(arriving: Tensor, leaving: Tensor, *, group: Any) -> Any:
        n_ranks = dist.get_world_size(group)
        sent.append(leaving.nbytes // n_ranks * (n_ranks - 1))
        return all_to_all(arriving, leaving, group=group)

    def counted_exchange(operations: Any) -> Any:
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return exchange(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = counted_all_to_all, counted_exchange
    return sent


def errors(ours: Answer, exact: Answer) -> dict[str, float]:
    """Each tensor's distance (2-norm), relative to its own norm; gradients relative to the largest gradient's norm.

    Gradients are compared with the largest because one may vanish: dq of a query that sees one key is only rounding.
    """
    gradient = max(float(exact.tensors[name].norm()) for name in ("dq", "dk", "dv")) or 1.0  # padding alone has none
    scales = {"out": float(exact.tensors["out"].norm()) or 1.0, "dq": gradient, "dk": gradient, "dv": gradient}
    for name in ("dsinks", "dbias"):
        if name in exact.tensors:
            scales[name] = max(gradient, float(exact.tensors[name].norm()))
    return {
        name: float((ours.tensors[name].float() - exact.tensors[name]).norm()) / scale for name, scale in scales.items()
    }


def worst(answers: Sequence[Answer], references: Sequence[Answer]) -> dict[str, float]:
    """Each tensor's largest error over all cases (NaN counts as infinite)."""
    found = [errors(ours, exact) for ours, exact in zip(answers, references, strict=True)]
    return {
        name: max(float("inf") if error[name] != error[name] else error[name] for error in found if name in error)
        for name in {name: None for error in found for name in error}
    }


def layer(case: Case) -> Any:
    """An attention layer with the case's heads; its weights are determined by the case's seed."""
    from modeling.attention import GroupedQueryAttention
    from modeling.config import ModelConfig

    config = ModelConfig(
        d_model=16,
        n_heads=case.n_heads,
        n_kv_heads=case.n_kv_heads,
        d_head=D_HEAD,
        qk_norm=True,
        sliding_window=case.window,
    )
    attention = GroupedQueryAttention(config, 0)
    generator = torch.Generator().manual_seed(case.seed)
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    return attention


def layer_tensors(case: Case) -> tuple[Tensor, Tensor]:
    """The layer's input and its output's gradient, (B, N, D) in natural order."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (*case.context().documents_BS.shape, 16)
    return torch.randn(shape, generator=generator), case.at_tokens(torch.randn(shape, generator=generator))


def layer_reference(case: Case) -> dict[str, Tensor]:
    """The layer's output, its input's gradient and each weight's gradient, on one process."""
    exact = layer_results(layer(case), *layer_tensors(case), case.context())
    return exact | {"out": case.at_tokens(exact["out"])}


def layer_results(attention: Any, hidden_BSD: Tensor, grad_BSD: Tensor, context: Context) -> dict[str, Tensor]:
    hidden_BSD.requires_grad_()
    out_BSD = attention(hidden_BSD, context)
    out_BSD.backward(grad_BSD)
    grads = {name: weight.grad for name, weight in attention.named_parameters()}
    return {"out": out_BSD.detach(), "input": hidden_BSD.grad, **grads}


def run_layer(kind: str, case: Case, cp: int) -> dict[str, Tensor]:
    """The layer's output and gradients on ``cp`` ranks, merged.

    Positions are put in natural order and weights' gradients summed over the ranks.
    """
    from parallel.context_parallel.part import natural_order
    from parallel.processes.start import run_ranks

    by_rank = run_ranks(layer_rank, cp, kind, case, timeout_seconds=100, threads=1)
    order = natural_order(sum(map(abs, case.rows[0])), cp)
    merged = {name: sum(result[name] for result in by_rank) for name in by_rank[0] if name not in ("out", "input")}
    whole = {name: torch.cat([result[name] for result in by_rank], 1)[:, order] for name in ("out", "input")}
    return merged | {"out": case.at_tokens(whole["out"]), "input": whole["input"]}


def layer_rank(kind: Any, case: Case) -> dict[str, Tensor]:
    """One rank of ``run_layer``."""
    import os

    from parallel.context_parallel.context import split_context
    from parallel.context_parallel.core import make_core
    from parallel.context_parallel.part import take_share
    from parallel.mesh import close_mesh

    axis = open_axis(int(os.environ["WORLD_SIZE"]))
    attention = layer(case)
    attention.core = make_core(kind, axis)
    hidden_BSD, grad_BSD = (take_share(tensor, axis) for tensor in layer_tensors(case))
    results = layer_results(attention, hidden_BSD, grad_BSD, split_context(case.context(), axis))
    close_mesh()
    return results


def largest_tensor(kind: str, case: Case, cp: int) -> int:
    """Elements of the largest tensor that any rank makes, forward and backward, besides views."""
    from parallel.processes.start import run_ranks

    return max(run_ranks(largest_of_rank, cp, kind, case, timeout_seconds=100, threads=1))


def largest_of_rank(kind: Any, case: Case) -> int:
    """One rank of ``largest_tensor``."""
    import os

    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from parallel.context_parallel.context import split_context
    from parallel.context_parallel.core import make_core
    from parallel.context_parallel.part import take_share
    from parallel.mesh import close_mesh

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            result = function(*arguments, **(options or {}))
            seen.extend(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            return result

    axis = open_axis(int(os.environ["WORLD_SIZE"]))
    core = make_core(kind, axis, case.tile)
    *heads, grad = (take_share(tensor, axis) for tensor in case.tensors())
    heads = [tensor.requires_grad_() for tensor in heads]
    context = split_context(case.context(), axis)
    with Watch():
        core(heads[0], heads[1], heads[2], context, case.window, case.terms()).backward(grad)
    close_mesh()
    return max(seen)
