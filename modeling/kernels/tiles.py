"""Passes in C++ on a CPU's matrix units (AMX, tiles.h), compiled on the machine that runs them."""

import ctypes
import functools
from pathlib import Path

import torch

from modeling.kernels.built import LEFT_OUT, NotBuilt, loaded
from modeling.kernels.native import compiled

VECTORS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma")
OPTIONS = ("-O3", "-w", "-std=c++17", "-fopenmp-simd", *VECTORS, "-mamx-tile", "-mamx-bf16")


@functools.cache
def has_matrix_units() -> bool:
    """Whether this processor multiplies tiles of bf16."""
    return torch.cpu._is_amx_tile_supported()


def why_not(source: Path) -> str | None:
    """Why the passes of this source are not used, in one line; None where they are. Compiles them."""
    return LEFT_OUT.get(source) or problem(source)


@functools.cache
def problem(source: Path) -> str | None:
    """Why the passes of this source cannot be used on this machine; None where they can."""
    if not has_matrix_units():
        return "the processor has no matrix units (AMX)"
    try:
        may_use_units = library(source).prepare()
    except NotBuilt as error:
        return str(error)
    return None if may_use_units else "Linux does not let this process use matrix units; Linux 5.16 does"


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """The passes of this source, compiled if need be. Raises NotBuilt where they cannot be."""
    return loaded(compiled(source, OPTIONS))
