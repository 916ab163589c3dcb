"""Norms and rotations on a CPU, some rows at a time, so that intermediate values stay in a core's cache.

Operation by operation a large tensor would pass through memory six times, into newly mapped memory each time, whose
pages are faults (docs/measurements.md). By rows, the input is read and the output written once, and only what the
backward pass needs is kept, as in ``modeling.kernels.fuse.compiled``, but without torch's compiler. Where C++ can be
compiled, both are one pass over memory (row_passes.py); what is here is its reference, and used elsewhere.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from modeling.kernels import row_passes
from modeling.kernels.direct import is_plain
from modeling.kernels.scratch import SCRATCH
from modeling.kernels.stand_ins import stand_in

PIECE_BYTES = 1 << 20  # of the rows computed at once, in fp32; docs/measurements.md has the times of other sizes
# Rows over which torch's kernel sums the gradient by a norm's weight one after another: off by 5e-7 of the largest.
SUMMED_ROWS = 1 << 10


def by_rows(twin: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function with another that computes the same by rows: ``twin(*tensors, piece_bytes, **numbers)``."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.by_rows = twin  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class ByRows:
    """A ``modeling.kernels.fuse.Fuse`` for CPUs: calls a function's twin by rows if it has one, else the function."""

    piece_bytes: int = PIECE_BYTES

    def __call__(self, function: Callable[..., Any], *tensors: Tensor, rows_vary: bool = False, **numbers: Any) -> Any:
        """The function's value, which can be differentiated by the tensors."""
        twin = getattr(function, "by_rows", None)
        if twin is None:
            return function(*tensors, **numbers)
        return twin(*tensors, piece_bytes=self.piece_bytes, **numbers)


