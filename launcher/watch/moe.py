"""Metrics of the experts' load in MoE layers: each expert's share of the tokens, extremes, idle and dropped.

Shape letters: T tokens, E experts, K top_k.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# With at most so many shares (some 20 kB) every row has them by default; 58 layers of 256 experts are 300 kB a step.
MOST_SHARES = 1024
SHARES_EVERY_STEPS = 100  # default interval for models with more shares


def shows_shares(step: int, last_step: int, every_steps: int | None, n_shares: int) -> bool:
    """Whether the row of update ``step`` lists the share of every expert, ``n_shares`` numbers in all.

    The rows of the first and the last update always do, and so do multiples of ``every_steps``
    (metrics.expert_shares_every_steps). None means every update for at most MOST_SHARES shares, else multiples of
    SHARES_EVERY_STEPS.
    """
    every_steps = every_steps or (1 if n_shares <= MOST_SHARES else SHARES_EVERY_STEPS)
    return step in (1, last_step) or step % every_steps == 0


def load_metrics(
    counts_by_layer: Mapping[int, ArrayLike], *, n_tokens: int, top_k: int, with_shares: bool = True
) -> dict[str, Any]:
    """The keys of one update's row of metrics.jsonl that describe the experts' load.

    ``counts_by_layer`` holds for each MoE layer (keyed by its index in the decoder) the tokens that each expert
    processed, counts_E, whole numbers over the whole global batch. ``n_tokens`` is the number of tokens routed, without
    padding. For ``moe/dropped`` to mean something, the counts must be of the rows that the experts were given, not of
    the router's choices.

    Keys: ``moe/layer_00/load_max`` and ``moe/layer_00/load_min``, the largest and smallest share times E (1: balanced,
    E: all on one expert); with ``with_shares`` ``moe/layer_00/load``, each expert's share (they sum to 1);
    ``moe/idle``, the fraction of all layers' experts that got no token; ``moe/dropped``, each layer's difference of
    n_tokens * top_k and the processed tokens, summed over the layers (0, as routing is dropless).
    """
    row: dict[str, Any] = {}
    dropped, idle, experts = 0, 0, 0
    for layer in sorted(counts_by_layer):
        counts_E = np.asarray(counts_by_layer[layer], dtype=np.int64)
        row |= _layer_load(f"moe/layer_{layer:02d}", counts_E, with_shares)
        dropped += abs(
            n_tokens * top_k - int(counts_E.sum())
        )  # absolute: a surplus in one layer hides no loss elsewhere
        idle, experts = idle + int((counts_E == 0).sum()), experts + counts_E.size
    row |= {"moe/idle": idle / max(experts, 1), "moe/dropped": dropped}
    return row


def _layer_load(prefix: str, counts_E: np.ndarray, with_shares: bool) -> dict[str, Any]:
    shares_E = counts_E / max(int(counts_E.sum()), 1)  # a batch without a single token has shares of 0
    row: dict[str, Any] = {
        f"{prefix}/load_max": float(shares_E.max() * shares_E.size),
        f"{prefix}/load_min": float(shares_E.min() * shares_E.size),
    }
    return row | ({f"{prefix}/load": shares_E.tolist()} if with_shares else {})


def load_keys(row: Mapping[str, Any]) -> list[str]:
    """The ``moe/layer_NN/load`` keys of a row, in the order of the layers; empty for a row without shares."""
    keys = [key for key in row if key.startswith("moe/layer_") and key.endswith("/load")]
    return sorted(keys, key=layer_of)


def busiest_load(row: Mapping[str, Any]) -> float | None:
    """The largest load of any expert in any layer; None for a dense model."""
    loads = [value for key, value in row.items() if key.startswith("moe/layer_") and key.endswith("/load_max")]
    return max((load for load in loads if isinstance(load, int | float)), default=None)


def layer_of(key: str) -> int:
    """The layer's index in a ``moe/layer_NN/...`` key."""
    return int(key.split("/")[1].removeprefix("layer_"))
