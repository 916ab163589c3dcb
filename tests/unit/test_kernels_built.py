"""C++ sources are compiled once, by one process, and never taken from somebody else."""

import ctypes
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cpp_passes import macros
from modeling.kernels import attention_passes as attention
from modeling.kernels import built as kernels
from modeling.kernels import expert_passes as experts
from modeling.kernels import native
from modeling.kernels import row_passes as rows
from modeling.kernels.built import NotBuilt, built, compiler_here, loaded, words_of

pytestmark = pytest.mark.skipif(compiler_here() is None, reason="this machine has no C++ compiler")
SOURCE = 'extern "C" int number() { return NUMBER; }'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source, and a folder for temporary files of this test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "number.cpp"
    path.write_text(SOURCE)
    return path


def test_a_source_is_compiled_once_for_its_options(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (built(source, [f"-DNUMBER={number}"]) for number in (3, 4))
    assert [ctypes.CDLL(str(path)).number() for path in (first, second)] == [3, 4]
    monkeypatch.setenv("CXX", "false")
    assert built(source, ["-DNUMBER=3"]) == first
    with pytest.raises(NotBuilt, match=r"^false cannot compile it \(\); set CXX to another one$"):
        built(source, ["-DNUMBER=3"], also=b"another version")
    source.write_text(SOURCE.replace("NUMBER;", "NUMBER + 1;"))
    with pytest.raises(NotBuilt):
        built(source, ["-DNUMBER=3"])


def test_the_compiler_may_be_a_command_of_several_words(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_here()
    monkeypatch.setenv("CXX", f"env {compiler} -DNUMBER=7")
    assert ctypes.CDLL(str(built(source, []))).number() == 7


@pytest.mark.parametrize("command", [" ", "g++ 'open"])
def test_a_command_that_no_shell_reads(source: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(NotBuilt, match=r"^CXX=.* names no compiler; set it to one, or unset it$"):
        built(source, ["-DNUMBER=3"])


def test_what_the_compiler_says_is_one_line(source: Path) -> None:
    with pytest.raises(NotBuilt, match=r"cannot compile it \(.*NUMBER.*not declared.*\); set CXX") as refusal:
        built(source, [])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("words", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk_is_not_the_compilers_fault(source: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = source.parent / "compiler"
    compiler.write_text(f"#!/bin/sh\necho 'fatal error: error writing to /tmp/x.s: {words}' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NotBuilt, match=rf"{words}\); free space, or set TMPDIR to a disk that has some$"):
        built(source, [])


def test_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(source.parent))
    with pytest.raises(NotBuilt, match=r"^there is no C\+\+ compiler; install g\+\+, or set CXX$"):
        built(source, ["-DNUMBER=3"])


@pytest.mark.parametrize("suffix", [".so", ".lock", ".part"])
def test_a_file_of_somebody_else_is_refused(source: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = built(source, ["-DNUMBER=3"])
    if suffix != ".so":
        path.rename(path.with_suffix(suffix))
    owner = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    path.with_suffix(suffix).rename(
        path.with_name(path.name.replace(f"-{owner}-", f"-{owner + 1}-")).with_suffix(suffix)
    )
    with pytest.raises(NotBuilt, match="belongs to somebody else, or is a link; remove it, or set TMPDIR"):
        built(source, ["-DNUMBER=3"])


def test_a_link_is_refused_whatever_it_leads_to(source: Path) -> None:
    path = built(source, ["-DNUMBER=3"])
    path.rename(other := source.parent / "other.so")
    path.symlink_to(other)
    with pytest.raises(NotBuilt, match="or is a link"):
        built(source, ["-DNUMBER=3"])


def test_what_is_compiled_is_the_users_alone(source: Path) -> None:
    mask = os.umask(0)
    try:
        path = built(source, ["-DNUMBER=3"])
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_library_that_was_cut_off_is_told_with_what_to_do(source: Path) -> None:
    path = built(source, ["-DNUMBER=3"])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(NotBuilt, match=rf"{path}.*; remove that file, or set TMPDIR to a disk"):
        loaded(path)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 0.999])
@pytest.mark.parametrize("is_filled", [False, True], ids=["cut off", "zeros"])
def test_a_library_that_is_not_whole_is_compiled_anew(source: Path, share: float, is_filled: bool) -> None:
    """glibc loads one without its end, and then the process ends by SIGBUS: at every start, if nobody looks."""
    path = built(source, ["-DNUMBER=3"])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))].ljust(len(whole) if is_filled else 0, b"\0"))
    assert built(source, ["-DNUMBER=3"]) == path
    assert path.read_bytes() == whole and ctypes.CDLL(str(path)).number() == 3


