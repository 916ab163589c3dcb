"""Each way to draw first weights has the spread that its formula says, of the whole logical weight."""

from dataclasses import replace

import pytest
import torch

import modeling.init as init
from modeling.config import MLAConfig, ModelConfig
from modeling.dims import Weight
from modeling.init import draw_normal, initial_tensor
from modeling.init_config import DepthScaledInit, HeInit, InitConfig, MupInit, NormalInit, XavierInit
from modeling.logical import logical_tensors
from modeling.moe_config import MoEConfig
from modeling.mup import fan_ratios, widths_of
from modeling.optimizers.adamw import AdamWConfig
from modeling.optimizers.build import parameter_groups
from modeling.optimizers.config import OptimizerConfig
from modeling.optimizers.muon import MuonConfig
from modeling.optimizers.orthogonal import RMS
from modeling.optimizers.sgd import SGDConfig

D, F, E, EXPERT, V, LAYERS, STD = 96, 160, 4, 64, 512, 3, 0.05
MOE = MoEConfig(n_experts=E, d_ff=EXPERT, n_shared_experts=1, shared_d_ff=80, shared_gate=True, n_dense_layers=1)
MODEL = ModelConfig(
    family="none",
    vocab_size=V,
    d_model=D,
    n_layers=LAYERS,
    n_heads=4,
    n_kv_heads=2,
    d_head=16,
    d_ff=F,
    init_std=STD,
    sinks=True,
    o_bias=True,
    moe=MOE,
)
Q, K, OUT = (f"layers.0.attention.{name}.weight" for name in "qko")
UP, DOWN = "layers.0.feed_forward.up.weight", "layers.0.feed_forward.down.weight"
ROUTER, GATE = "layers.1.feed_forward.router.weight", "layers.1.feed_forward.shared_gate.weight"
EXPERT_UP, EXPERT_DOWN = "layers.1.feed_forward.experts.up", "layers.1.feed_forward.experts.down"
EMBED, HEAD, SINKS = "embed.weight", "head.weight", "layers.0.attention.sinks.weight"
NORM, O_BIAS = "layers.0.attention_norm.weight", "layers.0.attention.o_bias.bias"
FANS = {  # by hand: (fan_in, fan_out)
    Q: (D, 64),
    K: (D, 32),
    OUT: (64, D),
    UP: (D, F),
    DOWN: (F, D),
    ROUTER: (D, E),
    EXPERT_UP: (D, EXPERT),
    EXPERT_DOWN: (EXPERT, D),
    HEAD: (D, V),
}
RESIDUAL = {OUT, DOWN, EXPERT_DOWN}


def drawn(kind: InitConfig, name: str, seed: int = 0) -> torch.Tensor:
    config = replace(MODEL, init=kind)
    return initial_tensor(config, seed, name, logical_tensors(config)[name].shape)


@pytest.mark.parametrize(
    ("kind", "variance"),
    [
        (DepthScaledInit(), lambda name, fan_in, fan_out: STD**2 / (2 * LAYERS if name in RESIDUAL else 1)),
        (NormalInit(), lambda name, fan_in, fan_out: STD**2),
        (XavierInit(), lambda name, fan_in, fan_out: 2 / (fan_in + fan_out)),
        (XavierInit(distribution="normal"), lambda name, fan_in, fan_out: 2 / (fan_in + fan_out)),
        (HeInit(), lambda name, fan_in, fan_out: 2 / fan_in),
        (HeInit(distribution="uniform"), lambda name, fan_in, fan_out: 2 / fan_in),
    ],
    ids=lambda value: repr(value) if not callable(value) else "variance",
)
def test_matrices_have_the_variance_of_their_own_fans(kind, variance):
    for name, fans in FANS.items():
        tensor = drawn(kind, name)
        wanted = variance(name, *fans) ** 0.5
        tolerance = 4 / (2 * tensor.numel()) ** 0.5  # four deviations of a deviation that is found in so many numbers
        assert float(tensor.std()) == pytest.approx(wanted, rel=tolerance), name
        if getattr(kind, "distribution", "normal") == "uniform":  # U(-a, a), a = sqrt(3 variance)
            assert 0.95 * 3**0.5 * wanted < float(tensor.abs().max()) <= 3**0.5 * wanted * (1 + 1e-6), name
    for name in (EMBED, SINKS):
        tensor = drawn(kind, name)
        assert torch.equal(tensor, draw_normal(0, name, tensor.shape, STD)), name


