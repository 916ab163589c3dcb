"""`roundtable plan`: the memory and time that a run takes, or each row of a file, estimated without a GPU."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.profile import load_for_job
from launcher.config.checked import load_checked
from launcher.console import say, tell
from launcher.errors import UserError
from launcher.plan.ask import ask
from launcher.plan.costs import check_price

if TYPE_CHECKING:
    from launcher.config.tree import RunConfig
    from launcher.plan.corrections import Correction
    from launcher.plan.search import Searched
    from launcher.trace.hardware import Hardware


GPU = "H100"  # planned for where neither the command nor the config names a GPU


@dataclass(frozen=True)
class Shown:
    """How a plan is printed: as text or JSON, with what price, and with which picture."""

    as_json: bool
    price: float | None = None  # of a GPU-hour
    timeline: Path | None = None  # a picture of one step


def plan_config(
    path: Path, overrides: Sequence[str], gpu: str | None, gpus: int | None, imbalance: float, shown: Shown
) -> int:
    """Prints the plan and returns the exit code. ``gpu`` and ``gpus``: None takes the job's from the config.

    ``imbalance``: rows that the busiest rank of ep receives, over the mean. Raises UserError for an unknown GPU, a
    layout that does not fit the number of GPUs, or a config that cannot be traced.
    """
    from launcher.estimate.step import check_known
    from launcher.plan.corrections import corrected, factors_for
    from launcher.trace.hardware import read_hardware

    if gpu is not None:
        read_hardware(gpu, "--gpu")
    check_price(shown.price)
    if shown.timeline is not None:
        from launcher.watch.picture import check_picture

        check_picture(shown.timeline, "--timeline", "step.svg")
    if not (math.isfinite(imbalance) and imbalance >= 1):
        rule = "must be a number of at least 1: rows of the busiest rank of ep over the mean"
        raise UserError([f"--imbalance={imbalance:g} {rule}; try 1.2"])
    if gpus is None:
        config, gpus = load_for_job(path, overrides)
    else:
        config = load_checked(path, overrides, world_size=gpus, data=False)
    check_known(config)
    gpu, hardware = gpu_for(config, gpu)
    factors = factors_for(hardware.name, "dense" if config.model.moe is None else "MoE", "traced")
    answer = ask(path, overrides, gpu, gpus, imbalance, shown.price)
    if answer is None:
        return 1
    rows = answer.pop("timeline")
    if shown.timeline is not None:
        from launcher.plan.timeline import save_timeline

        save_timeline(answer, rows, shown.timeline)
    answer = corrected(answer, factors)
    if shown.as_json:
        say(json.dumps(answer, indent=2))
    else:
        from launcher.plan.report import print_plan

        print_plan(answer)
        if factors:
            say(factors.words)
        if shown.timeline is not None:
            say(f"one step, as a picture: {shown.timeline}")
    return 0


def gpu_for(config: "RunConfig", gpu: str | None) -> "tuple[str, Hardware]":
    """The name of the GPU to plan for and its hardware description: the command's, else the config's, else an H100."""
    from launcher.trace.hardware import read_hardware

    option = "--gpu"
    if gpu is None and config.slurm.gpu is not None:
        gpu, option = config.slurm.gpu, "slurm.gpu"
    gpu = GPU if gpu is None else gpu
    hardware = read_hardware(gpu, option)
    hardware.check_fp8(config.train.precision)
    return gpu, hardware


def plan_file(path: Path, *, as_json: bool) -> int:
    """Prints a plan for each row of a file of JSON lines and returns 0; a row that cannot be planned says why.

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
    path: Path,
    overrides: Sequence[str],
    gpu: str | None,
    gpus: int | None,
    out: Path | None,
    shown: Shown,
    n_traces: int = 0,
) -> int:
    """Prints the fastest layouts of a config that fit, writes the first one's config to ``out``; returns the exit code.

    The best ``n_traces`` of them are then traced, within a minute in all, and ordered by their traces.

    Raises UserError for an unknown GPU, a model that no layout can run, an ``out`` that exists, or where nothing fits.
    """
    from launcher.closed_form.gpus import gpu_like
    from launcher.config.load import load_config
    from launcher.plan.decide import WHOLE_SECONDS, decide, verdict_json
    from launcher.plan.search import search, searched_json
    from launcher.trace.hardware import read_hardware

    if out is not None and (out.exists() or not out.absolute().parent.is_dir()):
        raise UserError([f"--write={out} must be a new file in a folder that is there; give another name"])
    check_price(shown.price)
    if gpu is not None:
        read_hardware(gpu, "--gpu")
    config = load_config(path, overrides)
    began = time.monotonic()
    gpu, hardware = gpu_for(config, gpu)
    n_gpus, per_node = gpus or config.slurm.world_size, max(1, config.slurm.n_tasks_per_node)
    part = gpu_like(hardware, min(per_node, n_gpus))
    found = search(config, n_gpus, part, part.node_gpus)
    if not found.best:
        raise UserError(none_found(config, found, n_gpus, hardware.name))
    traces = None
    if n_traces:
        left = WHOLE_SECONDS - (time.monotonic() - began)
        verdicts = decide(found, path, overrides, gpu, part, n_gpus, n_traces, left)
        traces = [verdict_json(each) for each in verdicts]
    answer = searched_json(found, n_gpus, part, part.node_gpus, shown.price, traces)
    if out is not None:
        from launcher.config.dump import dump_config

        out.write_text(dump_config(found.best[0].config))
    if shown.as_json:
        say(json.dumps(answer, indent=2))
    else:
        from launcher.plan.search_text import print_search

        print_search(answer, out, gpu)
    return 0