def test_a_compiler_that_hangs_is_ended(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = source.parent / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(kernels, "SECONDS", 0.5)
    with pytest.raises(NotBuilt, match=r"compiler has not ended within 0.5 s; set CXX to another one$"):
        built(source, ["-DNUMBER=3"])
    assert sorted(path.name for path in source.parent.iterdir()) == ["compiler", "number.cpp"]


def test_planted_death_of_a_process_that_compiles(source: Path) -> None:
    """The compiler ends with it, and the next process compiles as if nothing had been there."""
    compiler = source.parent / "compiler"
    written = source.parent / "written"
    compiler.write_text(f"#!/bin/sh\necho $$ > {written}.now\nmv {written}.now {written}\nexec sleep 60\n")
    compiler.chmod(0o755)
    dying = building(source, compiler)
    assert within(30, written.exists)
    compiling = Path(f"/proc/{written.read_text().strip()}")
    dying.kill()
    dying.wait(30)
    assert within(30, lambda: not compiling.exists())
    assert ctypes.CDLL(str(built(source, ["-DNUMBER=3"]))).number() == 3
    assert not [path.name for path in source.parent.iterdir() if path.suffix in (".lock", ".part")]


def building(source: Path, compiler: Path) -> "subprocess.Popen[bytes]":
    """A process that asks for what is compiled of the source."""
    take = "from pathlib import Path; from modeling.kernels.built import built"
    code = f"{take}; built(Path({str(source)!r}), ['-DNUMBER=3'])"
    settings = {**os.environ, "CXX": str(compiler), "TMPDIR": str(source.parent)}
    return subprocess.Popen([sys.executable, "-c", code], env=settings)


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether it holds before so many seconds are over."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_of_several_processes_one_compiles(source: Path) -> None:
    """The others wait, and take what it made."""
    compiler, log = source.parent / "compiler", source.parent / "log"
    compiler.write_text(f'#!/bin/sh\necho once >> {log}\nsleep 1\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    running = [building(source, compiler) for _ in range(3)]
    assert [each.wait(60) for each in running] == [0, 0, 0] and log.read_text() == "once\n"
    assert not [*source.parent.glob("*.lock")]


def test_a_folder_that_cannot_be_written_is_told_in_a_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(source.parent / "none"))
    with pytest.raises(NotBuilt, match=r"^the folder for temporary files cannot be used \(.*\); set TMPDIR$"):
        built(source, ["-DNUMBER=3"])


VECTOR_SOURCES = (rows.SOURCE, attention.VECTORS, experts.VECTORS)
TRAPS = "-fno-trapping-math"


def plain_loops(source: Path, options: Sequence[str]) -> list[str]:
    """The loops that a source wants as vectors and that the compiler leaves as they are, for a processor with AVX2."""
    asked = [*(each for each in options if each != "-march=native"), "-march=haswell", "-fopt-info-vec-optimized"]
    command = [*words_of(compiler_here() or ""), *asked, "-c", "-o", os.devnull, source.name]
    said = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, check=True).stderr
    vectors = {int(line) for line in re.findall(rf"^{source.name}:(\d+):\d+: optimized: loop vectorized", said, re.M)}
    lines = source.read_text().splitlines()
    loops = [number + 2 for number, line in enumerate(lines) if line.startswith("#pragma omp simd")]
    left = [number for number in loops if not {number, number + 1} & vectors]  # its own line, or the first within
    return [" ".join(lines[number - 1 : number + 1]) for number in left]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
@pytest.mark.parametrize("source", VECTOR_SOURCES, ids=lambda path: path.stem)
def test_loops_become_vectors_without_avx_512(source: Path) -> None:
    """As plain loops, cross-entropies take five times as long, attention 1.3 to 1.6 times."""
    if "__clang__" in macros():
        pytest.skip("clang does not tell in GCC's words which loops it makes vectors of")
    further = native.EXACT if source == rows.SOURCE else native.FUSED
    assert plain_loops(source, (*native.OPTIONS, *further)) == []
    planted = [each for each in native.OPTIONS if each != TRAPS]
    assert any("exponential" in loop or "sigmoid" in loop for loop in plain_loops(source, (*planted, *further)))
