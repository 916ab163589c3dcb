"""Attention on a CPU in C++, both passes: all pieces of packed documents in one call.

torch's kernel on a CPU is a call of oneDNN's or MKL's for each product of some 32 queries, and computes what a mask
hides. Here blocks of 32 queries and 32 keys of which no pair is seen are left out. Scores, weights and their sums are
in fp32. In bf16 a processor that multiplies bf16, by matrix units (AMX) or vectors (AVX-512), does so
(attention_tiles.cpp), with factors rounded to bf16, as FlashAttention does on a GPU. Any other processor, and fp32,
multiply in fp32 (attention_vectors.cpp).

Shape letters: B batch, Q queries, S keys, H heads, G key-value heads, C d_head.
"""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from modeling.kernels import native, tiles
from modeling.kernels.blocks import additive
from modeling.kernels.direct import is_plain
from modeling.kernels.named import named
from modeling.kernels.stand_ins import KernelCall, Pass
from modeling.kernels.threads import each_part
from modeling.pieces import Piece

TILES = Path(__file__).with_name("attention_tiles.cpp")
VECTORS = TILES.with_name("attention_vectors.cpp")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
NAME = "attention_passes"  # in a profile
PRODUCTS = {"forward": 2, "backward": 5}  # of queries, keys and channels

Compiled = Callable[..., int]


class Heads(ctypes.Structure):
    """``Heads`` of attention.h."""

    _fields_ = [
        ("start", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("of_row", "of_token", "of_head")),
    ]


class Attention(ctypes.Structure):
    """``Attention`` of attention.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n_queries", "n_keys", "n_heads", "n_kv_heads", "n_channels")),
        ("n_pieces", ctypes.c_int64),
        ("scale", ctypes.c_float),
        *((name, Heads) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_void_p) for name in ("lse", "sinks", "pieces")),
        *((name, Heads) for name in ("grad", "dq", "dk", "dv")),
    ]


def why_not_tiles() -> str | None:
    """Why bf16 is not multiplied as such, in one line; None where it is. Compiles the passes."""
    return tiles.why_not(TILES)


def why_not() -> str | None:
    """Why vectors of fp32 are not used, in one line; None where they are. Compiles the passes."""
    return native.why_not(VECTORS, native.FUSED)


def passes_of(dtype: torch.dtype) -> tuple[Compiled, Compiled] | None:
    """The forward and the backward pass for heads of this dtype on this machine; None where there are none."""
    if dtype == torch.bfloat16 and why_not_tiles() is None:
        library = tiles.library(TILES)
        return library.forward, library.backward
    if dtype not in NAMES or why_not() is not None:
        return None
    library, name = native.library(VECTORS, native.FUSED), NAMES[dtype]
    return getattr(library, f"forward_{name}"), getattr(library, f"backward_{name}")


def fits(q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor) -> bool:
    """Whether C++ computes the attention of these: whole sequences on a CPU, in fp32 or bf16, and it can be compiled.

    Values have as many channels as keys.
    """
    return is_plain((q_BQHC, k_BSGC, v_BSGC)) and has_passes(q_BQHC, k_BSGC, v_BSGC)


def has_passes(q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor) -> bool:
    """``fits``, whoever may observe them."""
    given, dtype = (q_BQHC, k_BSGC, v_BSGC), q_BQHC.dtype
    if any(each.dtype != dtype or not each.is_cpu for each in given):
        return False
    return q_BQHC.shape[1] == k_BSGC.shape[1] and q_BQHC.numel() > 0 and passes_of(dtype) is not None


def kernel(each: Pass, q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, pieces: Sequence[Piece]) -> KernelCall | None:
    """A pass over all pairs of the pieces; None where C++ has none for them. By shape: H, G, C, S, most keys."""
    if not has_passes(q_BQHC, k_BSGC, v_BSGC):
        return None
    _, seq_len, n_heads, d_head = q_BQHC.shape
    n_keys = [piece.keys.stop - piece.keys.start for piece in pieces]
    n_pairs = sum(
        (rows.stop - rows.start) * (queries.stop - queries.start) * n
        for (rows, queries, _), n in zip(pieces, n_keys, strict=True)
    )
    flops = 2.0 * PRODUCTS[each] * n_heads * n_pairs * d_head
    shape = (n_heads, k_BSGC.shape[2], d_head, seq_len, max(n_keys))
    return KernelCall(f"attention {each}", q_BQHC.dtype, shape, flops=flops)


def forward(
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    pieces: Sequence[Piece],
    added: Callable[[Piece], Tensor],
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention (B, Q, H, C) of all pieces, in their dtype, and the log of its normalizers (B, H, Q), in fp32.

    ``added(piece)`` is the piece's mask, as ``attend_block`` takes it; each query is in one piece. Sinks join each
    softmax. ``fits`` must be true.
    """
    q_BQHC, k_BSGC, v_BSGC = (with_rows(each) for each in (q_BQHC, k_BSGC, v_BSGC))
    out_BQHC = q_BQHC.new_empty(q_BQHC.shape)
    batch, n_queries, n_heads, _ = q_BQHC.shape
    lse_BHQ = q_BQHC.new_empty((batch, n_heads, n_queries), dtype=torch.float32)
    tensors = {"q": q_BQHC, "k": k_BSGC, "v": v_BSGC, "out": out_BQHC}
    call(0, tensors, lse_BHQ, pieces, added, sinks_H)
    return out_BQHC, lse_BHQ


