"""What each update rule says of itself is what its torch optimizer does."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from modeling.dims import Weight
from modeling.moe_config import ScoreName
from modeling.mup import BASE
from modeling.optimizers.adamw import AdamWConfig
from modeling.optimizers.build import parameter_groups
from modeling.optimizers.config import OptimizerConfig
from modeling.optimizers.rule import UpdateRule
from modeling.optimizers.sgd import SGDConfig
from modeling.router import SCORES

ROOT = Path(__file__).parents[2]
SOURCES = [path for package in ("launcher", "modeling", "parallel") for path in sorted((ROOT / package).rglob("*.py"))]
RULES: list[UpdateRule] = [each() for each in get_args(OptimizerConfig)] + [SGDConfig(momentum=0.9)]
STATES = {name for rule in RULES for name in rule.states}
WEIGHTS = {(6, 4): Weight(("vocab", "d_model")), (8, 4): Weight(("d_ff", "d_model")), (4,): Weight(("d_model",))}


def weights() -> list[tuple[nn.Parameter, Weight, tuple[int, ...]]]:
    return [(nn.Parameter(torch.ones(shape)), weight, shape) for shape, weight in WEIGHTS.items()]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_states_and_the_count_of_updates_are_torchs(rule):
    made = weights()
    optimizer = rule.build(parameter_groups(made, rule), fused=False)
    for parameter, *_ in made:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    for parameter, weight, _ in made:
        state = {name for name, value in optimizer.state[parameter].items() if value is not None}
        assert set(rule.states_of(weight)) <= set(rule.states)
        assert state == {*rule.states_of(weight), *(["step"] if rule.counts_updates else [])}
        assert all(optimizer.state[parameter][name].shape == parameter.shape for name in rule.states_of(weight))


def changes(rule: UpdateRule, lr: float, decay: float, gradient: float) -> list[float]:
    """How far the weights of each group move in the first update, where all are one and have that gradient."""
    optimizer = rule.build(parameter_groups(weights(), rule), fused=False)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = lr, decay
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    return [
        float((parameter.detach() - 1).abs().max()) for group in optimizer.param_groups for parameter in group["params"]
    ]


def follows_its_groups(rule: UpdateRule) -> bool:
    """Whether the learning rate and the decay are the group's own: the schedule, muP and ``decays`` set them there."""
    full, half, none = (changes(rule, lr, 0.0, 0.5) for lr in (1e-2, 5e-3, 0.0))
    scaled = full == pytest.approx([2 * each for each in half], rel=1e-3) and min(full) > 0 and max(none) == 0.0
    return scaled and min(changes(rule, 1e-2, 0.5, 0.0)) > 0 and max(changes(rule, 1e-2, 0.0, 0.0)) == 0.0


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_an_update_follows_its_groups_learning_rate_and_decay(rule):
    assert follows_its_groups(rule)


@dataclass(frozen=True, kw_only=True)
class OwnNumbers(AdamWConfig):
    """Takes one number from the config where its groups have another."""

    number: str

    def build(self, groups, *, fused):
        optimizer, own = super().build(groups, fused=fused), getattr(self, self.number)
        step = optimizer.step

        def with_own(*arguments):
            for group in optimizer.param_groups:
                group["lr" if self.number == "lr" else "weight_decay"] = own
            return step(*arguments)

        optimizer.step = with_own
        return optimizer


@pytest.mark.parametrize("number", ["lr", "weight_decay"])
def test_planted_number_of_the_config_in_the_groups_place_is_seen(number):
    assert not follows_its_groups(OwnNumbers(number=number))


class Scaled(AdamWConfig):
    """Matrices at a fifth of the learning rate."""

    def lr_scale(self, weight):
        return 0.2 if len(weight.dims) == 2 else 1.0


def test_groups_part_what_decays_and_what_is_scaled():
    def shapes(rule: UpdateRule) -> list[tuple[float, float, list[tuple[int, ...]]]]:
        groups = parameter_groups(weights(), rule)
        return [(g["weight_decay"], g["lr_scale"], [tuple(p.shape) for p in g["params"]]) for g in groups]

    assert shapes(AdamWConfig()) == [(0.1, 1.0, [(8, 4)]), (0.0, 1.0, [(6, 4), (4,)])]
    assert shapes(AdamWConfig(decay_embeddings=True)) == [(0.1, 1.0, [(6, 4), (8, 4)]), (0.0, 1.0, [(4,)])]
    assert shapes(Scaled()) == [(0.1, 0.2, [(8, 4)]), (0.0, 1.0, [(4,)]), (0.0, 0.2, [(6, 4)])]


@dataclass(frozen=True, kw_only=True)
class WholeMatrices(AdamWConfig):
    """Takes hidden matrices whole, and keeps the same states beside every weight."""

    takes_whole_matrices = True


def test_groups_part_what_is_taken_whole():
    """A router is a matrix that decays as a hidden one does, and it is not taken whole."""
    router = (nn.Parameter(torch.ones(3, 4)), Weight(("scores", "d_model")), (3, 4))
    rule = WholeMatrices()
    assert rule.group(*router[1:], BASE)[:4] == rule.group(*weights()[1][1:], BASE)[:4]
    groups = parameter_groups([router, *weights()], rule)
    whole = {tuple(each.shape): group["takes_whole"] for group in groups for each in group["params"]}
    assert whole == {(8, 4): True, (3, 4): False, (6, 4): False, (4,): False}
    assert len(groups) == 3


def lines_that_test_states(source: str) -> list[int]:
    """The lines on which a source asks whether a state's name is among some others."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Constant)
        and node.left.value in STATES
        and isinstance(node.ops[0], ast.In | ast.NotIn | ast.Eq)
    ]


def test_nobody_knows_an_optimizer_by_its_states_names():
    assert sorted(STATES) == ["exp_avg", "exp_avg_sq", "momentum_buffer"]
    found = {str(path.relative_to(ROOT)): lines_that_test_states(path.read_text()) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_planted_test_for_a_state_is_seen():
    assert lines_that_test_states('x = 1\nif "exp_avg" in state:\n    pass\n') == [2]


def test_every_score_has_its_formula():
    assert set(SCORES) == set(get_args(ScoreName))
    for score in SCORES.values():
        scores_TE = score.of(torch.randn(7, 5))
        assert (scores_TE >= 0).all()
        sums_to_one = torch.allclose(scores_TE.sum(1), torch.ones(7))
        assert sums_to_one == score.sums_to_one
