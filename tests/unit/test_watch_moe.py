"""Expert load: shares, extremes, and a drop counter that sees a loss."""

import numpy as np
import pytest
import torch

from launcher.watch.moe import load_keys, load_metrics


def test_keys_and_numbers_of_two_layers() -> None:
    counts = {3: torch.tensor([4, 0, 2, 2]), 1: np.array([2, 2, 2, 2])}
    row = load_metrics(counts, n_tokens=4, top_k=2)
    assert row == {
        "moe/layer_01/load_max": 1.0,
        "moe/layer_01/load_min": 1.0,
        "moe/layer_01/load": [0.25, 0.25, 0.25, 0.25],
        "moe/layer_03/load_max": 2.0,
        "moe/layer_03/load_min": 0.0,
        "moe/layer_03/load": [0.5, 0.0, 0.25, 0.25],
        "moe/dropped": 0,
    }
    assert list(row)[:3] == [f"moe/layer_01/{key}" for key in ("load_max", "load_min", "load")]


@pytest.mark.parametrize("counts", [{0: [3, 4]}, {0: [5, 4]}, {0: [3, 4], 1: [5, 4]}])
def test_planted_lost_or_doubled_token_is_counted_as_dropped(counts: dict[int, list[int]]) -> None:
    row = load_metrics(counts, n_tokens=4, top_k=2)
    assert row["moe/dropped"] == len(counts)


def test_a_batch_without_tokens_has_no_load() -> None:
    row = load_metrics({0: [0, 0]}, n_tokens=0, top_k=2)
    assert row["moe/layer_00/load"] == [0.0, 0.0]
    assert row["moe/dropped"] == 0


def test_load_keys_come_in_the_order_of_the_layers() -> None:
    row = load_metrics({layer: [1, 1] for layer in (100, 2, 11)}, n_tokens=2, top_k=1)
    assert load_keys(row) == ["moe/layer_02/load", "moe/layer_11/load", "moe/layer_100/load"]
    assert load_keys({"step": 1, "loss": 2.0}) == []