def backward(
    grad_BQHC: Tensor,
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    out_BQHC: Tensor,
    lse_BHQ: Tensor,
    pieces: Sequence[Piece],
    added: Callable[[Piece], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by queries, keys and values, in their dtype, from what ``forward`` was given and returned."""
    tensors = {"q": q_BQHC, "k": k_BSGC, "v": v_BSGC, "out": out_BQHC, "grad": grad_BQHC}
    tensors = {name: with_rows(each) for name, each in tensors.items()}
    dq_BQHC, dk_BSGC, dv_BSGC = (each.new_empty(each.shape) for each in (q_BQHC, k_BSGC, v_BSGC))
    call(1, {**tensors, "dq": dq_BQHC, "dk": dk_BSGC, "dv": dv_BSGC}, lse_BHQ, pieces, added, None)
    return dq_BQHC, dk_BSGC, dv_BSGC


def call(
    which: int,
    tensors: dict[str, Tensor],
    lse_BHQ: Tensor,
    pieces: Sequence[Piece],
    added: Callable[[Piece], Tensor],
    sinks_H: Tensor | None,
) -> None:
    """Runs one of ``passes_of`` over all rows and key-value heads, in as many threads as torch uses.

    Raises MemoryError.
    """
    batch, n_queries, n_heads, n_channels = tensors["q"].shape
    _, n_keys, n_kv_heads, _ = tensors["k"].shape
    assert tensors["k"].shape == tensors["v"].shape == (batch, n_keys, n_kv_heads, n_channels)
    assert all(tensors[each].shape == tensors["q"].shape for each in ("out", "grad") if each in tensors)
    assert all(each.dtype == tensors["q"].dtype for each in tensors.values())
    assert lse_BHQ.is_contiguous() and n_heads % n_kv_heads == 0
    masks = [with_rows(additive(added(piece), torch.float32)) for piece in pieces]  # kept until the end of the call
    numbers = [number for pair in zip(pieces, masks, strict=True) for number in numbers_of(*pair)]
    of_pieces = (ctypes.c_int64 * len(numbers))(*numbers)
    sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
    given = Attention(
        *(n_queries, n_keys, n_heads, n_kv_heads, n_channels, len(pieces), n_channels**-0.5),
        **{name: heads_of(tensor) for name, tensor in tensors.items()},
        lse=lse_BHQ.data_ptr(),
        sinks=None if sinks_H is None else sinks_H.data_ptr(),
        pieces=ctypes.addressof(of_pieces),
    )
    passes = passes_of(tensors["q"].dtype)
    assert passes is not None
    run = passes[which]

    def compute(part: tuple[int, int]) -> int:
        return run(ctypes.byref(given), *(ctypes.c_int64(number) for number in part))

    with named(NAME):
        failed = any(each_part(compute, parts_of(batch * n_kv_heads, torch.get_num_threads())))
    if failed:
        raise MemoryError("there is no memory for the heads of one sequence")


def with_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, in which the numbers of a row are neighbours."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def heads_of(tensor: Tensor) -> Heads:
    """A tensor (B, Q or S, H or G, C) as C++ takes it."""
    return Heads(tensor.data_ptr(), *tensor.stride()[:3])


def numbers_of(piece: Piece, mask: Tensor) -> tuple[int, ...]:
    """A piece and its mask (B or 1, H or 1, Q, S) as C++ takes them."""
    rows, queries, keys = piece
    n_rows, n_heads, n_queries, n_keys = mask.shape
    assert (n_queries, n_keys) == (queries.stop - queries.start, keys.stop - keys.start)
    of_row, of_head, of_query, _ = mask.stride()
    steps = 0 if n_rows == 1 else of_row, 0 if n_heads == 1 else of_head, of_query
    return rows.start, rows.stop, queries.start, queries.stop, keys.start, keys.stop, mask.data_ptr(), *steps


def parts_of(n: int, n_parts: int) -> list[tuple[int, int]]:
    """(first, how many) of each thread's part of ``n``."""
    size = -(-n // n_parts)
    return [(first, min(size, n - first)) for first in range(0, n, size)]
