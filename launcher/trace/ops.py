"""Counts the cost of one operation: bytes moved, floating-point operations, and bytes sent to other ranks.

An operation that may multiply matrices and has no count here raises ``Uncounted``, since it would silently be free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from modeling.kernels.fuse import chain_named
from modeling.kernels.fused_delta import work_of_rule

Kind = Literal["product", "grouped product", "attention", "other", "wire"]
Phase = Literal["forward", "recompute", "backward", "update"]

# Operations that launch no kernel: they make a view of a tensor, or a tensor without writing to it.
VIEWS = frozenset(
    [
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "broadcast_tensors",
        "chunk",
        "detach",
        "device",
        "diagonal",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "is_contiguous",
        "is_same_size",
        "lift_fresh",
        "narrow",
        "new_empty",
        "new_empty_strided",
        "numel",
        "permute",
        "reshape",
        "select",
        "size",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "stride",
        "sym_numel",
        "sym_size",
        "sym_stride",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "view_as",
    ]
)
GROUPED = frozenset(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"))
LINEAR = "_linear_pointwise"  # oneDNN's product; its second matrix is given transposed
PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", LINEAR)) | GROUPED
# Attention operations -> the index of the query among their tensors; keys and values follow it.
ATTENTION = {
    "_varlen_attn": 0,
    "_varlen_attn_backward": 1,
    "_flash_attention_forward": 0,
    "_flash_attention_backward": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 0,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 1,
    "_scaled_dot_product_flash_attention": 0,
    "_scaled_dot_product_flash_attention_backward": 1,
    "_scaled_dot_product_efficient_attention": 0,
    "_scaled_dot_product_efficient_attention_backward": 1,
    "_scaled_dot_product_cudnn_attention": 0,
    "_scaled_dot_product_cudnn_attention_backward": 1,
    "_scaled_dot_product_fused_attention_overrideable": 0,
    "_scaled_dot_product_fused_attention_overrideable_backward": 1,
}
# FLOPs of attention's backward pass over its forward pass: 5 products instead of 2, one of them recomputed.
BACKWARD_PRODUCTS = 2.5
CHAINS = "roundtable"  # the namespace of Roundtable's compiled chains
ACCUMULATES = "accumulate"  # in that namespace, the operation that adds a gradient to a sum
# In that namespace, linear attention's rule: operation -> indices of queries and values among its tensors.
RULES = {"gated_delta": (0, 2), "gated_delta_backward": (1, 7)}
NAMESPACES = ("aten", "prims")  # namespaces in which only the operations above multiply matrices

# Operation -> its collective, and how many times (n-1)/n of its buffer each rank of a ring of n sends.
COLLECTIVES = {
    "allreduce_": ("all-reduce", 2),
    "allreduce_coalesced_": ("all-reduce", 2),
    "_allgather_base_": ("all-gather", 1),
    "allgather_": ("all-gather", 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "alltoall_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 1),
    "reduce_": ("reduce", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 1),
    "barrier": ("barrier", 0),
    "send": ("send", 1),
    "recv_": ("send", 0),  # the sending rank counts these bytes
    "recv_any_source_": ("send", 0),
}


class Uncounted(Exception):
    """An operation whose cost this module cannot count."""


@dataclass(frozen=True, slots=True)
class Work:
    """The cost of one operation. All tensors that it reads and writes count as moved, even if a cache holds them."""

    name: str
    kind: Kind
    dtype: torch.dtype | None  # of the factors of a product
    bytes: int
    flops: float
    sent_bytes: float = 0.0  # to other ranks
    collective: str | None = None
    launches: int = 1  # kernels
    hidden: float = 0.0  # the fraction of its time that overlaps with other operations


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a step, with its part of the model and its phase."""

    work: Work
    part: str
    phase: Phase


@dataclass
class Figures:
    """Sums over operations: launches, bytes and FLOPs, as a test's budget lists them."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0  # of matrix products, without attention's

    @classmethod
    def of(cls, ops: Iterable[Op]) -> "Figures":
        """The sums over the costs of ``ops``."""
        figures = cls()
        for op in ops:
            figures.launches += op.work.launches
            figures.bytes += op.work.bytes
            figures.flops += int(op.work.flops) if op.work.kind in ("product", "grouped product") else 0
        return figures

    def __sub__(self, other: "Figures") -> "Figures":
        return Figures(self.launches - other.launches, self.bytes - other.bytes, self.flops - other.flops)


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work | None:
    """The cost of a call of a torch operation; None where it launched nothing, or only copied to or from the host.

    Raises Uncounted where it may multiply matrices and this module has no FLOP count for it.
    """
    namespace, name = func._schema.name.split("::")
    if name in VIEWS or namespace == "profiler":
        return None
    if host_copy(func, args):
        return None
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    given = [*{id(each): each for each in leaves}.values()]  # each is moved once, however often it is named
    made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    if not given and not made:  # a question to the build of torch, as whether the processor has some units
        return None
    n_bytes = sum(each.nbytes for each in (*given, *made))
    if namespace == CHAINS and name == ACCUMULATES:
        total, gradient, adds = args
        return Work("compiled accumulation", "other", None, gradient.nbytes + (2 if adds else 1) * total.nbytes, 0)
    if namespace == CHAINS and name in RULES:
        query, value = (leaves[place] for place in RULES[name])
        rule = work_of_rule(query, value, is_backward="backward" in name)
        moved = int(rule.elements * value.element_size())
        return Work(name, "attention", value.dtype, moved, rule.flops, launches=rule.launches)
    if namespace == CHAINS:
        chain = chain_named(args[0])
        n_bytes = chain.moved_bytes(given, made)
        return Work(f"compiled {chain.label}", "other", None, n_bytes, 0, launches=chain.n_kernels)
    if namespace == "c10d":
        return _wire(name, args, given, n_bytes)
    if name in PRODUCTS:
        kind: Kind = "grouped product" if name in GROUPED else "product"
        return Work(name, kind, factors(name, leaves)[0].dtype, n_bytes, product_flops(name, leaves))
    if name in ATTENTION:
        return Work(
            name, "attention", leaves[0].dtype, n_bytes, attention_flops(name, leaves, _arguments(func, args, kwargs))
        )
    if namespace not in NAMESPACES or func._overloadpacket in _known_products():
        raise Uncounted(f"{namespace}::{name} may multiply matrices, and launcher.trace.ops counts no FLOPs for it")
    return Work(name, "other", None, n_bytes, 0)


def host_copy(func: Any, args: Any) -> int:
    """The bytes of a copy between device memory and host memory, which needs no kernel; 0 for all other calls."""
    if func._schema.name != "aten::copy_":
        return 0
    target, source = args[:2]
    return target.nbytes if target.device.type != source.device.type else 0


def _known_products() -> dict[Any, Any]:
    """The operations for which torch itself counts FLOPs."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def factors(name: str, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The two matrices that a product multiplies; of addmm and baddbmm, the first tensor is the one added to."""
    return given[1:3] if name in ("addmm", "baddbmm") else given[:2]


