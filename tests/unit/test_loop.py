"""What the training loop decides between the passes, with an engine that only tells what it was asked for."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from launcher.config.load import load_config
from launcher.config.tree import HealthConfig
from launcher.training import loop
from launcher.training.batch_ramp import BatchRamp
from launcher.training.health import Health
from launcher.training.state import TrainState
from launcher.training.step import Totals
from launcher.watch.watchers import NullWatchers
from modeling.metrics import metrics_of
from modeling.moe import RoutingStats
from parallel.mesh import lone_mesh
from parallel.zero.engine import StepResult

CONFIG = load_config(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
MOE_LAYERS = [layer for layer in CONFIG.model.all_layers if CONFIG.model.is_moe_layer(layer)]


def totals_of(value: float) -> Totals:
    """Those of a batch whose metrics have this sum in each layer."""
    assert CONFIG.model.moe is not None
    metrics = {name: dict.fromkeys(MOE_LAYERS, value) for name in metrics_of(RoutingStats)}
    counts = {layer: np.zeros(CONFIG.model.moe.n_experts, np.int64) for layer in MOE_LAYERS}
    return Totals(0.0, 0.0, [], counts, metrics, None)


def test_the_balance_loss_of_a_growing_batch_is_a_mean_over_its_own_sequences() -> None:
    ramp = BatchRamp(start=2, increment=2, samples=8)
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, batch_ramp=ramp))
    engine: Any = SimpleNamespace(mesh=lone_mesh(torch.device("cpu")))
    state, update = TrainState(step=1), StepResult(1.0, False, 1.0)
    row = loop.metrics_row(config, engine, state, totals_of(2.0), update, 5, 5, 1e-3, 1.0)
    assert row["batch_size"] == 2
    assert row["moe/balance_loss"] == len(MOE_LAYERS)


def test_batches_without_a_target_update_nothing_told_of_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    engine: Any = SimpleNamespace(
        mesh=lone_mesh(torch.device("cpu")),
        step=lambda lr: asked.append("step"),
        discard=lambda: asked.append("discard") or StepResult(0.0, True, 1.0),
    )
    dataset: Any = SimpleNamespace(
        count=lambda indices: (0, 9), documents=lambda indices: [], progress=lambda consumed, skipped: {}
    )
    monkeypatch.setattr(loop, "accumulate_gradients", lambda *_: totals_of(0.0))
    state, health = TrainState(), Health(HealthConfig())
    done = [loop.run_step(CONFIG, engine, dataset, state, health=health) for _ in range(2)]
    assert asked == ["discard", "discard"]
    assert [each.trained for each in done] == [False, False]
    assert [each.event is None for each in done] == [False, True]
    assert (state.step, state.tokens, state.losses) == (2, 18, [])


def test_a_second_rollback_keeps_what_the_first_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = TrainState(step=4, consumed=32, skipped=[(8, 16)])
    monkeypatch.setattr(loop, "restore", lambda *_: (restored, []))
    engine: Any = None
    event = {"event": "spike", "step": 6}
    state = loop.roll_back(CONFIG, engine, TrainState(step=5, consumed=48), event, NullWatchers())
    assert (state.step, state.consumed, state.skipped) == (4, 32, [(8, 16), (32, 48)])
