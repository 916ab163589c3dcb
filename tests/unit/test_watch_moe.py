"""Expert load: shares, extremes, entropy, and a drop counter that sees a loss."""

import numpy as np
import pytest
import torch

from launcher.watch.moe import load_keys, moe_metrics


def test_keys_and_numbers_of_two_layers() -> None:
    counts = {3: torch.tensor([4, 0, 2, 2]), 1: np.array([2, 2, 2, 2])}
    row = moe_metrics(counts, {1: 1.25, 3: torch.tensor(0.5)}, n_tokens=4, top_k=2, balance_loss=1.01, z_loss=0.25)
    assert row == {
        "moe/layer_01/load_max": 1.0,
        "moe/layer_01/load_min": 1.0,
        "moe/layer_01/entropy": 1.25,
        "moe/layer_01/load": [0.25, 0.25, 0.25, 0.25],
        "moe/layer_03/load_max": 2.0,
        "moe/layer_03/load_min": 0.0,
        "moe/layer_03/entropy": 0.5,
        "moe/layer_03/load": [0.5, 0.0, 0.25, 0.25],
        "moe/dropped": 0,
        "moe/balance_loss": 1.01,
        "moe/z_loss": 0.25,
    }
    assert list(row)[:4] == [f"moe/layer_01/{key}" for key in ("load_max", "load_min", "entropy", "load")]


def test_losses_that_are_not_trained_with_have_no_key() -> None:
    row = moe_metrics({0: [1, 1]}, {0: 0.0}, n_tokens=2, top_k=1)
    assert "moe/balance_loss" not in row
    assert "moe/z_loss" not in row


@pytest.mark.parametrize("counts", [{0: [3, 4]}, {0: [5, 4]}, {0: [3, 4], 1: [5, 4]}])
def test_planted_lost_or_doubled_token_is_counted_as_dropped(counts: dict[int, list[int]]) -> None:
    row = moe_metrics(counts, dict.fromkeys(counts, 0.0), n_tokens=4, top_k=2)
    assert row["moe/dropped"] == len(counts)


def test_a_batch_without_tokens_has_no_load() -> None:
    row = moe_metrics({0: [0, 0]}, {0: 0.0}, n_tokens=0, top_k=2)
    assert row["moe/layer_00/load"] == [0.0, 0.0]
    assert row["moe/dropped"] == 0


def test_load_keys_come_in_the_order_of_the_layers() -> None:
    row = moe_metrics({layer: [1, 1] for layer in (100, 2, 11)}, dict.fromkeys((100, 2, 11), 0.0), n_tokens=2, top_k=1)
    assert load_keys(row) == ["moe/layer_02/load", "moe/layer_11/load", "moe/layer_100/load"]
    assert load_keys({"step": 1, "loss": 2.0}) == []
