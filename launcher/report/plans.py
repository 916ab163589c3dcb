"""A run's planned memory, time and MFU (closed forms or `roundtable plan`) beside what its steps measured."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.plan.ask import ask
from launcher.report.read import RunRows
from launcher.report.starts import Start
from launcher.tables import size_text
from launcher.training.run_parts import CONFIG

GIB = 2**30
Row = tuple[str, str, str, str]  # what, planned, measured, a remark


def measured(rows: RunRows, since: int) -> dict[str, float]:
    """Medians of the speed keys over the steps after ``since``, and the peak memory; unmeasured keys are left out.

    Where the batch size grows within the run, only steps with the largest size reached count.
    """
    is_new_N = rows.steps > since
    sizes_N = rows.columns.get("batch_size")
    if sizes_N is not None and is_new_N.any():
        is_new_N &= sizes_N == np.nanmax(sizes_N[is_new_N])
    found: dict[str, float] = {}
    for key in ("step_seconds", "tokens_per_second", "mfu"):
        values = _finite(rows, key, is_new_N)
        if len(values):
            found[key] = float(np.median(values[1:] if len(values) > 1 else values))  # the first step warms up
    peaks = _finite(rows, "peak_gib", is_new_N)
    return found | ({"peak_gib": float(peaks.max())} if len(peaks) else {})


def _finite(rows: RunRows, key: str, is_new_N: np.ndarray) -> np.ndarray:
    values_N = rows.columns.get(key)
    if values_N is None:
        return np.zeros(0)
    return values_N[is_new_N & np.isfinite(values_N)]


def closed_forms(config: RunConfig, ranks: int | None) -> dict[str, Any]:
    """Parameters, FLOPs and training state, computed from the config alone. Imports torch, which takes a second.

    ``model`` describes the model; ``fullest`` is the memory of the pipeline stage that holds most, None where the
    number of ranks is not known.
    """
    from launcher.plan.closed_forms import describe_memory, describe_model

    memory = describe_memory(config, ranks) if ranks is not None else []
    fullest = max(memory, key=lambda row: row["total_bytes"], default=None)
    return {"model": describe_model(config), "fullest": fullest}


def planned_rows(
    forms: Mapping[str, Any] | None, plan: Mapping[str, Any] | None, found: Mapping[str, float]
) -> list[Row]:
    """The rows of the table that lays plan beside measurement; None or missing entries become empty cells."""
    rows: list[Row] = []
    if forms is not None:
        model = forms["model"]
        rows.append(
            ("parameters", f"{model['parameters']:,}", "", f"{model['active_parameters']:,} active for a token")
        )
        rows.append(("FLOPs a token", f"{model['flops_per_token']:.4g}", "", "forward and backward, closed form"))
    state = forms["fullest"] if forms is not None else None
    if state is not None:
        parts = ", ".join(f"{part} {size_text(state[f'{part}_bytes'])}" for part in ("weights", "masters", "optimizer"))
        rows.append(("training state of a rank", size_text(state["total_bytes"]), "", f"{parts}; without activations"))
    rows.append(_row("peak memory", plan, found, "peak_gib", lambda each: each["peak_bytes"] / GIB, "GiB", "rank 0"))
    rows.append(_row("step", plan, found, "step_seconds", lambda each: each["step_seconds"], "s", "median"))
    rows.append(_row("tokens per second", plan, found, "tokens_per_second", lambda each: each["tokens_per_second"]))
    rows.append(_row("MFU", plan, found, "mfu", lambda each: each["mfu"], "", "median; unknown on a CPU"))
    return rows


def planned_at_start(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The plan that the run's last ``plan`` event recorded; None where there is no such event."""
    said = next((event for event in reversed(events) if event["event"] == "plan"), None)
    if said is None:
        return None
    found: dict[str, Any] = {key: _number(said.get(key)) for key in ("step_seconds", "tokens_per_second")}
    return found | {"peak_bytes": _number(said.get("peak_gib")) * GIB, "mfu": math.nan, "gpu": said.get("gpu")}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _row(
    what: str, plan: Any, found: Mapping[str, float], key: str, take: Any, unit: str = "", remark: str = "median"
) -> Row:
    planned = float(take(plan)) if plan is not None else math.nan
    on_gpu = f" on {plan['gpu']}" if plan is not None and plan["gpu"] and math.isfinite(planned) else ""
    real = found.get(key, math.nan)
    ratio = f"; {real / planned:.2f} times the plan" if math.isfinite(real) and planned > 0 else ""
    return what, _with_unit(planned, key, unit) + on_gpu, _with_unit(real, key, unit), f"{remark}{ratio}"


def _with_unit(value: float, key: str, unit: str) -> str:
    if not math.isfinite(value):
        return ""
    if key == "mfu":
        return f"{value:.1%}"
    return f"{value:,.4g} {unit}".strip() if value < 1e4 else f"{value:,.0f} {unit}".strip()


def plan_for(run_path: Path, start: Start | None, gpu: str) -> dict[str, Any] | None:
    """The plan that `roundtable plan` makes for the run's last start on that GPU; None where its process failed.

    Raises UserError where the run does not record its number of ranks.
    """
    if start is None or start.ranks is None:
        rule = "must hold a run that was started, and says no number of ranks"
        raise UserError([f"RUN={run_path} {rule}; leave out --plan"])
    return ask(run_path / CONFIG, (), gpu, start.ranks, imbalance=1.0)
