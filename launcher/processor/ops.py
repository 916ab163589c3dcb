"""Records the work of a step on a CPU, summed by what determines its time: kind, dtype, rough shape and size."""

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.trace.ops import GROUPED, Phase, Work, group_size, work_of
from launcher.trace.regions import Regions
from launcher.training.heap import MMAP_THRESHOLD_BYTES, ROOM_BYTES
from modeling.kernels.stand_ins import OBSERVERS, KernelCall

CACHED_BYTES = (512 << 10, 8 << 20)  # the most that an operation moves within a core's own cache, and the shared one
LEVELS = ("near", "shared", "memory")
LONGEST = 1 << 11  # tokens of a sequence that attention in C++ is timed with: for longer ones a FLOP takes as long
MOST_ROWS = 1 << 10  # of an expert that is timed, likewise
EIGHTHS = 8  # in which the share of experts' rows whose gates are kept is counted

# Operations by the kind of work they do for each byte; all others count as "add".
FAMILIES = {
    "copy": "copy_ clone cat stack fill_ zero_ zeros zeros_like ones ones_like new_zeros new_ones full constant_pad_nd",
    "math": "exp exp_ log log2 pow rsqrt sqrt sigmoid sigmoid_backward silu silu_backward tanh gelu gelu_backward "
    "_softmax _log_softmax logsumexp xlogy special_xlogy log1p softplus",
    "sum": "sum mean amax amin norm linalg_vector_norm _foreach_norm any all cumsum logcumsumexp max min",
    "rows": "index_select index embedding embedding_dense_backward gather scatter scatter_ scatter_add scatter_add_ "
    "index_add index_add_ index_copy index_copy_ index_put index_put_ _embedding_bag repeat_interleave",
    "sort": "sort argsort topk",
    "update": "_fused_adamw_",
}
FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names.split()}

KEPT = frozenset(("aten::new_empty",))  # allocates scratch memory that is kept between calls (modeling.kernels.scratch)
ASKED_OF_FAKES = frozenset(("prim::device",))  # called for fake tensors alone: no call is made for real ones


class Ask(NamedTuple):
    """One kind of work, the key by which operations are summed. Sizes in ``shape`` are rounded to powers of two."""

    phase: Phase
    kind: str  # product, attention, a family, "pages", "call", a collective, or a kernel in C++
    dtype: str
    shape: tuple[int, ...]  # for a product: rows, depth, columns, and whether each factor is transposed
    level: str  # for what moves bytes: the nearest memory that holds them; for a collective: "wire"


class Amounts(NamedTuple):
    """The number of calls, and their units in all: FLOPs of what multiplies matrices, bytes of everything else."""

    calls: int
    units: float


class StepRecorder(TorchDispatchMode):
    """A mode that sums up the work of all operations while it is entered; ``found`` gives the result.

    Operations that stand in for a kernel in C++ count as one call of that kernel, which writes to all that they make.
    """

    def __init__(self, regions: Regions) -> None:
        super().__init__()
        self.regions = regions
        self.calls: Counter[Ask] = Counter()
        self.units: dict[Ask, float] = {}
        self.unwritten: dict[int, int] = {}  # mapped storage -> bytes of it that were not written to yet
        self.in_heap: dict[int, int] = {}  # storage in the heap -> its bytes
        self.heap_used, self.heap_size = 0, ROOM_BYTES
        self.in_kernel = False

    def __enter__(self) -> Self:
        OBSERVERS.append(self)
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        OBSERVERS.remove(self)

    @contextmanager
    def instead_of(self, kernel: KernelCall) -> Iterator[None]:
        """A context whose operations count as one call of this kernel (``modeling.kernels.stand_ins.Observer``)."""
        phase = self.regions.now()[1]
        self.add(Ask(phase, "call", "", (), ""), 0)
        self.add(*asked_kernel(phase, kernel))
        self.in_kernel = True
        try:
            yield
        finally:
            self.in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        phase = self.regions.now()[1]
        if func._schema.name not in ASKED_OF_FAKES and not self.in_kernel:
            self.add(Ask(phase, "call", "", (), ""), 0)
        work = work_of(func, args, kwargs, out)
        if work is not None and not self.in_kernel:
            self.add(*asked(phase, work, args, kwargs, out))
        pages = self.pages(func._schema.name, args, kwargs, out, is_work=work is not None or self.in_kernel)
        if pages:
            self.add(Ask(phase, "pages", "", (), ""), pages)
        return out

    def add(self, ask: Ask, units: float) -> None:
        """Counts one more call of ``units`` units."""
        self.calls[ask] += 1
        self.units[ask] = self.units.get(ask, 0.0) + units

    def pages(self, name: str, args: Any, kwargs: Any, out: Any, *, is_work: bool) -> int:
        """Bytes of mapped tensors that this operation is the first to write to, whose pages fault."""
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if not made or name in KEPT:
            return 0
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        pages = 0
        for each in made:
            storage = each.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self.unwritten and key not in self.in_heap:
                self.allocate(storage)
            if is_work and key in self.unwritten:
                written = min(each.nbytes, self.unwritten[key])
                self.unwritten[key] -= written
                pages += written
        return pages

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """Places a new storage: in the heap, which grows by small ones alone, or in a map of its own.

        So does glibc in a run (launcher.training.heap). Each page of a map faults when it is first written.
        """
        key, n_bytes = storage._cdata, storage.nbytes()
        if n_bytes >= MMAP_THRESHOLD_BYTES and self.heap_used + n_bytes > self.heap_size:
            self.unwritten[key] = n_bytes
        else:
            self.in_heap[key] = n_bytes
            self.heap_used += n_bytes
            self.heap_size = max(self.heap_size, self.heap_used)
        weakref.finalize(storage, self.release, key)

    def release(self, key: int) -> None:
        """Forgets a storage that is freed."""
        self.unwritten.pop(key, None)
        self.heap_used -= self.in_heap.pop(key, 0)

    def found(self) -> dict[Ask, Amounts]:
        """The calls and units of each kind of work recorded so far."""
        return {ask: Amounts(calls, float(self.units[ask])) for ask, calls in self.calls.items()}


