"""The experts' SwiGLU on a CPU in C++, both passes: all experts in one call.

A product of few rows by a narrow matrix costs a library as much for the call as for the numbers, and what lies between
an expert's products as much as these. In C++ rows are gathered into the form that products take, and gates are computed
on sums that have not left the cache. Sums, gates and their gradients are in fp32. bf16 needs a processor that
multiplies it, by matrix units (AMX) or vectors (AVX-512): expert_tiles.cpp. What products take is rounded to bf16, as
elsewhere. fp32 takes the vectors of any processor (expert_vectors.cpp). A row's value does not depend on other rows,
bit for bit.

Shape letters: T tokens, R rows (token-expert pairs), E experts, D d_model, F d_ff, I 2F.
"""

import ctypes
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from modeling.kernels import native, tiles
from modeling.kernels.direct import is_plain
from modeling.kernels.named import named
from modeling.kernels.stand_ins import KernelCall, Pass
from modeling.kernels.threads import each_part

TILES = Path(__file__).with_name("expert_tiles.cpp")
VECTORS = TILES.with_name("expert_vectors.cpp")
NAME = "expert_passes"  # of these products in a profile
DTYPES = (torch.bfloat16, torch.float32)
UNIT = 32  # what d_model and d_ff must be multiples of, and the rows of an expert that are kept in part
WIDEST_EXPERT = (
    2**20
)  # bytes of an expert's matrices: wider ones do not stay in a core's cache, and libraries are as fast

NUMBERS = ("d_model", "d_ff")
POINTERS = (
    *("hidden_TD", "gate_EFD", "up_EFD", "down_EDF", "tokens_R", "starts_E", "sizes_E"),
    *("n_kept_E", "kept_E", "gate_up_RI", "out_RD", "grad_TD", "weights_R"),
    *("grad_gate_EFD", "grad_up_EFD", "grad_down_EDF", "grad_RD", "grad_weights_R"),
)


def source(dtype: torch.dtype) -> Path:
    """The source of the passes for this dtype."""
    return TILES if dtype == torch.bfloat16 else VECTORS


def why_not(dtype: torch.dtype) -> str | None:
    """Why the passes for this dtype are not used, in one line; None where they are. Compiles them."""
    return tiles.why_not(TILES) if dtype == torch.bfloat16 else native.why_not(VECTORS, native.FUSED)


def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The passes for this dtype, compiled if need be. Raises NotBuilt where they cannot be."""
    return tiles.library(TILES) if dtype == torch.bfloat16 else native.library(VECTORS, native.FUSED)


class Layer(ctypes.Structure):
    """``Layer`` of experts.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in NUMBERS),
        *((name, ctypes.c_void_p) for name in POINTERS),
    ]


class Matrices(NamedTuple):
    """The experts' matrices."""

    gate_EFD: Tensor
    up_EFD: Tensor
    down_EDF: Tensor


class Gates(NamedTuple):
    """The gate and up projections that are kept between the passes, side by side, one expert after another.

    sizes_E: the rows of each expert. kept_E: how many of its first ones are kept: all, none, or a multiple of UNIT.
    """

    gate_up_RI: Tensor
    sizes_E: list[int]
    kept_E: list[int]


class Given(NamedTuple):
    """What the backward pass is given, with each row's token and weight. Rows of padding have a weight of 0."""

    matrices: Matrices
    hidden_TD: Tensor
    grad_TD: Tensor
    tokens_R: Tensor
    weights_R1: Tensor


class Gradients(NamedTuple):
    """What it writes: the gradients by the matrices, and by each row and its weight."""

    matrices: Matrices
    rows_RD: Tensor
    weights_R: Tensor


def fits(hidden_TD: Tensor, matrices: Matrices) -> bool:
    """Whether the layer is one for which C++ is faster, and this machine can run it: on a CPU, in bf16 or fp32."""
    return is_plain((hidden_TD, *matrices)) and has_passes(hidden_TD, matrices)


def has_passes(hidden_TD: Tensor, matrices: Matrices) -> bool:
    """``fits``, whoever may observe it."""
    given, dtype = (hidden_TD, *matrices), hidden_TD.dtype
    _, d_ff, d_model = matrices.gate_EFD.shape
    if dtype not in DTYPES or any(each.dtype != dtype or not each.is_cpu for each in given):
        return False
    is_contiguous = all(each.is_contiguous() for each in matrices)
    return suits(d_model, d_ff, dtype.itemsize) and is_contiguous and why_not(dtype) is None


