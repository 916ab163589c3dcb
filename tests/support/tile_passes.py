"""Passes in C++ on matrix units, for tests: as they run, or with plain loops in the units' place, or broken."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from modeling.kernels.built import compiler_here, loaded
from modeling.kernels.tiles import OPTIONS, compiled, has_matrix_units

WITHOUT_TILES = "-DWITHOUT_TILES"
KINDS = ("units", "loops")
_NEEDS_COMPILER = "this machine has no C++ compiler" if compiler_here() is None else None
# which loops use as units do
_NEEDS_VECTORS = "this processor has no vectors of bf16 (AVX-512)"
_HAS_VECTORS = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
LACKS = _NEEDS_COMPILER if _HAS_VECTORS else _NEEDS_VECTORS  # why the passes cannot be tested here


def passes_of(module: ModuleType, kind: str) -> Iterator[None]:
    """A fixture's body: the passes of ``module`` (attention_tiles, expert_tiles) are of this one of KINDS."""
    if kind == "units" and not has_matrix_units():
        pytest.skip("this processor has no matrix units (AMX)")
    if LACKS is not None:
        pytest.skip(LACKS)
    with pytest.MonkeyPatch.context() as patch:
        take(patch, module, compiled(module.SOURCE, OPTIONS if kind == "units" else (*OPTIONS, WITHOUT_TILES)))
        yield


def take(patch: pytest.MonkeyPatch, module: ModuleType, path: Path) -> None:
    """From now on the passes of ``module`` are those of the library at ``path``."""
    library = loaded(path)
    assert library.prepare()
    patch.setattr(module, "library", lambda: library)
    patch.setattr(module, "why_not", lambda: None)


def take_broken(patch: pytest.MonkeyPatch, module: ModuleType, before: str, after: str, folder: Path) -> None:
    """The same with passes in whose source, or headers, ``before`` is replaced by ``after``; with plain loops.

    ``folder`` is this test's own.
    """
    sources = [module.SOURCE, *module.SOURCE.parent.glob("*.h")]
    texts = {path.name: path.read_text() for path in sources}
    assert any(before in text for text in texts.values())
    for name, text in texts.items():
        (folder / name).write_text(text.replace(before, after))
    options = ["-O1" if each == "-O3" else each for each in OPTIONS]
    path = compiled(folder / module.SOURCE.name, [*options, WITHOUT_TILES])
    take(patch, module, path)
    path.unlink()
