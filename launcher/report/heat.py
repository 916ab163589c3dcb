"""Heat maps over the steps, one byte a cell: each expert's load, and each layer's busiest load and entropy.

Shape letters: N updates, P columns, L layers, E experts, R rows with shares.
"""

import base64
import math
from typing import Any

import numpy as np

from launcher.report.buckets import bounds_of
from launcher.report.read import RunRows, layers_of
from launcher.watch.moe import layer_of, load_keys

MOST_COLUMNS = 240
UNKNOWN, IDLE, BALANCED = 255, 0, 128  # codes
CODES_A_DOUBLING = 32  # of load: code 160 is twice the balanced load, 96 half of it


def load_codes(loads: np.ndarray) -> np.ndarray:
    """A byte for each load (1 is balanced) on a log scale from 1/16 to 15; IDLE for a load of 0, UNKNOWN for NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.round(BALANCED + CODES_A_DOUBLING * np.log2(loads))
    codes = np.where(loads > 0, np.clip(codes, IDLE + 1, UNKNOWN - 1), IDLE)
    return np.where(np.isfinite(loads), codes, UNKNOWN).astype(np.uint8)


def part_codes(parts: np.ndarray) -> np.ndarray:
    """A byte for each number from 0 to 1 on a linear scale; UNKNOWN for NaN."""
    codes = np.clip(np.round(np.nan_to_num(parts) * (UNKNOWN - 1)), 0, UNKNOWN - 1)
    return np.where(np.isfinite(parts), codes, UNKNOWN).astype(np.uint8)


def packed(codes: np.ndarray) -> str:
    """The array's bytes, row after row, in base64."""
    return base64.b64encode(np.ascontiguousarray(codes).tobytes()).decode()


def layer_maps(rows: RunRows, n_experts: int | None) -> dict[str, Any] | None:
    """Maps of layers over steps: the busiest expert's load (the highest of a column's steps) and the mean entropy.

    The entropy is divided by log(n_experts), and left out where the number of experts is not known. None for a dense
    model.
    """
    loads = layers_of(rows, "load_max")
    if not loads:
        return None
    bounds_P = bounds_of(len(rows.steps), MOST_COLUMNS)
    busiest_LP = np.stack([np.fmax.reduceat(values_N, bounds_P) for values_N in loads.values()])
    found: dict[str, Any] = {"layers": list(loads), "steps": rows.steps[bounds_P].tolist(), "last": int(rows.steps[-1])}
    found["busiest"] = packed(load_codes(busiest_LP))
    entropies = layers_of(rows, "entropy")
    if n_experts is not None and n_experts > 1 and list(entropies) == list(loads):
        entropy_LP = np.stack([_means(values_N, bounds_P) for values_N in entropies.values()])
        found["entropy"] = packed(part_codes(entropy_LP / math.log(n_experts)))
    return found


def _means(values_N: np.ndarray, bounds_P: np.ndarray) -> np.ndarray:
    known_N = np.isfinite(values_N)
    counts_P = np.add.reduceat(known_N, bounds_P, dtype=np.int64)
    sums_P = np.add.reduceat(np.where(known_N, values_N, 0.0), bounds_P)
    return np.where(counts_P > 0, sums_P / np.maximum(counts_P, 1), math.nan)


def expert_maps(rows: RunRows, most_cells: int) -> dict[str, Any] | None:
    """A map for each MoE layer: the load of each expert in evenly spaced rows that have shares, the last among them.

    All maps together have at most ``most_cells`` cells, but at least one column. None where no row has shares.
    """
    keys = list(dict.fromkeys(key for row in rows.shared[-1:] for key in load_keys(row)))
    shapes = {key: len(rows.shared[-1][key]) for key in keys if _is_list(rows.shared[-1][key])}
    if not shapes:
        return None
    n_columns = max(1, min(MOST_COLUMNS, most_cells // sum(shapes.values()), len(rows.shared)))
    picked = [rows.shared[round(place)] for place in np.linspace(len(rows.shared) - 1, 0, n_columns)][::-1]
    layers = []
    for key, n_experts in shapes.items():
        loads_EP = np.stack([_loads(row.get(key), n_experts) for row in picked], axis=1)
        last_E = loads_EP[:, -1]
        layers.append({"layer": layer_of(key), "experts": n_experts, "codes": packed(load_codes(loads_EP))})
        layers[-1]["idle"] = int((last_E == 0).sum())
    return {"steps": [row["step"] for row in picked], "rows": rows.n_shared, "layers": layers}


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 1 << 16


def _loads(shares: Any, n_experts: int) -> np.ndarray:
    """The loads: shares times the number of experts; all NaN where the row has another number of experts."""
    if not _is_list(shares) or len(shares) != n_experts:
        return np.full(n_experts, math.nan)
    numbers = [share if isinstance(share, int | float) else math.nan for share in shares]
    return np.array(numbers, dtype=np.float64) * n_experts