def asked(phase: Phase, work: Work, args: Any, kwargs: Any, out: Any) -> tuple[Ask, float]:
    """The kind of work of an operation, and its units."""
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if work.collective is not None:
        return Ask(phase, work.collective, dtype_of(given), (group_size(args),), "wire"), work.sent_bytes
    if work.kind in ("product", "grouped product"):
        return Ask(phase, "product", dtype_of(given), product_shape(work.name, given), ""), work.flops
    if work.kind == "attention":
        first = 1 if "backward" in work.name else 0
        query, key = given[first : first + 2]
        shape = (int(bool(first)), *map(rough, (query[..., 0, 0].numel(), *query.shape[-2:], key.shape[-2])))
        return Ask(phase, "attention", dtype_of([query]), shape, ""), work.flops
    made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    family = FAMILY_OF.get(work.name, "add")
    if family == "copy" and len({each.dtype for each in (*given, *made)}) > 1:
        family = "cast"
    if work.name == "_to_copy":
        family = "cast"
    return Ask(phase, family, dtype_of([*given, *made]), (), level_of(work.bytes)), work.bytes


def asked_kernel(phase: Phase, kernel: KernelCall) -> tuple[Ask, float]:
    """The kind of work of a kernel in C++, and its units."""
    dtype, shape = "fp32" if kernel.dtype == torch.float32 else "bf16", timed_shape(kernel)
    if kernel.flops:
        return Ask(phase, kernel.name, dtype, shape, ""), kernel.flops
    return Ask(phase, kernel.name, dtype, shape, level_of(kernel.n_bytes)), kernel.n_bytes


def timed_shape(kernel: KernelCall) -> tuple[int, ...]:
    """The rounded shape with which a kernel is timed (launcher.processor.kernels)."""
    if kernel.name.startswith("attention"):  # key-value heads cost the same each: their number of query heads matters
        n_heads, n_kv_heads, d_head, seq_len, n_keys = kernel.shape
        return (n_heads // n_kv_heads, d_head, *(min(LONGEST, rough(each)) for each in (seq_len, n_keys)))
    if kernel.name.startswith("experts"):  # so do experts
        n_experts, d_model, d_ff, n_rows, n_kept = kernel.shape
        rows = min(MOST_ROWS, rough(-(-n_rows // n_experts)))
        return d_model, d_ff, rows, round(EIGHTHS * n_kept / max(1, n_rows))
    return tuple(map(rough, kernel.shape))


def level_of(n_bytes: int) -> str:
    """The nearest memory that holds so many bytes."""
    return next((name for name, most in zip(LEVELS, CACHED_BYTES, strict=False) if n_bytes <= most), LEVELS[-1])


def product_shape(name: str, given: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Rows, depth and columns, rounded, and whether each factor is transposed (its last dim is not contiguous)."""
    assert name not in GROUPED, "on a processor experts go one after another"
    left, right = given[1:3] if name in ("addmm", "baddbmm") else given[:2]
    many = left.shape[0] if left.dim() == 3 else 1
    turned = (int(each.stride(-1) != 1) for each in (left, right))
    return (rough(many * left.shape[-2]), rough(left.shape[-1]), rough(right.shape[-1]), *turned)


def rough(number: int) -> int:
    """The nearest power of two."""
    return 1 << round(math.log2(max(1, number)))


def dtype_of(tensors: Sequence[torch.Tensor]) -> str:
    """The dtype for rates: bf16 where any tensor has 16 bits, else fp32. Integers count as fp32."""
    return "bf16" if any(each.dtype in (torch.bfloat16, torch.float16) for each in tensors) else "fp32"