def none_found(config: "RunConfig", found: "Searched", n_gpus: int, gpu: str) -> list[str]:
    """Why a search has found nothing: the rules that the config itself breaks, or that no layout is legal or fits."""
    from launcher.config.rules import check

    if found.n_planned > found.n_unfit or not found.n_planned:
        return check(config, n_gpus) or [
            f"--gpus={n_gpus} has no legal layout of this model and batch; try a power of two"
        ]
    return [f"--gpus={n_gpus} of {gpu} are too few: none of {found.n_planned} layouts fits; try more, or larger ones"]


def calibrate_by(run: str, gpu: str | None, *, as_json: bool) -> int:
    """Stores a run's planned and measured values, which correct later plans, prints them, and returns 0.

    Raises UserError where the run has too few steps, or ran on other hardware than ``gpu``.
    """
    from launcher.plan.calibrate import measure_run
    from launcher.plan.corrections import keep
    from launcher.slurm.follow import find_run

    correction, remarks = measure_run(find_run(run), gpu)
    kept = keep(correction)
    if as_json:
        say(json.dumps({**asdict(correction), "remarks": remarks, "file": str(kept)}, indent=2))
        return 0
    print_corrections([correction])
    for remark in remarks:
        tell(remark)
    say(f"kept in {kept}; `roundtable plan --forget {correction.name}` removes it")
    return 0


def list_calibrations(*, as_json: bool) -> int:
    """Prints all stored corrections and returns 0. Raises UserError where their file is damaged."""
    from launcher.plan.corrections import corrections_file, read_corrections

    found = read_corrections()
    if as_json:
        say(json.dumps([asdict(each) for each in found], indent=2))
    elif not found:
        say(f"no plan is corrected: there is none in {corrections_file()}")
    else:
        print_corrections(found)
    return 0


def forget_calibration(name: str) -> int:
    """Removes the correction of this name and returns 0. Raises UserError where there is none."""
    from launcher.plan.corrections import forget

    say(f"{name} is removed from {forget(name)}")
    return 0


def print_corrections(found: "Sequence[Correction]") -> None:
    """Prints a table of planned and measured values and their ratio, for each planning method and term."""
    from launcher.plan.corrections import ENGINES
    from launcher.tables import plain_table, wide_console

    table = plain_table("calibration", "plans by", "term", ">planned", ">measured", ">ratio")
    for each in found:
        for engine in ENGINES:
            for term, planned in each.planned.get(engine, {}).items():
                ratio = each.ratio(engine, term)
                if ratio is not None:
                    words = (each.origin, engine.replace("_", " "), term.replace("_", " "))
                    table.add_row(*words, f"{planned:,.4g}", f"{each.measured[term]:,.4g}", f"{ratio:.3f}")
    wide_console().print(table)
