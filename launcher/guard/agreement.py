"""The check that all ranks of a job have the same code, packages and config, and see the same run directory."""

import contextlib
import hashlib
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from data.without import hash_of_file
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.run_dir import Claim, check_run_dir, claim
from parallel.processes.device import device_problems, held_device
from parallel.processes.roll_call import RollCall, RollCallError
from parallel.processes.world import rank_hosts

PACKAGES = ("torch", "deepspeed", "numpy", "safetensors", "tokenizers", "transformers")
SOURCES = ("launcher", "modeling", "parallel", "data")
ROOT = Path(__file__).parents[2]
SEEN_SECONDS = 60  # a network file system may show a new file that much later on another node


class Agreed:
    """The outcome of ``agree``: the ranks' shared store and the claim of the run directory. Keep it while training."""

    def __init__(self, roll: RollCall, lock: Claim | None) -> None:
        self.roll = roll  # hosts the store that the process group talks over
        self.lock = lock  # rank 0's claim of the run directory; None on the other ranks

    def leave(self, exit_code: int) -> None:
        """Releases the run directory, and returns when all ranks have called it, so that they end together.

        Otherwise srun's --kill-on-bad-exit would kill rank 0, still busy with its watchers, when the first rank exits
        with a code other than 0. Meanwhile SIGTERM ends the process with ``exit_code``. Afterwards SIGTERM is ignored:
        only the exit is left, and Python restores the default handlers before the process has ended.
        """
        signal.signal(signal.SIGTERM, lambda *_: os._exit(exit_code))
        if self.lock is not None:
            self.lock.close()
        with contextlib.suppress(RollCallError):  # a rank that died here has said so, and its work is done
            self.roll.fail_together("leave", [])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def agree(config: RunConfig) -> Agreed:
    """Returns when all ranks are present, run the same code and config, and see the run directory that rank 0 claims.

    All ranks of a job call it, before the process group is opened. Raises RollCallError on all ranks if they disagree,
    or if one is missing.
    """
    roll = RollCall(config.train.start_seconds, rank_hosts())
    roll.agree("facts", facts(config, roll))
    lock, problems = None, []
    if roll.rank == 0:
        try:
            check_run_dir(config)
            lock = claim(config)
        except UserError as error:
            problems = error.problems
    roll.fail_together("claim", problems)
    roll.judge("devices", held_device(), device_problems)
    check_shared(roll, config.run_path)
    return Agreed(roll, lock)


def facts(config: RunConfig, roll: RollCall | None = None) -> dict[str, str]:
    """Name -> value of everything that must be equal on all ranks; names are as messages show them.

    With ``roll`` one rank reads the code's files for all ranks of its node that run the same ones, so that a large job
    reads its code from the shared disk once for each node. Without it this process reads them itself.
    """
    here = code_facts() if roll is None else roll.once_on_node("code", f"{ROOT} {sys.executable}", code_facts)
    own = {"the config (sha256)": hash_of_config(config)[:12]}
    if config.data.without is not None:
        own["data.without (sha256 of its documents)"] = hash_of_file(config.data.without)[:12]
    return {**here, **own}


def code_facts() -> dict[str, str]:
    """The facts that follow from installed files: versions of Python and packages, the code's commit and hash."""
    found = {"Python": platform.python_version()}
    found |= {name: package_version(name) for name in PACKAGES}
    found["the code's commit"] = commit()
    found["the code (sha256 of its files)"] = hash_of_code()[:12]
    return found


def package_version(name: str) -> str:
    """The installed version, or "none"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def commit() -> str:
    """The commit that the code was checked out at, or "none" where it is no git checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return done.stdout.strip() if done.returncode == 0 else "none"


def hash_of_code() -> str:
    """sha256 over the names and contents of all of Roundtable's Python files, which uncommitted edits change too."""
    digest = hashlib.sha256()
    for path in sorted(path for package in SOURCES for path in (ROOT / package).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def hash_of_config(config: RunConfig) -> str:
    """sha256 of the resolved config as it is saved."""
    return hashlib.sha256(dump_config(config).encode()).hexdigest()


def check_shared(roll: RollCall, run_path: Path, seconds: float = SEEN_SECONDS) -> None:
    """Raises RollCallError on all ranks where one does not see the file that rank 0 writes into the run directory.

    All ranks call it; the run directory exists on rank 0. A rank looks for the file for at most ``seconds``.
    """
    mark = run_path / ".seen"
    text = roll.share("seen", str(time.time_ns()))
    if roll.rank == 0:
        mark.write_text(text)
    roll.share("seen written")
    problems = [] if _appears(mark, text, seconds) else [_not_shared(roll, run_path)]
    try:
        roll.fail_together("shared", problems)
    finally:
        if roll.rank == 0:
            mark.unlink(missing_ok=True)


def _appears(path: Path, text: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.is_file() and path.read_text() == text:
            return True
        time.sleep(0.1)
    return False


def _not_shared(roll: RollCall, run_path: Path) -> str:
    node = roll.hosts[roll.rank] if roll.hosts else f"rank {roll.rank}'s node"
    return (
        f"run_dir={run_path} must be on a file system that the nodes share, but {node} does not see what rank 0 writes "
        f"there; choose another run_dir"
    )
