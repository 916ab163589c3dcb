"""Passes in C++ for the vectors of a CPU, compiled on the machine that runs them for the processor that it has."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

from modeling.kernels.built import LEFT_OUT, NotBuilt, built, loaded

# Nothing asks which exceptions were raised: else loops that choose between numbers are vectors with AVX-512 alone.
OPTIONS = ("-O3", "-std=c++17", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math")
EXACT = ("-ffp-contract=off",)  # each operation rounds, as torch's do
FUSED = ("-ffp-contract=fast",)  # a product and the sum that it joins are rounded once


def why_not(source: Path, further: Sequence[str]) -> str | None:
    """Why the passes of this source are not used, in one line; None where they are. Compiles them."""
    return LEFT_OUT.get(source) or problem(source, further)


@functools.cache
def problem(source: Path, further: Sequence[str]) -> str | None:
    """Why the passes of this source cannot be used on this machine; None where they can."""
    try:
        library(source, further)
    except NotBuilt as error:
        return str(error)
    return None


@functools.cache
def library(source: Path, further: Sequence[str]) -> ctypes.CDLL:
    """The passes of this source, compiled if need be with further options. Raises NotBuilt where they cannot be."""
    return loaded(compiled(source, (*OPTIONS, *further)))


def compiled(source: Path, options: Sequence[str]) -> Path:
    """The library made from a source and the headers beside it, for this processor, with the compiler's ``options``.

    Raises NotBuilt where there can be none.
    """
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    headers = sorted(source.parent.glob("*.h"))
    return built(source, options, also=b"".join([features.encode(), *(path.read_bytes() for path in headers)]))