def kernel(each: Pass, hidden_TD: Tensor, matrices: Matrices, gates: Gates) -> KernelCall | None:
    """A pass over all experts; None where C++ has none for them. By shape: E, D, F, rows, and those that are kept."""
    if not has_passes(hidden_TD, matrices):
        return None
    n_experts, d_ff, d_model = matrices.gate_EFD.shape
    n_rows, n_kept = sum(gates.sizes_E), sum(gates.kept_E)
    products = 3 * n_rows if each == "forward" else 6 * n_rows + 2 * (n_rows - n_kept)
    shape = (n_experts, d_model, d_ff, n_rows, n_kept)
    return KernelCall(f"experts {each}", hidden_TD.dtype, shape, flops=2.0 * products * d_model * d_ff)


def suits(d_model: int, d_ff: int, element_bytes: int) -> bool:
    """Whether C++ is faster for experts of this size, on a processor that it runs on."""
    return 3 * d_ff * d_model * element_bytes <= WIDEST_EXPERT and d_ff % UNIT == d_model % UNIT == 0


def forward(matrices: Matrices, hidden_TD: Tensor, tokens_R: Tensor, gates: Gates, out_RD: Tensor) -> None:
    """Computes the SwiGLU of each row's token into ``out_RD``, not weighted, and gates and ups as far as they are kept.

    ``fits`` must be true. ``tokens_R`` is int64.
    """
    rows = {"hidden_TD": hidden_TD.contiguous(), "tokens_R": tokens_R, "out_RD": out_RD}
    call(library(hidden_TD.dtype).forward, {**matrices._asdict(), **rows}, gates)


def backward(given: Given, gates: Gates, gradients: Gradients) -> None:
    """Computes ``gradients``, except by the matrices of experts without rows. ``fits`` must be true.

    Gates and ups that are not kept are computed again, to the same bits.
    """
    matrices, hidden_TD, grad_TD, tokens_R, weights_R1 = given
    by_matrix = {f"grad_{name}": tensor for name, tensor in gradients.matrices._asdict().items()}
    by_row = {"grad_RD": gradients.rows_RD, "grad_weights_R": gradients.weights_R}
    rows = {"hidden_TD": hidden_TD.contiguous(), "grad_TD": grad_TD.contiguous(), "tokens_R": tokens_R}
    call(
        library(hidden_TD.dtype).backward,
        {**matrices._asdict(), **rows, "weights_R": weights_R1, **by_matrix, **by_row},
        gates,
    )


def call(run: Callable[..., int], tensors: dict[str, Tensor], gates: Gates) -> None:
    """Runs a pass over all experts that have rows, with as many threads as torch uses. Raises MemoryError."""
    n_experts, d_ff, d_model = tensors["gate_EFD"].shape
    assert tensors["hidden_TD"].shape[1] == d_model and len(gates.sizes_E) == n_experts
    rows = [each for name, each in tensors.items() if name != "tokens_R"]
    assert all(each.dtype == gates.gate_up_RI.dtype and each.is_contiguous() for each in rows)
    places = {name: numbers(each) for name, each in places_of(gates.sizes_E, gates.kept_E).items()}
    pointers = {name: each.data_ptr() for name, each in {**tensors, "gate_up_RI": gates.gate_up_RI}.items()}
    layer = Layer(d_model, d_ff, **pointers, **{name: ctypes.addressof(each) for name, each in places.items()})
    shares = shares_of(gates.sizes_E, torch.get_num_threads())

    def compute(experts: list[int]) -> int:
        return run(ctypes.byref(layer), numbers(experts), ctypes.c_int64(len(experts)))

    with named(NAME):
        failed = any(each_part(compute, shares))
    if failed:
        raise MemoryError("there is no memory for the rows of one expert")


def numbers(given: list[int]) -> "ctypes.Array[ctypes.c_int64]":
    """The numbers as C++ takes them."""
    return (ctypes.c_int64 * len(given))(*given)


def places_of(sizes_E: list[int], kept_E: list[int]) -> dict[str, list[int]]:
    """Where each expert's rows begin, how many they are, how many are kept, and where their gates and ups begin."""
    starts_E, kept_starts_E = ([0, *accumulate(numbers)][:-1] for numbers in (sizes_E, kept_E))
    return {"starts_E": starts_E, "sizes_E": sizes_E, "n_kept_E": kept_E, "kept_E": kept_starts_E}


def shares_of(sizes_E: list[int], n_threads: int) -> list[list[int]]:
    """The experts that have rows, divided among at most ``n_threads``, so that the most rows of a thread are few."""
    shares: list[list[int]] = [[] for _ in range(n_threads)]
    rows = [0] * n_threads
    for expert in sorted(range(len(sizes_E)), key=lambda expert: -sizes_E[expert]):
        if sizes_E[expert]:
            least = rows.index(min(rows))
            shares[least].append(expert)
            rows[least] += sizes_E[expert]
    return [sorted(share) for share in shares if share]
