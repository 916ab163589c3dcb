"""`roundtable plan CONFIG`: the memory and the time of a run, computed from the code that will run, without a GPU."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.commands.profile import load_for_job
from launcher.config.checked import load_checked
from launcher.console import say, tell
from launcher.errors import UserError

CODE = "from launcher.plan.child import main; main()"


def plan_config(
    path: Path, overrides: Sequence[str], gpu: str, gpus: int | None, imbalance: float, *, as_json: bool
) -> int:
    """Prints the plan and returns the exit code. ``gpus``: None takes the job's size from the config.

    Raises UserError for an unknown GPU, a layout that does not fit the number of GPUs, or what cannot be traced.
    """
    from launcher.estimate.step import check_known
    from launcher.trace.hardware import read_hardware

    read_hardware(gpu, "--gpu")
    if not (math.isfinite(imbalance) and imbalance >= 1):
        rule = "must be a number of at least 1: rows of the busiest rank of ep over the mean"
        raise UserError([f"--imbalance={imbalance:g} {rule}; try 1.2"])
    if gpus is None:
        config, gpus = load_for_job(path, overrides)
    else:
        config = load_checked(path, overrides, world_size=gpus, data=False)
    check_known(config)
    answer = ask(path, overrides, gpu, gpus, imbalance)
    if answer is None:
        return 1
    if as_json:
        say(json.dumps(answer, indent=2))
    else:
        from launcher.plan.report import print_plan

        print_plan(answer)
    return 0


def ask(path: Path, overrides: Sequence[str], gpu: str, gpus: int, imbalance: float) -> dict[str, Any] | None:
    """The plan as JSON, from a process of its own; None, told in a line, where that fails. Raises UserError."""
    request = {"config": str(path), "overrides": list(overrides), "gpu": gpu, "imbalance": imbalance}
    command = [sys.executable, "-W", "ignore", "-P", "-c", CODE]
    text = json.dumps({**request, "world_size": gpus})
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        tell(f"the process that computes the plan ended with exit code {done.returncode}")
        return None
    answer = json.loads(done.stdout.splitlines()[-1])
    if "problems" in answer:
        raise UserError(answer["problems"])
    return answer
