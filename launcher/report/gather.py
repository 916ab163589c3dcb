"""Gathers everything that the page shows of a run from its directory, which is neither locked nor changed."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.commands.runs import RunSummary, summarize
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.report.curves import drawn
from launcher.report.events import Told, kind_of, told
from launcher.report.plans import Row, closed_forms, measured, plan_for, planned_at_start, planned_rows
from launcher.report.read import RunRows, layers_of, read_run
from launcher.report.starts import Start, starts_of
from launcher.training.lineage import Lineage, read_lineage
from launcher.training.run_dir import checkpoints_of, saved_config, start_folder
from launcher.training.run_parts import METRICS, check_parts
from parallel.checkpoint.places import is_remote, list_checkpoints
from parallel.checkpoint.store import step_of

MOST_CHANGES = 20  # keys that a note names


@dataclass
class RunFacts:
    """Everything that the page shows of one run. Texts are as they were read, so the page must escape them."""

    name: str
    path: Path
    state: str
    summary: RunSummary
    rows: RunRows
    config: RunConfig | None
    config_problem: str | None  # why config.yaml cannot be read
    lineage: Lineage | None
    starts: list[Start]
    told: list[Told]
    n_not_told: int
    kept: list[int] | None  # steps of the checkpoints that still exist; None where that is not known
    plan_rows: list[Row]
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # what the page's script draws


def gather(path: Path, name: str, *, n_runs: int = 1, gpu: str | None = None, has_ended: bool = False) -> RunFacts:
    """Reads the run in ``path``, to be shown under ``name`` on a page of ``n_runs`` runs.

    ``gpu``: also plan the run on that GPU. ``has_ended``: the caller is the run's own process, which has ended
    training. Raises UserError where a part of the run is damaged.
    """
    check_parts(path, METRICS)
    rows, summary = read_run(path / METRICS), summarize(path)
    config, problem = _config(path)
    starts = starts_of(rows.events, config)
    lines, n_not_told = told(rows.events)
    facts = RunFacts(
        name=name,
        path=path,
        state=ended_state(rows, config) if has_ended else summary.state,
        summary=summary,
        rows=rows,
        config=config,
        config_problem=problem,
        lineage=read_lineage(path),
        starts=starts,
        told=lines,
        n_not_told=n_not_told,
        kept=_kept(path),
        plan_rows=[],
    )
    facts.notes = notes_of(facts)
    facts.plan_rows = _plan(facts, gpu)
    facts.data = drawn(name, rows, n_runs, n_experts=experts_of(config))
    return facts


def _config(path: Path) -> tuple[RunConfig | None, str | None]:
    """The saved config and None, or None and why there is none; a config that cannot be loaded does not raise."""
    try:
        config = saved_config(path)
    except UserError as error:
        return None, error.problems[0]
    return config, None if config is not None else "there is no config.yaml."


def ended_state(rows: RunRows, config: RunConfig | None) -> str:
    """The final state of a run whose own process writes the page: finished, stopped, or stopped by a health rule."""
    if config is not None and len(rows.steps) and rows.steps[-1] >= config.train.steps:
        return "finished"
    last = rows.events[-1] if rows.events else {}
    return f"stopped by health.on_{kind_of(last)}" if last.get("action") == "stop" else "stopped"


def _kept(path: Path) -> list[int] | None:
    """Steps of the checkpoints that exist; None where they lie in an object store or cannot be listed."""
    with contextlib.suppress(UserError, OSError, ValueError):
        location = checkpoints_of(path)
        if not is_remote(location):
            steps = (step_of(folder.name) for folder in list_checkpoints(location))
            return [step for step in steps if step is not None]
    return None


def notes_of(facts: RunFacts) -> list[str]:
    """One line for each thing that a reader should know before reading the curves."""
    rows, events = facts.rows, facts.rows.events
    notes = []
    if facts.config_problem is not None:
        notes.append(f"The config is not shown: {facts.config_problem}")
    elif facts.summary.problem is not None:
        notes.append(facts.summary.problem)
    if not len(rows.steps):
        notes.append("This run has made no update yet, so there is nothing to draw.")
    if facts.state == "running":
        notes.append("This run is still training; the page shows what it had written when the page was made.")
    if facts.state == "crashed":
        notes.append("This run ended neither at train.steps nor on request: its last process crashed or was killed.")
    if len(facts.starts) > 1:
        notes.append(f"This run was started {len(facts.starts)} times; steps that were redone are shown once.")
    rollbacks = [event for event in events if event["event"] == "rollback"]
    if rollbacks:
        times = "once" if len(rollbacks) == 1 else f"{len(rollbacks)} times"
        notes.append(f"It rolled back {times}: updates that were taken back are not in the curves, their events are.")
    if changes := changed_keys(facts):
        notes.append(f"Changed within the run: {', '.join(changes)}.")
    if facts.lineage is not None:
        notes.append(f"It was branched from {facts.lineage.run}, step {facts.lineage.step:,}; earlier steps are there.")
    if len(rows.steps) and not layers_of(rows, "load_max"):
        notes.append("No expert's load is recorded: a dense model, or a run that did not tell.")
    if rows.n_keys_left_out:
        notes.append(f"{rows.n_keys_left_out:,} of its numbers are left out: more than a page holds.")
    return notes


def changed_keys(facts: RunFacts) -> list[str]:
    """The first MOST_CHANGES config keys that a later start changed."""
    changes = (event for event in facts.rows.events if event["event"] == "config_change")
    return list(dict.fromkeys(str(event.get("key")) for event in changes))[:MOST_CHANGES]


def _plan(facts: RunFacts, gpu: str | None) -> list[Row]:
    """The rows that lay the plan and closed forms of the last start beside what its steps measured."""
    start = facts.starts[-1] if facts.starts else None
    plan = plan_for(facts.path, start, gpu) if gpu is not None else planned_at_start(facts.rows.events)
    if gpu is not None and plan is None:
        facts.notes.append(f"It could not be planned on {gpu}.")
    forms = None
    if facts.config is not None:
        try:
            with contextlib.chdir(start_folder(facts.path, facts.config)):
                forms = closed_forms(facts.config, start.ranks if start is not None else None)
        except Exception as error:  # a config of an older version may be one that the closed forms no longer know
            facts.notes.append(f"Parameters and training state are not computed: {error}")
    return planned_rows(forms, plan, measured(facts.rows, start.step if start is not None else 0))


def experts_of(config: RunConfig | None) -> int | None:
    """The number of experts in a layer; None for a dense model or an unknown config."""
    return config.model.moe.n_experts if config is not None and config.model.moe is not None else None
