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
# of Linux on x86-64: asm/unistd_64.h, asm/prctl.h, asm/fpu/types.h
SYS_ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18


@functools.cache
def options() -> tuple[str, ...] | None:
    """What a compiler is told on this processor: TILES, or VECTORS, or None where it multiplies no bf16."""
    if torch.cpu._is_amx_tile_supported() and may_use_tiles():
        return TILES
    return VECTORS if torch.cpu._is_avx512_bf16_supported() else None


def may_use_tiles() -> bool:
    """Whether Linux lets this process use tiles, for which it is asked. Linux 5.16 is the first that knows them."""
    numbers = (SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return ctypes.CDLL(None).syscall(*map(ctypes.c_long, numbers)) == 0


def why_not(source: Path) -> str | None:
    """Why the passes of this source are not used, in one line; None where they are. Compiles them."""
    return LEFT_OUT.get(source) or problem(source)


@functools.cache
def problem(source: Path) -> str | None:
    """Why the passes of this source cannot be used on this machine; None where they can."""
    if options() is None:
        return "the processor does not multiply bf16 (by AMX or AVX-512)"
    try:
        library(source)
    except NotBuilt as error:
        return str(error)
    return None


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """The passes of this source, compiled if need be. Raises NotBuilt where they cannot be."""
    told = options()
    assert told is not None
    return loaded(compiled(source, told))
