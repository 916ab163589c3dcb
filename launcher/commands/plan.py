"""`roundtable plan`: the memory and the time of a run, or of each row of a file, without a GPU."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from launcher.commands.profile import load_for_job
from launcher.config.checked import load_checked
from launcher.console import say
from launcher.errors import UserError
from launcher.plan.ask import ask


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


def plan_file(path: Path, *, as_json: bool) -> int:
    """Prints a plan for each row of a file of JSON lines and returns the exit code; a row that has none says why.

    Raises UserError where the file cannot be read.
    """
    from launcher.closed_form.forecast import plan_rows
    from launcher.closed_form.rows import read_rows

    if not path.is_file():
        raise UserError([f"--rows={path} must be a file of JSON lines; see benchmarks/published/README.md"])
    plans = plan_rows(read_rows(path))
    if as_json:
        for plan in plans:
            say(json.dumps(plan), raw=True)
    else:
        from launcher.closed_form.text import print_plans

        print_plans(plans)
    return 0
