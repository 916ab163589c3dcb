"""How evenly a mixture's experts are loaded: who was chosen how often.

Shape letters: T tokens, E experts, K top_k.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def load_metrics(counts_by_layer: Mapping[int, ArrayLike], *, n_tokens: int, top_k: int) -> dict[str, Any]:
    """One update's keys about the experts' load, flat, for a row of metrics.jsonl.

    ``counts_by_layer`` holds for each MoE layer (keyed by its index in the decoder) the tokens that each expert
    processed, counts_E, whole numbers over the whole global batch. ``n_tokens`` is the number of tokens routed, padding
    left out. For ``moe/dropped`` to mean something, the counts must be of the rows that the experts were given, not of
    the router's choices.

    Keys: ``moe/layer_00/load`` shares of each expert (they sum to 1); ``load_max`` and ``load_min`` the largest and
    smallest share times E (1: balanced, E: all on one expert); ``moe/dropped`` tokens sent minus tokens processed, over
    all layers (0, as routing is dropless).
    """
    row: dict[str, Any] = {}
    dropped = 0
    for layer in sorted(counts_by_layer):
        counts_E = np.asarray(counts_by_layer[layer], dtype=np.int64)
        row |= _layer_load(f"moe/layer_{layer:02d}", counts_E)
        dropped += abs(
            n_tokens * top_k - int(counts_E.sum())
        )  # absolute: a surplus in one layer hides no loss elsewhere
    row["moe/dropped"] = dropped
    return row


def _layer_load(prefix: str, counts_E: np.ndarray) -> dict[str, Any]:
    shares_E = counts_E / max(int(counts_E.sum()), 1)  # a batch without a single token has shares of 0
    return {
        f"{prefix}/load_max": float(shares_E.max() * shares_E.size),
        f"{prefix}/load_min": float(shares_E.min() * shares_E.size),
        f"{prefix}/load": shares_E.tolist(),
    }


def load_keys(row: Mapping[str, Any]) -> list[str]:
    """The ``moe/layer_NN/load`` keys of a row, in the order of the layers; empty for a dense model."""
    keys = [key for key in row if key.startswith("moe/layer_") and key.endswith("/load")]
    return sorted(keys, key=layer_of)


def layer_of(key: str) -> int:
    """The layer's index in a ``moe/layer_NN/...`` key."""
    return int(key.split("/")[1].removeprefix("layer_"))
