"""Metrics that layers declare: how they are combined, and under which keys."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

import launcher.training.step as step
from launcher.training.step import Sums
from modeling.config import ModelConfig
from modeling.decoder import Output
from modeling.metrics import Metric, logged, metrics_of
from modeling.moe import RoutingStats
from modeling.moe_config import MoEConfig
from parallel.mesh import Axis, lone_mesh
from parallel.processes.stop import StopRequest


@dataclass
class Stats:
    counts_E: Tensor
    entropy: Annotated[Tensor, Metric("moe/layer_{layer:02d}/entropy", mean_over="tokens")]
    largest: Annotated[Tensor, Metric("moe/layer_{layer:02d}/largest", reduce="max")]
    balance: Annotated[Tensor, Metric("moe/balance", mean_over="sequences")]
    pairs: Annotated[Tensor, Metric("moe/pairs")]
    peak: Annotated[Tensor, Metric("moe/peak", reduce="max")]


def test_a_routers_metrics_are_the_fields_that_say_so() -> None:
    assert list(metrics_of(RoutingStats)) == ["entropy", "balance_loss", "z_loss"]
    assert list(metrics_of(Stats, "max")) == ["largest", "peak"]
    assert metrics_of(RoutingStats, "max") == {}


def test_passes_and_layers_are_combined_as_the_metric_says(monkeypatch) -> None:
    """Two micro-batches, two layers: sums add up and are divided once, maxima stay maxima."""
    monkeypatch.setattr(step, "RoutingStats", Stats)
    config = ModelConfig(n_layers=3, moe=MoEConfig(n_experts=2, n_dense_layers=1))
    sums = Sums(config)
    for number in (1, 2):
        layers = {}
        for layer in (2, 1):
            values = (1.0 * layer, -1.0 * number * layer, 3.0, 10.0 * number, float(number + layer))
            layers[layer] = Stats(torch.tensor([number, layer]), *map(torch.tensor, values))
        sums.add(Output(torch.tensor(2.0), None, z_loss=torch.tensor(0.0), stats=layers))
    totals = sums.over_ranks(lone_mesh(torch.device("cpu")), StopRequest())
    assert totals.loss == 4.0
    assert {layer: counts.tolist() for layer, counts in totals.counts.items()} == {1: [3, 2], 2: [3, 4]}
    assert logged(metrics_of(Stats), totals.metrics, n_tokens=8, n_sequences=3) == {
        "moe/layer_01/entropy": 2.0 / 8,
        "moe/layer_02/entropy": 4.0 / 8,
        "moe/layer_01/largest": -1.0,
        "moe/layer_02/largest": -2.0,
        "moe/balance": 12.0 / 3,
        "moe/pairs": 60.0,
        "moe/peak": 4.0,
    }


def test_what_ranks_share_counts_for_a_part_on_each_and_what_others_hold_for_nothing(monkeypatch) -> None:
    """Ranks of tp have the same losses, those of tp and cp the same sequences; layer 1 is another stage's."""
    monkeypatch.setattr(step, "RoutingStats", Stats)
    alone = lone_mesh(torch.device("cpu"))
    mesh = replace(alone, tp=Axis(0, 2, (0, 1), None), cp=Axis(0, 3, (0, 2, 4), None))
    sums = Sums(ModelConfig(n_layers=3, moe=MoEConfig(n_experts=2, n_dense_layers=1)))
    stats = Stats(torch.tensor([1, 2]), *map(torch.tensor, (2.0, -2.0, 3.0, 10.0, 4.0)))
    sums.add(Output(torch.tensor(2.0), None, z_loss=torch.tensor(4.0), stats={2: stats}))
    totals = sums.over_ranks(mesh, StopRequest())
    assert (totals.loss, totals.z_loss) == (1.0, 2.0)
    assert {layer: counts.tolist() for layer, counts in totals.counts.items()} == {1: [0, 0], 2: [1, 2]}
    assert totals.metrics == {
        "entropy": {1: 0.0, 2: 2.0},
        "balance": {1: 0.0, 2: 0.5},
        "pairs": {1: 0.0, 2: 10.0},
        "largest": {1: -math.inf, 2: -2.0},
        "peak": {1: -math.inf, 2: 4.0},
    }


def test_a_batch_without_a_token_is_told_of_too() -> None:
    none = {name: {1: 0.0} for name in metrics_of(Stats)}
    row = logged(metrics_of(Stats), none, n_tokens=0, n_sequences=3)
    assert len(row) == 5 and set(row.values()) == {0.0}


def test_a_dense_model_has_none() -> None:
    totals = Sums(ModelConfig(n_layers=2)).over_ranks(lone_mesh(torch.device("cpu")), StopRequest())
    assert totals.counts == {}
    assert logged(metrics_of(RoutingStats), totals.metrics, n_tokens=8, n_sequences=3) == {}
