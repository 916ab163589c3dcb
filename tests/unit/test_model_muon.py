"""Muon's update against its formula written once more, in fp64, and against torch's own Muon where that has one."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from modeling.dims import Weight
from modeling.dtypes import DTYPES
from modeling.optimizers.adamw import AdamWConfig
from modeling.optimizers.build import parameter_groups
from modeling.optimizers.matrices import Matrices
from modeling.optimizers.muon import MuonConfig
from modeling.optimizers.orthogonal import orthogonal

STEPS = 4
LR = 0.02
WEIGHTS = {
    "embed": Weight(("vocab", "d_model")),
    "router": Weight(("scores", "d_model")),
    "norm": Weight(("d_model",)),
    "wide": Weight(("heads", "d_model")),
    "tall": Weight(("d_ff", "d_model")),
    "stack": Weight(("experts", "expert_d_ff", "d_model")),
}
SHAPES = {"embed": (30, 16), "router": (4, 16), "norm": (16,), "wide": (8, 16), "tall": (24, 16), "stack": (3, 12, 16)}
MATRICES = ("wide", "tall", "stack")


def draw(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def train(rule: MuonConfig | AdamWConfig, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The weights after a few updates from drawn gradients."""
    parameters = {name: nn.Parameter(value.clone()) for name, value in (weights or draw(0)).items()}
    rows = [(parameter, WEIGHTS[name], SHAPES[name]) for name, parameter in parameters.items()]
    optimizer = rule.build(parameter_groups(rows, rule), fused=False)
    for group in optimizer.param_groups:
        group["lr"] = LR * group["lr_scale"]
    for step in range(STEPS):
        for name, gradient in draw(step + 1).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def newton_schulz(matrix: Tensor) -> Tensor:
    """Jordan's iteration of one matrix, as a polynomial of its singular values, in fp64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def muon(weight: Tensor, gradients: list[Tensor], rule: MuonConfig) -> Tensor:
    """One matrix's updates as the paper has them, in fp64: momentum is a sum, whose size the iteration divides out."""
    weight, total = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        total = rule.momentum * total + gradient.double()
        update = newton_schulz(gradient.double() + rule.momentum * total)
        scale = 0.2 * math.sqrt(max(weight.shape))
        weight = weight - LR * (scale * update + rule.weight_decay * weight)
    return weight


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Of the norm of ``theirs``."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (3, 12, 16), (1, 5)], ids=str)
def test_an_orthogonal_matrix_has_the_same_singular_vectors_and_values_near_one(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    ours = orthogonal(matrices)
    u, _, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    within = u.mT @ ours.double() @ vh.mT  # diagonal where the singular vectors are the same
    values = within.diagonal(dim1=-2, dim2=-1)
    assert float((within - torch.diag_embed(values)).abs().max()) < 1e-4
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3  # as far as five iterations come


def test_the_update_is_the_formulas():
    rule = MuonConfig(weight_decay=0.3)
    weights, ours = draw(0), train(rule)
    gradients = [draw(step + 1) for step in range(STEPS)]
    for name in ("wide", "tall"):
        theirs = muon(weights[name], [drawn[name] for drawn in gradients], rule)
        assert distance(ours[name] - weights[name], theirs - weights[name]) < 1e-5, name


def test_each_expert_of_a_stack_is_a_matrix_of_its_own():
    rule = MuonConfig()
    weights, ours = draw(0), train(rule)["stack"]
    gradients = [draw(step + 1)["stack"] for step in range(STEPS)]
    for expert, weight in enumerate(weights["stack"]):
        theirs = muon(weight, [gradient[expert] for gradient in gradients], rule)
        assert distance(ours[expert] - weight, theirs - weight) < 1e-5, expert


def test_planted_stack_taken_as_one_matrix_is_seen():
    torch.manual_seed(0)
    stack = torch.randn(3, 12, 16)
    assert distance(orthogonal(stack.reshape(36, 16)).view(3, 12, 16), orthogonal(stack)) > 0.1


def test_all_other_weights_are_adamws():
    rule = MuonConfig(weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6)
    ours, theirs = train(rule), train(AdamWConfig(weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6))
    assert [name for name in WEIGHTS if WEIGHTS[name].is_hidden_matrix] == list(MATRICES)
    assert [name for name in WEIGHTS if torch.equal(ours[name], theirs[name])] == ["embed", "router", "norm"]


def test_torchs_muon_is_the_same_within_bf16():
    """torch's iterates in bf16, which rounds by 2^-9."""
    rule, weights = MuonConfig(weight_decay=0.3), draw(0)
    parameters = [nn.Parameter(weights[name].clone()) for name in ("wide", "tall")]
    options = {"momentum": rule.momentum, "weight_decay": rule.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = torch.optim.Muon(parameters, lr=LR, **options)
    for step in range(STEPS):
        gradients = draw(step + 1)
        for name, parameter in zip(("wide", "tall"), parameters, strict=True):
            parameter.grad = gradients[name]
        optimizer.step()
    ours = train(rule)
    for name, parameter in zip(("wide", "tall"), parameters, strict=True):
        assert distance(ours[name] - weights[name], parameter.detach() - weights[name]) < 2e-2, name


def test_iterations_in_bf16_are_the_exact_ones_within_bf16():
    """1.6e-2 of an update was seen; the weights that AdamW updates have no part in it."""
    weights = draw(0)
    exact, low = train(MuonConfig()), train(MuonConfig(iteration_dtype="bf16"))
    for name in WEIGHTS:
        error = distance(low[name] - weights[name], exact[name] - weights[name])
        assert (1e-4 < error < 4e-2) if name in MATRICES else error == 0, (name, error)
    assert MuonConfig(iteration_dtype="bf16", lr=1.0).exact() == MuonConfig(lr=1.0)


@pytest.mark.parametrize("at_once", [1, 2 * 12 * 16, 10**6])
def test_a_stack_goes_a_few_at_a_time_and_each_once(at_once, monkeypatch):
    """Three experts of 12 x 16: one by one, two and one, all. A matrix that is larger goes whole."""
    whole = train(MuonConfig())
    seen = []

    def watched(matrices: Tensor, dtype: torch.dtype) -> Tensor:
        seen.append(tuple(matrices.shape))
        return orthogonal(matrices, dtype)

    monkeypatch.setattr("modeling.optimizers.orthogonal.orthogonal", watched)
    monkeypatch.setattr("modeling.optimizers.build.ON_ONE_DEVICE", Matrices(at_once))
    parts = train(MuonConfig())
    assert all(distance(parts[name], whole[name]) < 1e-6 for name in WEIGHTS)
    assert [shape[0] for shape in seen if len(shape) == 3] == STEPS * {1: [1, 1, 1], 384: [2, 1]}.get(at_once, [3])
    assert (8, 16) in seen and (24, 16) in seen


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_products_that_plans_count_are_those_computed(shape, dtype):
    work = MuonConfig(iteration_dtype=dtype).matrix_work(*shape)
    with FlopCounterMode(display=False) as counter:
        orthogonal(torch.randn(shape), DTYPES[dtype])
    assert (work.dtype, work.flops) == (dtype, counter.get_total_flops())


def test_decay_is_apart_from_the_update():
    """Of weights w and others that are zero, the updates are the same: decay alone tells them apart."""
    rule, weights = MuonConfig(weight_decay=0.3), draw(0)
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    decayed = (1 - LR * rule.weight_decay) ** STEPS
    ours, moved = train(rule, weights), train(rule, zeros)
    for name in MATRICES:
        assert distance(ours[name] - moved[name], decayed * weights[name]) < 1e-6, name


def test_the_size_of_gradients_is_of_no_account():
    torch.manual_seed(0)
    gradient = torch.randn(12, 16)
    assert distance(orthogonal(1e-3 * gradient), orthogonal(gradient)) < 1e-5
    assert torch.equal(orthogonal(torch.zeros(3, 4, 5)), torch.zeros(3, 4, 5))


def test_equal_runs_are_equal_bit_for_bit():
    first, second = train(MuonConfig()), train(MuonConfig())
    assert all(torch.equal(first[name], second[name]) for name in WEIGHTS)


def test_a_weight_without_gradient_stays():
    rule = MuonConfig()
    parameters = {name: nn.Parameter(value) for name, value in draw(0).items()}
    optimizer = rule.build(
        parameter_groups([(p, WEIGHTS[n], SHAPES[n]) for n, p in parameters.items()], rule), fused=False
    )
    parameters["wide"].grad = torch.ones(SHAPES["wide"])
    before = copy.deepcopy(parameters)
    optimizer.step()
    assert [name for name in WEIGHTS if not torch.equal(before[name], parameters[name])] == ["wide"]
