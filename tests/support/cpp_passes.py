"""Passes in C++, for tests: on what multiplies bf16 in this processor, or with plain loops in its place, or broken."""

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from modeling.kernels import native, tiles
from modeling.kernels.built import compiler_here, loaded, words_of

PLAIN_LOOPS = "-DPLAIN_LOOPS"
OPTIONS = {"tiles": tiles.TILES, "dots": tiles.VECTORS, "loops": (*tiles.VECTORS, PLAIN_LOOPS)}
KINDS = tuple(OPTIONS)  # of units: AMX, AVX-512, neither
_HAS_VECTORS = "avx512_bf16" in Path("/proc/cpuinfo").read_text()  # which all kinds use
NEEDS_COMPILER = "this machine has no C++ compiler" if compiler_here() is None else None
NEEDS_VECTORS = NEEDS_COMPILER if _HAS_VECTORS else "this processor has no vectors of bf16 (AVX-512)"


@functools.cache
def macros() -> frozenset[str]:
    """The macros that the compiler defines for this processor, such as those of its instructions."""
    command = [*words_of(compiler_here() or ""), *native.OPTIONS, "-x", "c++", "-dM", "-E", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return frozenset(line.split()[1] for line in said.splitlines())


def on_units(source: Path, kind: str) -> ctypes.CDLL:
    """The passes of a source for units, of this one of KINDS. Skips the test where they cannot be here."""
    if kind == "tiles" and tiles.options() != tiles.TILES:
        pytest.skip("this processor has no matrix units (AMX)")
    if NEEDS_VECTORS is not None:
        pytest.skip(NEEDS_VECTORS)
    return loaded(native.compiled(source, OPTIONS[kind]))


Change = tuple[str, str]  # what is replaced, and by what


def broken_for_units(source: Path, folder: Path, *changes: Change, kind: str = "loops") -> ctypes.CDLL:
    """The passes of a source for units of this kind, as ``broken`` makes them."""
    options = ["-O1" if each == "-O3" else each for each in OPTIONS[kind]]
    return broken(source, folder, changes, lambda path: native.compiled(path, options))


def broken_for_vectors(source: Path, further: tuple[str, ...], folder: Path, *changes: Change) -> ctypes.CDLL:
    """The passes of a source for vectors, as ``broken`` makes them."""
    return broken(source, folder, changes, lambda path: native.compiled(path, (*native.OPTIONS, *further)))


def broken(source: Path, folder: Path, changes: tuple[Change, ...], compiled: Callable[[Path], Path]) -> ctypes.CDLL:
    """The passes of a source with changes in it, or in its headers. The first must be found.

    ``folder`` is the test's own, and the library is not kept.
    """
    texts = {path.name: path.read_text() for path in (source, *source.parent.glob("*.h"))}
    assert any(changes[0][0] in text for text in texts.values()), changes[0]
    for name, text in texts.items():
        for before, after in changes:
            text = text.replace(before, after)
        (folder / name).write_text(text)
    path = compiled(folder / source.name)
    library = loaded(path)
    path.unlink()
    return library
