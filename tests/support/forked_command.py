"""Runs the command in a process forked from one that has imported it, which saves the seconds of a new interpreter.

For tests of a command's output and exit code. What it starts, or leaves behind when it ends, needs a real process.
"""

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from parallel.processes.start import UNKNOWN_CODE, fork_server


def run_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m launcher ARGUMENTS` in ``folder``; returns exit code, stdout and stderr.

    Raises TimeoutExpired as subprocess.run does. The command also writes its exit code to a file. Where several threads
    run commands, each start reaps processes that have ended, and where two threads read one process's exit code,
    multiprocessing gives UNKNOWN_CODE to the second one.
    """
    with TemporaryDirectory() as said:
        out, errors, code = Path(said, "out"), Path(said, "errors"), Path(said, "code")
        process = fork_server().Process(
            target=_command, args=(list(arguments), folder, dict(environment), out, errors, code)
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        exit_code = process.exitcode or 0
        if exit_code == UNKNOWN_CODE and code.exists():
            exit_code = int(code.read_text())
        return subprocess.CompletedProcess(arguments, exit_code, out.read_text(), errors.read_text())


def _command(
    arguments: list[str], folder: Path, environment: dict[str, str], out: Path, errors: Path, code: Path
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for path, stream in ((out, sys.stdout), (errors, sys.stderr)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, stream.fileno())
        os.close(handle)
    sys.argv = ["launcher", *arguments]
    try:
        runpy.run_module("launcher", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        with contextlib.suppress(OSError):  # a test may have left no room
            code.write_text(str(stop.code or 0))
        raise
