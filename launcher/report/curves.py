"""The data of a run that the page's script draws: curves in buckets, evaluations, event steps and expert maps.

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

# Points of a curve: at most, at least, and at most in all runs together.
MOST_POINTS, FEWEST_POINTS, POINTS_OF_ALL = 1000, 50, 8000
MOST_CELLS = 1_200_000  # of all runs' maps of experts, a byte each
MOST_CURVES = 24  # of each kind: data sources, experts, further predictions, other numbers without a known panel
SECONDS_AN_HOUR = 3600.0

# Keys without a curve of their own; those of single layers are drawn as maps.
NO_CURVES = re.compile(r"step|tokens|loader_thrown_away|moe/layer_.*|moe/dropped|data/.*/share", re.DOTALL)
KINDS = ("data/", "moe/", "mtp/")


def drawn(name: str, rows: RunRows, n_runs: int, n_experts: int | None = None) -> dict[str, Any]:
    """Everything that the script draws of a run, as a tree for JSON; for a run without updates only its events."""
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
    """The number of experts in a layer, taken from the recorded shares; None where no row has shares."""
    lists = [rows.shared[-1][key] for key in load_keys(rows.shared[-1])] if rows.shared else []
    return len(lists[0]) if lists and isinstance(lists[0], list) else None


def positions(rows: RunRows, bounds_P: np.ndarray) -> dict[str, Any]:
    """The x-axis positions of the buckets: first and last step, and tokens seen and hours in steps at their ends."""
    last_P = np.append(bounds_P[1:], len(rows.steps)) - 1
    found: dict[str, Any] = {"first": rows.steps[bounds_P].tolist(), "last": rows.steps[last_P].tolist()}
    if "tokens" in rows.columns:
        found["tokens"] = short(rows.columns["tokens"][last_P])
    if "step_seconds" in rows.columns:
        hours_N = np.cumsum(np.nan_to_num(rows.columns["step_seconds"])) / SECONDS_AN_HOUR
        found["hours"] = short(hours_N[last_P])
    return found


def curves(rows: RunRows, bounds_P: np.ndarray) -> dict[str, Any]:
    """Each key's curve, and the load of the busiest and of the least busy expert over all layers."""
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
    """The keys to draw, of those with a finite number: all known panels' keys, then up to MOST_CURVES of each kind."""
    finite = [key for key, values_N in rows.columns.items() if np.isfinite(values_N).any()]
    known = [panel.key for panel in KNOWN if panel.key in finite]
    keys = [key for key in finite if key not in known and not NO_CURVES.fullmatch(key)]
    of_kinds = [key for kind in KINDS for key in [key for key in keys if key.startswith(kind)][:MOST_CURVES]]
    others = [key for key in keys if not key.startswith(KINDS)][:MOST_CURVES]
    return [*known, *of_kinds, *others]


def evaluations(rows: RunRows) -> dict[str, list[Any]]:
    """The held-out losses and their steps; of many evaluations an evenly spaced subset that includes the last."""
    losses = {int(row["step"]): row["eval_loss"] for row in rows.evaluations}
    steps = thinned(sorted(losses))
    return {"steps": steps, "losses": short(np.array([losses[step] for step in steps], dtype=np.float64))}
