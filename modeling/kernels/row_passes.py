"""Norms, rotations and cross-entropies on a CPU in C++ (rows.cpp): one pass over memory each way.

torch passes over a piece of rows once for each operation, and once more to widen 16 bits. Compiled on the machine that
runs it, for its own vectors; where that cannot be, modeling.kernels.by_rows and modeling.loss compute the same by
torch's operations.

Shape letters: N rows, D their length; B batch, S sequence, H heads, C channels, R pairs of channels that turn; T
targets, V vocabulary.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from modeling.kernels import native
from modeling.kernels.direct import is_plain
from modeling.kernels.named import named
from modeling.kernels.stand_ins import KernelCall
from modeling.kernels.threads import each_part, row_parts

SOURCE = Path(__file__).with_name("rows.cpp")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# How many times the bytes of its rows each pass moves.
MOVES = {"norm": 2, "norm_gradients": 3, "rotate": 2, "cross_entropies": 1, "cross_entropies_written": 2}
BLOCK = 256  # rows whose gradients by the weight are one sum, as in rows.cpp
Pointer, Number, Real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

why_not = functools.partial(native.why_not, SOURCE, native.EXACT)
library = functools.partial(native.library, SOURCE, native.EXACT)


def fits(*tensors: Tensor) -> bool:
    """Whether C++ computes these tensors, all of one dtype, on this machine."""
    return is_plain(tensors) and has_passes(*tensors)


def has_passes(*tensors: Tensor) -> bool:
    """Whether C++ has passes for such tensors on this machine, whoever may observe them."""
    dtype = tensors[0].dtype
    if dtype not in NAMES or any(not each.is_cpu or each.dtype != dtype for each in tensors):
        return False
    return why_not() is None


def kernel(name: str, rows: Tensor, *beside: Tensor) -> KernelCall | None:
    """The pass ``name`` of MOVES over these rows (..., D); None where C++ has none for them."""
    if not has_passes(rows, *beside):
        return None
    return KernelCall(name, rows.dtype, (rows.shape[-1],), MOVES[name] * rows.nbytes)


def norm(rows_ND: Tensor, weight_D: Tensor, *, norm_eps: float, adds_one: bool) -> tuple[Tensor, Tensor]:
    """The RMSNorm of each row (N, D) in the rows' dtype, and one over each row's root mean square (N, 1) in fp32."""
    rows_ND, (n_rows, width) = rows_ND.contiguous(), rows_ND.shape
    weight_D = weight_D.float().contiguous()
    assert weight_D.shape == (width,)
    out_ND, scales_N1 = rows_ND.new_empty((n_rows, width)), rows_ND.new_empty((n_rows, 1), dtype=torch.float32)
    run = getattr(library(), f"norm_{NAMES[rows_ND.dtype]}")

    def compute(part: tuple[int, int]) -> None:
        first, n = part
        given = (at(rows_ND, first), at(weight_D, 0), at(out_ND, first), at(scales_N1, first))
        run(*given, Number(n), Number(width), Real(norm_eps), int(adds_one))

    with named("norm"):
        each_part(compute, row_parts(n_rows, width, 1))
    return out_ND, scales_N1


def norm_gradients(
    grads_ND: Tensor, rows_ND: Tensor, factor_D: Tensor, scales_N1: Tensor, *, by_rows: bool, by_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of ``norm`` by the rows (N, D), in their dtype, and by the factor (D,), in fp32; None if not asked.

    ``factor_D`` is the weight, or one plus the weight, in fp32.
    """
    grads_ND, rows_ND, factor_D = grads_ND.contiguous(), rows_ND.contiguous(), factor_D.contiguous()
    n_rows, width = rows_ND.shape
    assert grads_ND.shape == rows_ND.shape and factor_D.shape == (width,) and len(scales_N1) == n_rows
    by_rows_ND = rows_ND.new_empty((n_rows, width)) if by_rows else None
    sums_XD = rows_ND.new_empty((-(-n_rows // BLOCK), width), dtype=torch.float32) if by_weight else None
    run = getattr(library(), f"norm_backward_{NAMES[rows_ND.dtype]}")

    def compute(part: tuple[int, int]) -> None:
        first, n = part
        given = (at(grads_ND, first), at(rows_ND, first), at(factor_D, 0), at(scales_N1, first))
        run(*given, at(by_rows_ND, first), at(sums_XD, first // BLOCK), Number(n), Number(width))

    with named("norm_gradients"):
        each_part(compute, row_parts(n_rows, width, BLOCK))
    return by_rows_ND, None if sums_XD is None else sums_XD.sum(0)


def rotate(heads_BSHC: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, sign: int) -> Tensor:
    """Heads with their first 2R channels turned by the angles, or with ``sign`` -1 turned back, in their dtype.

    The tables are rounded to the heads' dtype. Their batch may be 1.
    """
    batch, seq_len, n_heads, width = heads_BSHC.shape
    repeats, n_pairs = len(cos_BSR) == len(sin_BSR) == 1, cos_BSR.shape[-1]
    assert 2 * n_pairs <= width
    shape = (1 if repeats else batch, seq_len, n_pairs)
    heads_BSHC, cos_BSR, sin_BSR = (
        heads_BSHC.contiguous(),
        *(each.float().expand(shape).contiguous() for each in (cos_BSR, sin_BSR)),
    )
    out_BSHC, n_tables = heads_BSHC.new_empty(heads_BSHC.shape), len(cos_BSR) * seq_len
    run = getattr(library(), f"rotate_{NAMES[heads_BSHC.dtype]}")
    heads_NHC, out_NHC = heads_BSHC.view(-1, n_heads, width), out_BSHC.view(-1, n_heads, width)
    cos_NR, sin_NR = cos_BSR.view(-1, n_pairs), sin_BSR.view(-1, n_pairs)

    def compute(part: tuple[int, int]) -> None:
        first, n = part
        tables = [at(each, 0 if repeats else first) for each in (cos_NR, sin_NR)]
        sizes = [Number(size) for size in (n, n_heads, width, n_pairs, n_tables)]
        run(at(heads_NHC, first), *tables, at(out_NHC, first), *sizes, Real(sign))

    with named("rotate"):
        each_part(compute, row_parts(batch * seq_len, n_heads * width, seq_len if repeats else 1))
    return out_BSHC


def cross_entropies(
    logits_TV: Tensor, targets_T: Tensor, *, ignored: int, z_loss: float, writes: bool
) -> tuple[Tensor, Tensor]:
    """Each target's cross-entropy and logsumexp (T,), in fp32; 0 where it is ``ignored``. Logits are contiguous.

    With ``writes`` they are overwritten by the gradient of cross-entropies and ``z_loss`` times the squares of
    logsumexps. Raises IndexError where a target is neither ``ignored`` nor within the vocabulary.
    """
    targets_T, (n_rows, width) = targets_T.contiguous(), logits_TV.shape
    assert targets_T.shape == (n_rows,) and targets_T.dtype == torch.int64
    is_wrong_T = (targets_T != ignored) & ((targets_T < 0) | (targets_T >= width))
    if is_wrong_T.any():
        raise IndexError(f"target {int(targets_T[is_wrong_T][0])} is not within the vocabulary of {width} tokens")
    losses_T, logs_T = (logits_TV.new_empty(n_rows, dtype=torch.float32) for _ in range(2))
    run = getattr(library(), f"cross_entropy_{NAMES[logits_TV.dtype]}")

    def compute(part: tuple[int, int]) -> None:
        first, n = part
        given = [at(each, first) for each in (logits_TV, targets_T, losses_T, logs_T)]
        run(*given, Number(n), Number(width), Number(ignored), Real(z_loss), int(writes))

    with named("cross_entropies"):
        each_part(compute, row_parts(n_rows, width, 1))
    return losses_T, logs_T


def at(tensor: Tensor | None, row: int) -> ctypes.c_void_p:
    """Where a contiguous tensor's row begins; a null pointer for None."""
    return Pointer(None if tensor is None else tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size())