def product_flops(name: str, given: Sequence[torch.Tensor]) -> int:
    """The FLOPs of a matrix product: two for each multiplication."""
    left, right = factors(name, given)
    if name in GROUPED and left.dim() == right.dim():  # the weights' gradient: each row in one group
        return 2 * left.shape[0] * left.shape[1] * right.shape[-1]
    if name == LINEAR:
        right = right.mT
    many = left.shape[0] if name in ("bmm", "baddbmm") else 1
    return 2 * many * left.shape[-2] * left.shape[-1] * right.shape[-1]


def attention_flops(name: str, given: Sequence[torch.Tensor], told: Mapping[str, Any]) -> float:
    """The FLOPs of attention: two for each multiplication of queries with keys and of weights with values.

    A variable-length kernel multiplies only the pairs within its window; the longest lengths count for all documents.
    A causal kernel multiplies half of a row's pairs, and a kernel with a mask all of them. ``told``: the call's
    arguments by name.
    """
    first = ATTENTION[name]
    query, key, value = given[first : first + 3]
    passes = BACKWARD_PRODUCTS if first else 1.0
    if "varlen" in name or "_flash_attention_" in name[:17]:
        n_queries, n_heads = query.shape[0], query.shape[1]
        keys = _keys_seen(told)
    else:
        n_queries, n_heads = query.shape[0] * query.shape[2], query.shape[1]
        keys = (key.shape[2] + 1) / 2 if told.get("is_causal") else key.shape[2]
    return passes * 2 * n_queries * n_heads * keys * (query.shape[-1] + value.shape[-1])


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """A call's arguments by their names in the operation's schema."""
    return dict(zip([each.name for each in func._schema.arguments], args, strict=False)) | (kwargs or {})


def _keys_seen(told: Mapping[str, Any]) -> float:
    """The mean number of keys that a query sees, in a document with the longest lengths of a variable-length kernel.

    Query i of Q sees key j of K where ``i + K - Q - left <= j <= i + K - Q + right``; below zero, or None: no limit.
    """
    n_queries, n_keys = told["max_q"], told["max_k"]
    limits = told.get("window_size") or (told.get("window_size_left"), told.get("window_size_right"))
    left, right = (-1 if limit is None else limit for limit in limits)
    right = 0 if told.get("is_causal") else right
    diagonal = n_keys - n_queries
    up_to = n_queries * n_keys if right < 0 else _clipped_sum(diagonal + right + 1, n_queries, n_keys)
    before = 0 if left < 0 else _clipped_sum(diagonal - left, n_queries, n_keys)
    return (up_to - before) / n_queries


def _clipped_sum(first: int, count: int, most: int) -> int:
    """The sum of ``count`` consecutive numbers from ``first`` on, each at least 0 and at most ``most``."""

    def up_to(last: int) -> int:
        ramp = min(max(last, 0), most)
        return ramp * (ramp + 1) // 2 + max(last - most, 0) * most

    return up_to(first + count - 1) - up_to(first - 1)


def _wire(name: str, args: Any, given: Sequence[torch.Tensor], n_bytes: int) -> Work:
    """The cost of a collective: the bytes that this rank sends in a ring. The larger of input and output counts."""
    if name not in COLLECTIVES:
        raise Uncounted(f"c10d::{name} sends bytes, and launcher.trace.ops counts none for it")
    collective, times = COLLECTIVES[name]
    largest = max((_side_bytes(each) for each in args if _side_bytes(each)), default=0)
    n_ranks = group_size(args)
    share = 1.0 if collective == "send" else (n_ranks - 1) / n_ranks
    return Work(name, "wire", None, n_bytes, 0, times * share * largest, collective)


def _side_bytes(argument: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(argument) if isinstance(each, torch.Tensor))


def group_size(args: Any) -> int:
    """The number of ranks in a collective's group. Raises Uncounted where the arguments hold no group."""
    from torch.distributed import ProcessGroup

    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                return ProcessGroup.unbox(each).size()
            except RuntimeError:  # another kind of object: the operation to reduce by
                continue
    raise Uncounted("a collective without a group")
