"""C++ sources of this project, compiled on the machine that runs them, once. Importing this does not import torch."""

import ctypes
import errno
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1
SECONDS = 300  # the most that a compiler may take: each source here takes it a few seconds
DIGEST_BYTES = hashlib.sha256().digest_size


class NotBuilt(Exception):
    """A source cannot be compiled, or what was compiled cannot be used; the message says why and what to do."""


LEFT_OUT: dict[Path, str] = {}  # source -> why this process does not use what is compiled of it


def leave_out(source: Path, reason: str) -> None:
    """From now on this process does not use what is compiled of ``source``, since some rank cannot."""
    LEFT_OUT[source] = reason


def built(source: Path, options: Sequence[str], also: bytes = b"") -> Path:
    """The path of the shared library made from ``source`` with the compiler's ``options``.

    It lies in the folder for temporary files, under a name that follows from the source, the options and ``also``
    (whatever else the library depends on), and is compiled if it is not there or not whole: loading a file that lost
    its end, as where the power failed or a disk was full, may end the process (SIGBUS). Of several processes that ask
    at once, one compiles. Raises NotBuilt where there is no compiler, it fails, or the file belongs to another user.
    """
    told = hashlib.sha256(b"\0".join([source.read_bytes(), *(each.encode() for each in options), also]))
    try:
        path = Path(tempfile.gettempdir()) / f"roundtable-{source.stem}-{os.getuid()}-{told.hexdigest()[:16]}.so"
        if not is_whole(path):
            with alone(path.with_suffix(".lock")):
                if not is_whole(path):  # another process may have compiled it meanwhile
                    compile_to(path, [*options, str(source)])
        return path
    except OSError as error:
        raise NotBuilt(f"the folder for temporary files cannot be used ({error}); set TMPDIR") from None


def compile_to(path: Path, options: Sequence[str]) -> None:
    """Compiles a shared library, which is at ``path`` only once it is whole. Raises NotBuilt where that fails.

    One process at a time may do so.
    """
    compiler = compiler_here()
    if compiler is None:
        raise NotBuilt("there is no C++ compiler; install g++, or set CXX")
    words = words_of(compiler)
    if not words:
        raise NotBuilt(f"CXX={compiler!r} names no compiler; set it to one, or unset it")
    part = path.with_suffix(".part")
    is_ours(part)
    try:
        run_compiler(compiler, [*words, "-shared", "-fPIC", *options, "-o", str(part)])
        with part.open("ab") as file:
            file.write(digest(part.read_bytes()))  # a library may end in what no loader reads
        part.chmod(0o700)  # whatever the umask is: this process runs what stands in it
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def run_compiler(compiler: str, command: Sequence[str]) -> None:
    """Raises NotBuilt, with the compiler's name, where it cannot be run, fails or does not end."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS, preexec_fn=end_with_parent
        )
    except subprocess.TimeoutExpired:
        raise NotBuilt(f"{compiler} has not ended within {SECONDS} s; set CXX to another one") from None
    except OSError as error:
        raise NotBuilt(f"{compiler} cannot be run ({error.strerror}); install g++, or set CXX") from None
    if done.returncode != 0:
        told = " ".join(done.stderr.split())[-500:]
        is_full = any(os.strerror(number) in told for number in (errno.ENOSPC, errno.EDQUOT))
        remedy = "free space, or set TMPDIR to a disk that has some" if is_full else "set CXX to another one"
        raise NotBuilt(f"{compiler} cannot compile it ({told}); {remedy}")


def end_with_parent() -> None:
    """In a process that was just made: Linux kills it as soon as its parent has ended, by whatever signal."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def compiler_here() -> str | None:
    """The C++ compiler of this machine: the command in CXX, else the first that is installed; None if there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def words_of(command: str) -> list[str]:
    """The words of a command as a shell reads them; none where it would not, such as of quotes that do not end."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def loaded(path: Path) -> ctypes.CDLL:
    """The shared library at ``path``. Raises NotBuilt where it cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuilt(f"{error}; remove that file, or set TMPDIR to a disk from which programs can be run") from None


def is_whole(path: Path) -> bool:
    """Whether the library is there and ends with the digest of what stands before. Raises NotBuilt as is_ours does."""
    if not is_ours(path):
        return False
    content = path.read_bytes()
    return content[-DIGEST_BYTES:] == digest(content[:-DIGEST_BYTES])


def digest(content: bytes) -> bytes:
    """The DIGEST_BYTES with which what was compiled ends."""
    return hashlib.sha256(content).digest()


def is_ours(path: Path) -> bool:
    """Whether the file is there. Raises NotBuilt if it belongs to another user, or is no plain file, such as a link."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
        raise NotBuilt(f"{path} belongs to somebody else, or is a link; remove it, or set TMPDIR")
    return True


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within it, no other process that names the same file is within it.

    The file is removed at the end. Whoever waits for it by then looks first whether there is still something to do.
    """
    is_ours(path)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