def rms_norm_by_rows(
    hidden: Tensor, weight_D: Tensor, *, norm_eps: float, adds_one: bool, piece_bytes: int = PIECE_BYTES
) -> Tensor:
    """``modeling.norm.rms_norm`` of ``hidden`` (..., D) on a CPU, in the same shape and dtype."""
    n_rows = max(1, piece_bytes // (4 * hidden.shape[-1]))
    return _RMSNorm.apply(hidden, weight_D, norm_eps, adds_one, n_rows)


class _RMSNorm(Function):
    """(hidden, weight_D, norm_eps, adds_one, rows of a piece) -> the norm. Shape letters: N rows, D their length.

    Gradients come from torch's kernel for layer norms, given means of zero: one pass in place of torch's six operations
    (3.5 ms instead of 5.4 for 4096 x 384 in bf16, Intel with AMX, 2026-11-29). What that kernel subtracts for the mean
    of a layer norm, the mean of the gradients times the weight, is added back.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_D: Tensor, norm_eps: float, adds_one: bool, n_rows: int) -> Tensor:  # type: ignore[override]
        ctx.adds_one, ctx.n_rows = adds_one, n_rows
        hidden_ND = hidden.reshape(-1, hidden.shape[-1])
        if row_passes.fits(hidden, weight_D):
            out_ND, scale_N1 = row_passes.norm(hidden_ND, weight_D, norm_eps=norm_eps, adds_one=adds_one)
        else:
            out_ND, scale_N1 = stand_in(
                lambda: row_passes.kernel("norm", hidden_ND, weight_D),
                hidden_ND,
                lambda: norm_by_torch(hidden_ND, weight_D, norm_eps, adds_one, n_rows),
                lambda: (torch.empty_like(hidden_ND), hidden_ND.new_empty((len(hidden_ND), 1), dtype=torch.float32)),
            )
        ctx.save_for_backward(hidden, weight_D, scale_N1)
        return out_ND.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight_D, scale_N1 = ctx.saved_tensors  # read only once, as recomputation requires
        hidden_ND, grad_ND = hidden.reshape(-1, hidden.shape[-1]), grad.reshape(-1, hidden.shape[-1])
        factor_D = factor_of(weight_D, adds_one=ctx.adds_one)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        if row_passes.fits(hidden, weight_D, grad):
            wanted = {"by_rows": wants_hidden, "by_weight": wants_weight}
            found = row_passes.norm_gradients(grad_ND, hidden_ND, factor_D, scale_N1, **wanted)
        else:
            given, n_rows = (grad_ND, hidden_ND, factor_D, scale_N1), min(ctx.n_rows, SUMMED_ROWS)
            wanted_of = ((hidden_ND, wants_hidden), (factor_D, wants_weight))
            found = stand_in(
                lambda: row_passes.kernel("norm_gradients", hidden_ND, weight_D, grad_ND),
                hidden_ND,
                lambda: norm_gradients_by_torch(*given, (wants_hidden, wants_weight), n_rows),
                lambda: tuple(torch.empty_like(each) if wants else None for each, wants in wanted_of),
            )
        by_hidden = None if found[0] is None else found[0].view(hidden.shape)
        return by_hidden, None if found[1] is None else found[1].to(weight_D.dtype), None, None, None


def norm_by_torch(
    hidden_ND: Tensor, weight_D: Tensor, norm_eps: float, adds_one: bool, n_rows: int
) -> tuple[Tensor, Tensor]:
    """``row_passes.norm``, ``n_rows`` at a time."""
    out_ND = torch.empty_like(hidden_ND)
    scale_N1 = hidden_ND.new_empty((len(hidden_ND), 1), dtype=torch.float32)
    factor_D = factor_of(weight_D, adds_one=adds_one)
    for part in pieces(len(hidden_ND), n_rows):
        wide_ND = widened(hidden_ND[part])
        scale_N1[part] = torch.linalg.vector_norm(wide_ND, dim=-1, keepdim=True).square_()
        scale_N1[part].div_(hidden_ND.shape[-1]).add_(norm_eps).rsqrt_()
        unit_ND = torch.mul(wide_ND, scale_N1[part], out=SCRATCH.take("norm: unit", wide_ND.shape, wide_ND))
        if adds_one or hidden_ND.dtype == torch.float32:
            out_ND[part] = unit_ND.mul_(factor_D)
        else:  # rounded before the weight, as in transformers
            torch.mul(unit_ND.to(hidden_ND.dtype), weight_D, out=out_ND[part])
    return out_ND, scale_N1


def norm_gradients_by_torch(
    grad_ND: Tensor, hidden_ND: Tensor, factor_D: Tensor, scale_N1: Tensor, wanted: tuple[bool, bool], n_rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """``row_passes.norm_gradients``, ``n_rows`` at a time. ``wanted`` says whether by the rows and by the weight."""
    wants_hidden, wants_weight = wanted
    by_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
    by_weight_D, zeros_N1 = torch.zeros_like(factor_D), torch.zeros_like(scale_N1)
    for part in pieces(len(hidden_ND), n_rows):
        wide_ND, wide_grad_ND = widened(hidden_ND[part]), widened(grad_ND[part], "norm: gradient")
        given = (wide_grad_ND, wide_ND, factor_D.shape, zeros_N1[part], scale_N1[part], factor_D, None)
        centred_ND, summed_D, _ = torch.ops.aten.native_layer_norm_backward(*given, (*wanted, False))
        if wants_weight:
            by_weight_D += summed_D
        if by_hidden_ND is not None:  # add back what a layer norm subtracts for its mean
            mean_N1 = (wide_grad_ND @ factor_D)[:, None].mul_(scale_N1[part]).div_(hidden_ND.shape[-1])
            by_hidden_ND[part] = centred_ND.add_(mean_N1)
    return by_hidden_ND, by_weight_D if wants_weight else None


def rotate_by_rows(heads_BSHC: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, piece_bytes: int = PIECE_BYTES) -> Tensor:
    """``modeling.rope.rotate`` on a CPU, in the shape and dtype of ``heads_BSHC``.

    Saves only the tables for backward.
    """
    n_rows = max(1, piece_bytes // (4 * heads_BSHC.shape[-2] * heads_BSHC.shape[-1]))
    return _Rotation.apply(heads_BSHC, cos_BSR, sin_BSR, n_rows)


class _Rotation(Function):
    """(heads, cosines, sines, rows of a piece) -> rotated heads. The gradient is rotated back by the same angles."""

    @staticmethod
    def forward(ctx: Any, heads_BSHC: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, n_rows: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos_BSR, sin_BSR)
        ctx.n_rows = n_rows
        return turn(heads_BSHC, cos_BSR, sin_BSR, n_rows, 1)

    @staticmethod
    def backward(ctx: Any, grad_BSHC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos_BSR, sin_BSR = ctx.saved_tensors
        return turn(grad_BSHC, cos_BSR, sin_BSR, ctx.n_rows, -1), None, None, None


def turn(heads_BSHC: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, n_rows: int, sign: int) -> Tensor:
    """Heads rotated by the angles, or with ``sign`` -1 rotated back."""
    if row_passes.fits(heads_BSHC) and is_plain((cos_BSR, sin_BSR)):
        return row_passes.rotate(heads_BSHC, cos_BSR, sin_BSR, sign)
    return stand_in(
        lambda: row_passes.kernel("rotate", heads_BSHC),
        heads_BSHC,
        lambda: turn_by_torch(heads_BSHC, cos_BSR, sin_BSR, n_rows, sign),
        lambda: torch.empty_like(heads_BSHC, memory_format=torch.contiguous_format),
    )


def turn_by_torch(heads_BSHC: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, n_rows: int, sign: int) -> Tensor:
    """``turn``, ``n_rows`` tokens at a time."""
    heads_NHC, n_turning = heads_BSHC.flatten(0, 1), 2 * cos_BSR.shape[-1]
    tables_BSR = (each.expand(*heads_BSHC.shape[:2], -1) for each in (cos_BSR, sin_BSR))  # their batch may be 1
    cos_N1R, sin_N1R = (each.flatten(0, 1)[:, None].to(heads_BSHC.dtype) for each in tables_BSR)
    out_NHC = torch.empty_like(heads_NHC, memory_format=torch.contiguous_format)
    for part in pieces(len(heads_NHC), n_rows):
        cos, sin = cos_N1R[part], sin_N1R[part]
        first, second = heads_NHC[part][..., :n_turning].chunk(2, dim=-1)
        turned_first, turned_second = out_NHC[part][..., :n_turning].chunk(2, dim=-1)
        torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-sign)
        torch.mul(second, cos, out=turned_second).addcmul_(first, sin, value=sign)
        out_NHC[part][..., n_turning:] = heads_NHC[part][..., n_turning:]
    return out_NHC.unflatten(0, heads_BSHC.shape[:2])


def factor_of(weight_D: Tensor, *, adds_one: bool) -> Tensor:
    """The factor of a normed row, in fp32: the weight, or one plus the weight."""
    return 1 + weight_D.float() if adds_one else weight_D.float()


def pieces(n: int, n_rows: int) -> Iterator[slice]:
    """Slices that cover ``n`` rows, at most ``n_rows`` each."""
    return (slice(begin, min(n, begin + n_rows)) for begin in range(0, n, n_rows))


def widened(rows_ND: Tensor, name: str = "norm: wide") -> Tensor:
    """The rows in fp32: themselves, or a copy in scratch memory that the next call with this name overwrites."""
    if rows_ND.dtype == torch.float32:
        return rows_ND
    return SCRATCH.take(name, rows_ND.shape, rows_ND.new_empty((), dtype=torch.float32)).copy_(rows_ND)
