"""Passes in C++ for a CPU that multiplies bf16, in tiles (AMX) or in vectors (AVX-512): tiles.h.

They are compiled on the machine that runs them.
"""

import ctypes
import functools
from pathlib import Path

import torch

from modeling.kernels.built import LEFT_OUT, NotBuilt, loaded
from modeling.kernels.native import compiled

VECTORS = (
    *("-O3", "-w", "-std=c++17", "-fopenmp-simd"),
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma"),
)
TILES = (*VECTORS, "-mamx-tile", "-mamx-bf16")


@functools.cache
def options() -> tuple[str, ...] | None:
    """What a compiler is told on this processor: TILES, or VECTORS, or None where it multiplies no bf16."""
    if torch.cpu._is_amx_tile_supported():
        return TILES
    return VECTORS if torch.cpu._is_avx512_bf16_supported() else None


def why_not(source: Path) -> str | None:
    """Why the passes of this source are not used, in one line; None where they are. Compiles them."""
    return LEFT_OUT.get(source) or problem(source)


@functools.cache
def problem(source: Path) -> str | None:
    """Why the passes of this source cannot be used on this machine; None where they can."""
    if options() is None:
        return "the processor does not multiply bf16 (by AMX or AVX-512)"
    try:
        may_use_units = library(source).prepare()
    except NotBuilt as error:
        return str(error)
    return None if may_use_units else "Linux does not let this process use matrix units; Linux 5.16 does"


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """The passes of this source, compiled if need be. Raises NotBuilt where they cannot be."""
    told = options()
    assert told is not None
    return loaded(compiled(source, told))
