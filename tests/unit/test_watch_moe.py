"""Expert load: shares, extremes, and a drop counter that sees a loss."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from launcher.config.load import load_config
from launcher.config.tree import MetricsConfig
from launcher.training.loop import metrics_row
from launcher.training.state import TrainState
from launcher.training.step import Totals
from launcher.watch.metrics import encode_row
from launcher.watch.moe import busiest_load, load_keys, load_metrics, shows_shares
from modeling.metrics import metrics_of
from modeling.moe import RoutingStats
from parallel.mesh import lone_mesh
from parallel.zero.engine import StepResult

CONFIGS = Path(__file__).parents[2] / "configs"


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
        "moe/idle": 0.125,
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


@pytest.mark.parametrize(
    ("step", "every_steps", "n_shares", "shown"),
    [
        (7, None, 1024, True),  # few: each row has them
        (7, None, 1025, False),
        (1, None, 1025, True),
        (100, None, 1025, True),
        (250, None, 1025, True),  # the last one
        (9, 10, 8, False),  # as asked, however few
        (10, 10, 10**5, True),
        (7, 1, 10**5, True),
    ],
)
def test_which_rows_have_each_experts_share(step: int, every_steps: int | None, n_shares: int, shown: bool) -> None:
    assert shows_shares(step, 250, every_steps, n_shares) is shown


def row_of_deepseek_v3(step: int) -> dict[str, Any]:
    """A row of metrics.jsonl at the published size: 58 layers of 256 experts."""
    config = dataclasses.replace(load_config(CONFIGS / "models" / "deepseek-v3.yaml"), metrics=MetricsConfig())
    random = np.random.default_rng(step)
    layers = [layer for layer in config.model.all_layers if config.model.is_moe_layer(layer)]
    counts = {layer: random.integers(0, 10**6, 256) for layer in layers}
    metrics = {name: {layer: random.random() for layer in layers} for name in metrics_of(RoutingStats)}
    totals = Totals(1.5, 0.5, [random.random()], counts, metrics, None)
    engine: Any = SimpleNamespace(mesh=lone_mesh(torch.device("cpu")))
    update = StepResult(random.random(), False, 1.0)
    state = TrainState(step=step, tokens=10**12)
    return metrics_row(config, engine, state, totals, update, 10**6, 10**6, 2.2e-4, random.random())


def test_a_row_of_a_large_model_is_small() -> None:
    """At most 10 kB a step, and what is left tells of each layer; every hundredth row has the shares."""
    row = row_of_deepseek_v3(7)
    assert len(encode_row(row)) < 10_000
    assert load_keys(row) == []
    assert len([key for key in row if key.endswith("/load_max")]) >= 58
    whole = row_of_deepseek_v3(100)
    assert len(load_keys(whole)) >= 58
    assert len(encode_row(whole)) > 250_000  # what each row had: the check above sees it
    assert busiest_load(row) == max(value for key, value in row.items() if key.endswith("/load_max"))
    assert busiest_load({"loss": 1.0}) is None
