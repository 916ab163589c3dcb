"""The command in a process forked from one that has imported it: without the seconds that a new interpreter takes.

For tests of what a command answers; what it starts, or leaves when it ends, is for a real process to show.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from parallel.processes.start import fork_server


def run_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """What `python -m launcher ARGUMENTS` says and does in ``folder``. Raises TimeoutExpired as subprocess.run does."""
    with TemporaryDirectory() as said:
        out, errors = Path(said, "out"), Path(said, "errors")
        process = fork_server().Process(target=_command, args=(list(arguments), folder, dict(environment), out, errors))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        return subprocess.CompletedProcess(arguments, process.exitcode or 0, out.read_text(), errors.read_text())


def _command(arguments: list[str], folder: Path, environment: dict[str, str], out: Path, errors: Path) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for path, stream in ((out, sys.stdout), (errors, sys.stderr)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, stream.fileno())
        os.close(handle)
    sys.argv = ["launcher", *arguments]
    runpy.run_module("launcher", run_name="__main__", alter_sys=True)
