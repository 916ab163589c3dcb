"""`roundtable plan`: the memory and the time of a run, or of each row of a file, without a GPU."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.profile import load_for_job
from launcher.config.checked import load_checked
from launcher.console import say
from launcher.errors import UserError
from launcher.plan.ask import ask

if TYPE_CHECKING:
    from launcher.config.tree import RunConfig
    from launcher.plan.search import Searched


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


def search_config(
    path: Path, overrides: Sequence[str], gpu: str, gpus: int | None, out: Path | None, *, as_json: bool
) -> int:
    """Prints the fastest layouts of a config that fit, writes the first one's config to ``out``; returns the exit code.

    Raises UserError for an unknown GPU, a model that no layout runs, a file that is there, or where nothing fits.
    """
    from launcher.closed_form.gpus import gpu_like
    from launcher.config.load import load_config
    from launcher.plan.search import search, searched_json
    from launcher.trace.hardware import read_hardware

    if out is not None and (out.exists() or not out.absolute().parent.is_dir()):
        raise UserError([f"--write={out} must be a new file in a folder that is there; give another name"])
    hardware = read_hardware(gpu, "--gpu")
    config = load_config(path, overrides)
    n_gpus, per_node = gpus or config.slurm.world_size, max(1, config.slurm.n_tasks_per_node)
    part = gpu_like(hardware, min(per_node, n_gpus))
    found = search(config, n_gpus, part, part.node_gpus)
    if not found.best:
        raise UserError(none_found(config, found, n_gpus, hardware.name))
    answer = searched_json(found, n_gpus, part, part.node_gpus)
    if out is not None:
        from launcher.config.dump import dump_config

        out.write_text(dump_config(found.best[0].config))
    if as_json:
        say(json.dumps(answer, indent=2))
    else:
        from launcher.plan.search_text import print_search

        print_search(answer, out)
    return 0


def none_found(config: "RunConfig", found: "Searched", n_gpus: int, gpu: str) -> list[str]:
    """Why a search has found nothing: what the rules say of the config itself, or that no layout fits."""
    from launcher.config.rules import check

    if found.n_planned > found.n_unfit or not found.n_planned:
        return check(config, n_gpus) or [
            f"--gpus={n_gpus} has no legal layout of this model and batch; try a power of two"
        ]
    return [f"--gpus={n_gpus} of {gpu} are too few: none of {found.n_planned} layouts fits; try more, or larger ones"]
