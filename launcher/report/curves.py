"""What the page's script draws of a run: curves in buckets, evaluations, places of events, maps of experts.

Shape letters: N updates, P buckets.
"""

import re
from typing import Any

import numpy as np

from launcher.report.buckets import bounds_of, bucketed, short
from launcher.report.events import places, thinned
from launcher.report.heat import expert_maps, layer_maps
from launcher.report.panels import KNOWN
from launcher.report.read import RunRows, layers_of
from launcher.watch.moe import load_keys

# Points of a curve: of one run, of each of many, and of all runs together.
MOST_POINTS, FEWEST_POINTS, POINTS_OF_ALL = 1000, 50, 8000
MOST_CELLS = 1_200_000  # of all runs' maps of experts, a byte each
MOST_CURVES = 24  # of a kind: sources of data, further predictions, numbers that this page does not know
SECONDS_AN_HOUR = 3600.0

# Layers are drawn as maps.
NO_CURVES = re.compile(r"step|tokens|loader_thrown_away|moe/layer_.*|moe/dropped|data/.*/share", re.DOTALL)
KINDS = ("data/", "moe/", "mtp/")


def drawn(name: str, rows: RunRows, n_runs: int, n_experts: int | None = None) -> dict[str, Any]:
    """Everything that is drawn, as JSON; of a run without updates its events."""
    data: dict[str, Any] = {"name": name, "updates": len(rows.steps), "events": places(rows.events)}
    if not data["updates"]:
        return data
    n_experts = n_experts or shared_experts(rows)
    bounds_P = bounds_of(data["updates"], max(FEWEST_POINTS, min(MOST_POINTS, POINTS_OF_ALL // n_runs)))
    return (
        data
        | positions(rows, bounds_P)
        | {"curves": curves(rows, bounds_P), "evaluations": evaluations(rows)}
        | {"layers": layer_maps(rows, n_experts), "experts": expert_maps(rows, MOST_CELLS // n_runs)}
    )


def shared_experts(rows: RunRows) -> int | None:
    """The experts of a layer, by the shares that are recorded of each."""
    lists = [rows.shared[-1][key] for key in load_keys(rows.shared[-1])] if rows.shared else []
    return len(lists[0]) if lists and isinstance(lists[0], list) else None


def positions(rows: RunRows, bounds_P: np.ndarray) -> dict[str, Any]:
    """Where the buckets lie: first and last step, tokens seen and hours of training at their ends."""
    last_P = np.append(bounds_P[1:], len(rows.steps)) - 1
    found: dict[str, Any] = {"first": rows.steps[bounds_P].tolist(), "last": rows.steps[last_P].tolist()}
    if "tokens" in rows.columns:
        found["tokens"] = short(rows.columns["tokens"][last_P])
    if "step_seconds" in rows.columns:
        hours_N = np.cumsum(np.nan_to_num(rows.columns["step_seconds"])) / SECONDS_AN_HOUR
        found["hours"] = short(hours_N[last_P])
    return found


def curves(rows: RunRows, bounds_P: np.ndarray) -> dict[str, Any]:
    """Each curve by its key, and those of the busiest and the idlest expert of all layers."""
    found = {key: bucketed(rows.columns[key], bounds_P) for key in curve_keys(rows)}
    for key, name, choose in (("moe/busiest", "load_max", np.fmax), ("moe/least_busy", "load_min", np.fmin)):
        layers = list(layers_of(rows, name).values())
        if layers:
            extreme_N = layers[0]
            for values_N in layers[1:]:
                extreme_N = choose(extreme_N, values_N)
            found[key] = bucketed(extreme_N, bounds_P)
    return found


def curve_keys(rows: RunRows) -> list[str]:
    """Keys with a finite number: those with a figure of their own, then by kind, of each and of the others some."""
    finite = [key for key, values_N in rows.columns.items() if np.isfinite(values_N).any()]
    known = [panel.key for panel in KNOWN if panel.key in finite]
    keys = [key for key in finite if key not in known and not NO_CURVES.fullmatch(key)]
    of_kinds = [key for kind in KINDS for key in [key for key in keys if key.startswith(kind)][:MOST_CURVES]]
    others = [key for key in keys if not key.startswith(KINDS)][:MOST_CURVES]
    return [*known, *of_kinds, *others]


def evaluations(rows: RunRows) -> dict[str, list[Any]]:
    """The held-out losses and their steps; of many, some, the last among them."""
    losses = {int(row["step"]): row["eval_loss"] for row in rows.evaluations}
    steps = thinned(sorted(losses))
    return {"steps": steps, "losses": short(np.array([losses[step] for step in steps], dtype=np.float64))}
