"""Completion as a user has it: keys typed into real shells on a terminal, after `roundtable completion SHELL`."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.completion import SHELLS

BEGIN = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "--private"],
}
READ = {
    "bash": "source <(roundtable completion bash)",
    "zsh": "autoload -Uz compinit; compinit -u -D; source <(roundtable completion zsh)",
    "fish": "roundtable completion fish | source",
}
TOLD_APART = re.compile(r"\x1b\][^\x07\x1b]*(\x07|\x1b\\)|\x1b[\[(>=?0-9;]*[A-Za-z]?|[\x00-\x09\x0b-\x1f]")


class Terminal:
    """A shell on a terminal of its own, in a folder with two runs, with the completion sourced."""

    def __init__(self, shell: str, folder: Path) -> None:
        self.end, self.other = pty.openpty()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(folder), "TERM": "xterm", "PS1": "", "COLUMNS": "200", "LINES": "50"}
        # the first terminal that a new session opens is its own, which shells need to read keys
        opened = ["sh", "-c", 'exec <"$0" >"$0" 2>&1; exec "$@"', os.ttyname(self.other), *BEGIN[shell]]
        self.process = subprocess.Popen(opened, cwd=folder, env=environment, start_new_session=True)
        try:
            self.type(f"{READ[shell]}; echo rea''dy\r")
            self.read_until("ready")
        except BaseException:
            self.close()
            raise

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def read_until(self, words: str, seconds: float = 60) -> str:
        """What the terminal shows, without its control sequences, as soon as it holds ``words``."""
        shown, until = "", time.monotonic() + seconds
        while words not in (plain := TOLD_APART.sub("", shown)):
            ready, _, _ = select.select([self.end], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{words!r} does not come: {plain!r}"
            shown += os.read(self.end, 4096).decode(errors="replace")
        return plain

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)
        os.close(self.other)


@pytest.fixture(params=SHELLS)
def terminal(request, tmp_path) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} on this machine")
    (tmp_path / "c.yaml").write_text("name: x\n")
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    opened = Terminal(request.param, tmp_path)
    yield opened
    opened.close()


def test_a_shell_completes_commands_keys_values_and_runs(terminal):
    """Each word is shown whole before it is typed whole."""
    terminal.type("roundtable pref\t")
    terminal.read_until("preflight ")
    terminal.type("c.yaml optimizer.na\t")
    terminal.read_until("optimizer.name=")
    terminal.type("mu\t")
    terminal.read_until("muon")
    terminal.type("\x15")  # Ctrl-U: an empty line
    terminal.type("roundtable status sec\t")
    terminal.read_until("second")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_the_shell_s_own(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_ROUNDTABLE_COMPLETE=complete_{shell}" in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine to read its script")
    assert subprocess.run([shell, "-n", "-c", script], capture_output=True).returncode == 0


def test_another_shell_is_refused_in_a_line(capsys):
    assert main(["completion", "bsh"]) == 2
    assert capsys.readouterr().err == "SHELL='bsh' must be one of bash, zsh, fish; did you mean bash?\n"
    assert main(["completion", "tcsh\x1b[31m"]) == 2
    assert "\x1b" not in capsys.readouterr().err