def test_planted_fan_of_a_piece_gives_another_variance(monkeypatch):
    """The test above would see a rank draw its half of a matrix by the half's own fan-in."""
    monkeypatch.setattr(init.LogicalTensor, "fans", property(lambda self: (self.shape[-1] // 2, self.shape[-2])))
    with pytest.raises(AssertionError):
        test_matrices_have_the_variance_of_their_own_fans(HeInit(), lambda name, fan_in, fan_out: 2 / fan_in)


def test_an_expert_is_a_matrix_of_its_own():
    few = replace(MODEL, init=XavierInit(), moe=replace(MOE, n_experts=2, top_k=1))
    shape = logical_tensors(few)[EXPERT_UP].shape
    assert torch.equal(initial_tensor(few, 0, EXPERT_UP, shape), drawn(XavierInit(), EXPERT_UP)[:2])


MUP = MupInit(base_d_model=D // 4)
NARROW = replace(MODEL, d_model=D // 4, n_heads=1, d_ff=F // 4, moe=replace(MOE, d_ff=EXPERT // 4, shared_d_ff=20))
# By hand, from tables 3 of arXiv:2203.03466 at four times the width: what the base model's deviation is multiplied by,
# and its learning rate under AdamW, SGD and Muon.
TABLE = {
    Q: (1 / 2, 1 / 4, 1.0, 1 / 2),
    OUT: (1 / 2, 1 / 4, 1.0, 1 / 2),
    UP: (1 / 2, 1 / 4, 1.0, 1 / 2),
    DOWN: (1 / 2, 1 / 4, 1.0, 1 / 2),
    EXPERT_UP: (1 / 2, 1 / 4, 1.0, 1 / 2),
    EXPERT_DOWN: (1 / 2, 1 / 4, 1.0, 1 / 2),
    ROUTER: (1 / 4, 1 / 4, 1 / 4, 1 / 4),
    GATE: (1 / 4, 1 / 4, 1 / 4, 1 / 4),
    HEAD: (1 / 4, 1 / 4, 1 / 4, 1 / 4),
    EMBED: (1.0, 1.0, 4.0, 1.0),
    SINKS: (1.0, 1.0, 4.0, 1.0),
    NORM: (1.0, 1.0, 4.0, 1.0),
    O_BIAS: (1.0, 1.0, 4.0, 1.0),
}


def rows_of(config: ModelConfig) -> list[tuple[torch.nn.Parameter, Weight, tuple[int, ...]]]:
    """What parameter groups are made of."""
    tensors = logical_tensors(config)
    return [(torch.nn.Parameter(torch.empty(0)), tensors[name].weight, tensors[name].shape) for name in TABLE]


def test_mup_is_the_papers_table():
    config = replace(MODEL, init=MUP)
    tensors, narrow = logical_tensors(config), logical_tensors(NARROW)
    widths = widths_of(config)
    for name, (deviation, *scales) in TABLE.items():
        weight = tensors[name].weight
        if weight.init in ("normal", "residual"):
            depth = (2 * LAYERS) ** -0.5 if name in RESIDUAL else 1.0
            assert init.spread_of(config, tensors[name]).deviation == pytest.approx(STD * depth * deviation), name
        if weight.is_multiplied and name != GATE:  # the ratios are those of the two models' shapes
            ratios = [ours / base for ours, base in zip(tensors[name].fans, narrow[name].fans, strict=True)]
            assert fan_ratios(weight, widths) == tuple(ratios), name
        rules, shape = (AdamWConfig(), SGDConfig(), MuonConfig()), tensors[name].shape
        found = [rule.width_scale(weight, shape, widths) for rule in rules]
        assert found == scales, name


def test_mup_at_its_base_is_depth_scaled_bit_for_bit():
    for name in TABLE:
        assert torch.equal(drawn(MupInit(base_d_model=D), name), drawn(DepthScaledInit(), name))
    for rule in (AdamWConfig(), SGDConfig(), MuonConfig()):
        rows = rows_of(MODEL)
        base = parameter_groups(rows, rule, widths_of(replace(MODEL, init=MupInit(base_d_model=D))))
        assert base == parameter_groups(rows, rule)


def test_other_base_widths_count_for_their_own_fan_in():
    kind = MupInit(base_d_model=D // 4, base_d_ff=F, base_expert_d_ff=EXPERT // 2)
    widths = widths_of(replace(MODEL, init=kind))
    tensors = logical_tensors(MODEL)
    ratios = {name: fan_ratios(tensors[name].weight, widths) for name in (UP, DOWN, EXPERT_UP, EXPERT_DOWN)}
    assert ratios == {UP: (4.0, 1.0), DOWN: (1.0, 4.0), EXPERT_UP: (4.0, 2.0), EXPERT_DOWN: (2.0, 4.0)}


BASE = ModelConfig(family="none", vocab_size=V, d_model=64, n_layers=1, n_heads=2, n_kv_heads=2, d_head=32, d_ff=256)
WIDER = {  # what a base model has besides, and what grows in a wider one otherwise than in proportion to d_model
    "latents": ({"mla": MLAConfig()}, {"d_ff": 2048}, MupInit(base_d_model=64)),
    "d_ff": ({}, {"d_ff": 512}, MupInit(base_d_model=64, base_d_ff=256)),
    "experts": ({"moe": MoEConfig(d_ff=96, n_shared_experts=1)}, {}, MupInit(base_d_model=64, base_expert_d_ff=96)),
}


def norm_over_fans(shape: tuple[int, ...]) -> float:
    """The spectral norm of an update with a learning rate of 1, over sqrt(fan_out / fan_in)."""
    fan_out, fan_in = shape[-2:]
    return RMS * max(fan_out, fan_in) ** 0.5 / (fan_out / fan_in) ** 0.5


@pytest.mark.parametrize("case", WIDER)
def test_an_update_of_muon_has_the_spectral_norm_of_its_fans_at_every_width(case: str):
    """In proportion to sqrt(fan_out / fan_in) (arXiv:2310.17813, condition 1), whichever side is the longer one."""
    besides, wider, kind = WIDER[case]
    base = replace(BASE, **besides)
    wide = replace(base, d_model=512, n_heads=16, n_kv_heads=16, init=kind, **wider)
    narrow, widths = logical_tensors(base), widths_of(wide)
    hidden = {name: each for name, each in logical_tensors(wide).items() if each.weight.is_hidden_matrix}
    assert len(hidden) >= 7
    for name, tensor in hidden.items():
        scale = MuonConfig().width_scale(tensor.weight, tensor.shape, widths)
        expected = norm_over_fans(narrow[name].shape)
        assert scale * norm_over_fans(tensor.shape) == pytest.approx(expected), name


@pytest.mark.parametrize("rule", [AdamWConfig(), SGDConfig(weight_decay=0.1), MuonConfig()], ids=lambda rule: rule.name)
def test_a_step_decays_a_weight_alike_at_every_width(rule: OptimizerConfig):
    rows = rows_of(MODEL)
    groups = parameter_groups(rows, rule, widths_of(replace(MODEL, init=MUP)))
    assert len(groups) > 2
    assert {round(group["lr_scale"] * group["weight_decay"], 9) for group in groups} == {0.0, 0.1}
    assert [group["weight_decay"] > 0 for group in groups] == sorted(
        (group["weight_decay"] > 0 for group in groups), reverse=True
    )


def test_a_tied_head_is_the_table_that_it_is_tied_to():
    tied = logical_tensors(replace(MODEL, tie_embeddings=True))
    assert HEAD not in tied and tied[EMBED].weight == Weight(("vocab", "d_model"), is_table=True)
