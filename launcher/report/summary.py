"""The tables of the page as plain texts: summary, starts, environment, plan, checkpoints, sources and differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.report.events import kind_of
from launcher.report.gather import RunFacts
from launcher.report.plans import measured
from launcher.report.starts import MOST_STARTS, batch_text, layout_text, leaves
from launcher.tables import loss_text, size_text
from launcher.watch.drawing import duration

LAST_PART = 0.02  # the fraction of the updates over which the final loss is averaged
MOST_ROWS = 60  # checkpoints shown of a run
MOST_KEYS = 200  # config differences shown
OWN_KEYS = ("name", "run_dir")  # keys that differ between any two runs


@dataclass(frozen=True)
class Table:
    """Titles and rows of texts. ``runs``: the index of each row's run; None where each column is a run."""

    titles: tuple[str, ...]
    rows: list[tuple[str, ...]]
    runs: list[int] | None = None
    remark: str = ""


def summary_table(runs: Sequence[RunFacts]) -> Table:
    """The main figures (state, step, losses, speed, incidents), a column for each run."""
    columns = [summary_of(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(label, *(column.get(label, "") for column in columns)) for label in labels]
    return Table(("", *(run.name for run in runs)), [row for row in rows if any(row[1:])])


def summary_of(run: RunFacts) -> dict[str, str]:
    """The run's summary: each figure's label and text."""
    rows, events = run.rows, run.rows.events
    found = {
        "state": run.state if run.summary.where is None or run.state != "running" else f"running: {run.summary.where}"
    }
    wanted = run.config.train.steps if run.config is not None else None
    step = int(rows.steps[-1]) if len(rows.steps) else 0
    found["step"] = f"{step:,} of {wanted:,}" if wanted is not None else f"{step:,}"
    found["tokens"] = _whole(_last(run, "tokens"))
    n_last = max(1, int(len(rows.steps) * LAST_PART))
    if "loss" in rows.columns and len(rows.steps):
        found[f"loss, last {LAST_PART:.0%} of updates"] = _plain(_mean(run, "loss", n_last))
    found |= _heldout(run)
    found["time in steps"] = _time(run)
    speed = measured(rows, run.starts[-1].step if run.starts else 0)
    found["tokens per second, median"] = _whole(speed.get("tokens_per_second", math.nan))
    found["MFU, median"] = f"{speed['mfu']:.1%}" if "mfu" in speed else ""
    found["peak memory of rank 0"] = f"{speed['peak_gib']:.2f} GiB" if "peak_gib" in speed else ""
    found["starts"] = str(len(run.starts)) if run.starts else "not recorded"
    for kind, label in (
        ("rollback", "rollbacks"),
        ("nonfinite", "not finite"),
        ("spike", "spikes"),
        ("restart", "crashes"),
    ):
        found[label] = _whole(sum(kind_of(event) == kind for event in events) or math.nan)
    found["updates skipped"] = _whole(_skipped(run) or math.nan)
    found["on disk"] = size_text(run.summary.bytes)
    return found


def _heldout(run: RunFacts) -> dict[str, str]:
    losses = {int(row["step"]): row["eval_loss"] for row in run.rows.evaluations}
    if not losses:
        return {}
    found, finite = {"held-out loss": _plain(losses[max(losses)])}, [at for at in losses if math.isfinite(losses[at])]
    if finite:
        best = min(finite, key=lambda step: losses[step])
        found["best held-out loss"] = f"{loss_text(losses[best])} at step {best:,}"
    return found


def _skipped(run: RunFacts) -> int:
    skipped_N = run.rows.columns.get("skipped")
    return int(np.nansum(skipped_N)) if skipped_N is not None else 0


def _time(run: RunFacts) -> str:
    seconds_N = run.rows.columns.get("step_seconds")
    return duration(float(np.nansum(seconds_N))) if seconds_N is not None and len(seconds_N) else ""


def _last(run: RunFacts, key: str) -> float:
    values_N = run.rows.columns.get(key)
    return float(values_N[-1]) if values_N is not None and len(values_N) else math.nan


def _mean(run: RunFacts, key: str, n_last: int) -> float:
    values_N = run.rows.columns.get(key, np.zeros(0))[-n_last:]
    values_N = values_N[np.isfinite(values_N)]
    return float(values_N.mean()) if len(values_N) else math.nan


def _whole(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else ""


def _plain(value: float) -> str:
    return loss_text(value) if math.isfinite(value) else "not finite"


def starts_table(runs: Sequence[RunFacts]) -> Table:
    """One row for each start: step, layout, batch, nodes, and the config changes made for it."""
    rows, numbers, left_out = [], [], 0
    for number, run in enumerate(runs):
        left_out += max(0, len(run.starts) - MOST_STARTS)
        for start in run.starts[-MOST_STARTS:]:
            event = start.event
            job = f"job {event['slurm_job']}" if event.get("slurm_job") else ""
            where = ", ".join(str(part) for part in (event.get("nodes"), job) if part)
            changed = "; ".join(start.changed)
            rows.append((f"{start.step:,}", layout_text(start), batch_text(start), where, changed))
            numbers.append(number)
    remark = f"{left_out:,} earlier starts are left out." if left_out else ""
    return Table(("after step", "layout", "batch", "where", "changed"), rows, numbers, remark)


def environment_table(runs: Sequence[RunFacts]) -> Table:
    """The environment of each run's last start (versions, device, code, config hash), a column for each run."""
    columns = []
    for run in runs:
        start = run.starts[-1] if run.starts else None
        event, found = (start.event, start.environment) if start is not None else ({}, {})
        column = {str(key): "none" if value is None else str(value) for key, value in found.items()}
        code = {"code's commit": event.get("commit"), "code's hash": event.get("code_sha256")}
        begun = run.config.init_from if run.config is not None else None
        own = {**code, "config's hash": event.get("config_sha256"), "weights from": begun}
        columns.append(column | {key: str(value) for key, value in own.items() if value})
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(label, *(column.get(label, "not recorded") for column in columns)) for label in labels]
    return Table(("", *(run.name for run in runs)), rows)


def plan_table(runs: Sequence[RunFacts]) -> Table:
    """The plan of each run's last start beside what was measured."""
    rows = [(number, row) for number, run in enumerate(runs) for row in run.plan_rows if row[1] or row[2]]
    titles, remark = ("what", "planned", "measured", ""), ""
    if not any(row[0] == "step" and row[1] for _, row in rows):
        remark = "`roundtable report RUN --plan H100` lays the planned memory, time and MFU on that GPU beside them."
    return Table(titles, [row for _, row in rows], [number for number, _ in rows], remark)


def checkpoints_table(runs: Sequence[RunFacts]) -> Table:
    """The newest checkpoints of each run: how long each took to save, and whether it still exists."""
    rows, numbers, left_out = [], [], 0
    for number, run in enumerate(runs):
        saves = {event["step"]: event for event in run.rows.events if event["event"] == "checkpoint"}
        steps = sorted({*saves, *(run.kept or ())})
        left_out += max(0, len(steps) - MOST_ROWS)
        for step in steps[-MOST_ROWS:]:
            there = "" if run.kept is None else "there" if step in run.kept else "removed"
            save = saves.get(step, {})
            times = (_seconds(save.get("seconds")), _seconds(save.get("hold_seconds")))
            rows.append((f"{step:,}", there, *times, str(save.get("path", ""))))
            numbers.append(number)
    remark = f"{left_out:,} earlier ones are left out." if left_out else ""
    return Table(("step", "now", "took", "training waited", "place"), rows, numbers, remark)


def _seconds(value: object) -> str:
    return f"{value:,.2f} s" if isinstance(value, int | float) else ""


def sources_table(runs: Sequence[RunFacts]) -> Table:
    """The configured data sources, with the share of samples and the epochs taken from each."""
    rows, numbers = [], []
    for number, run in enumerate(runs):
        for name, path, weight in _sources(run):
            share, epoch = _last(run, f"data/{name}/share"), _last(run, f"data/{name}/epoch")
            taken = (f"{share:.2%}" if math.isfinite(share) else "", f"{epoch:.3g}" if math.isfinite(epoch) else "")
            rows.append((name, path, weight, *taken))
            numbers.append(number)
    return Table(("source", "path", "weight", "share of samples", "epochs"), rows, numbers)


def _sources(run: RunFacts) -> list[tuple[str, str, str]]:
    """(name in the metrics, path, weight) of each source; names are empty without metrics, paths without a config."""
    shares = (key for key in run.rows.columns if key.startswith("data/") and key.endswith("/share"))
    names = [key.removeprefix("data/").removesuffix("/share") for key in shares]
    sources = run.config.data.sources if run.config is not None else ()
    if len(names) != len(sources):
        return [(name, "", "") for name in names] or [("", each.path, f"{each.weight:g}") for each in sources]
    return [(name, each.path, f"{each.weight:g}") for name, each in zip(names, sources, strict=True)]


def differences_table(runs: Sequence[RunFacts]) -> Table:
    """The config keys in which the runs differ, a column for each run."""
    found = [leaves(run.config) if run.config is not None else {} for run in runs]
    keys = [key for key in dict.fromkeys(key for values in found for key in values) if key not in OWN_KEYS]
    rows = [(key, *(values.get(key, "") for values in found)) for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    remark = f"{len(rows) - MOST_KEYS:,} more keys differ." if len(rows) > MOST_KEYS else ""
    return Table(("key", *(run.name for run in runs)), rows[:MOST_KEYS], remark=remark)
