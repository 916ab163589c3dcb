"""What a command copies out of a checkpoint into TMPDIR is gone when a signal has ended it."""

import getpass
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rotating import some_fast
from task_runs import save_task_run

# The command, which signals itself where it begins to read weights: the copies have been made by then.
STUB = """
import os, sys
from launcher.cli import main
from launcher.commands.trained import Trained

def read_box(self, name, box, signum=int(sys.argv[1])):
    assert self.tokenizer is not None and os.listdir(os.environ["TMPDIR"])
    os.kill(os.getpid(), signum)

Trained.read_box = read_box
sys.exit(main(sys.argv[2:]))
"""
COMMANDS = {
    "eval": ["eval", "run", "--text", "text"],
    "export": ["export", "run", "out"],
    "generate": ["generate", "run", "--prompt", "a"],
    "inspect": ["inspect", "run", "--text", "a"],
    "average": ["average", "run", "other", "out"],
}
OF_TORCH = {f"torchinductor_{getpass.getuser()}"}  # an empty cache, made as it is imported


@pytest.mark.parametrize("signum", some_fast([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], signal.SIGTERM))
@pytest.mark.parametrize("command", some_fast(COMMANDS, "generate"))
def test_a_signal_leaves_no_copy(tmp_path: Path, command: str, signum: signal.Signals) -> None:
    save_task_run(tmp_path)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    (tmp_path / "text").write_text("a text to be judged")
    (tmp_path / "copies").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", STUB, str(int(signum)), *COMMANDS[command]],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path / "copies")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (128 + signum, "")
    assert [path for path in (tmp_path / "copies").iterdir() if path.name not in OF_TORCH] == []
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other", "text", "copies"}
