"""`roundtable report RUN...`: writes one HTML file about one run or several, and nothing else."""

import os
from collections.abc import Sequence
from pathlib import Path

from data.errors import reason_of
from data.places import why_no_path, why_not_writable
from launcher.commands.runs import PARTS_OF_A_RUN, RUNS_DIR, short_names
from launcher.console import say
from launcher.errors import UserError
from launcher.report.at_end import write_page
from launcher.report.gather import gather
from launcher.report.page import made_at, render
from launcher.slurm.queue import runs_of
from launcher.training.run_parts import REPORT
from parallel.processes.stop import undoing

MOST_RUNS = 50  # on one page


def report_runs(names: Sequence[str], out: str | None, gpu: str | None) -> int:
    """Writes the page and prints its path; returns 0. ``gpu``: also shows the plan for that GPU beside each run.

    Raises UserError, before anything is created, where a run does not exist or is damaged, or the file cannot be
    written.
    """
    paths = list(dict.fromkeys(path for name in names for path in runs_named(name)))
    if len(paths) > MOST_RUNS:
        raise UserError([f"RUN: {len(paths)} runs are more than the {MOST_RUNS} of one page; give fewer"])
    target = Path(out) if out is not None else (paths[0] / REPORT if len(paths) == 1 else Path(REPORT))
    check_target(target)
    if gpu is not None:
        from launcher.trace.hardware import read_hardware

        read_hardware(gpu, "--plan")
    called = short_names([path / REPORT for path in paths])
    runs = [gather(path, name, n_runs=len(paths), gpu=gpu) for path, name in zip(paths, called, strict=True)]
    try:
        with undoing():
            write_page(target, render(runs, made_at()))
    except OSError as error:
        raise UserError([f"--out={target} cannot be written ({reason_of(error)}); choose another place"]) from None
    say(str(target))
    return 0


def runs_named(name: str) -> list[Path]:
    """The run directory of this path, or of this name below runs; for a sweep's directory, those of all its runs.

    Raises UserError where there is none.
    """
    rule = why_no_path(name)
    for path in (Path(name), Path(RUNS_DIR) / name) if rule is None else ():
        if any(os.path.lexists(path / part) for part in PARTS_OF_A_RUN):
            return runs_of(path)
    rule = rule or f"must be a run directory, or a run's name below {RUNS_DIR}"
    raise UserError([f"RUN={name} {rule}; see `roundtable runs`"])


def check_target(target: Path) -> None:
    """Raises UserError where the page cannot be written to ``target``; called before any run is read."""
    rule = why_no_path(str(target))
    if rule is None and target.suffix.lower() not in (".html", ".htm"):
        rule = "must end in .html"
    if rule is None:
        rule = why_not_writable(target.parent)
    if rule is None and not target.parent.is_dir():
        rule = f"must lie in a folder that is there, and {target.parent} is not"
    if rule is None and os.path.lexists(target) and not (target.is_file() and os.access(target, os.W_OK)):
        rule = "must be a file that can be written to, and is not"
    if rule is not None:
        raise UserError([f"--out={target} {rule}; choose another file"])
