"""Shrunk configs: legal, small, and still the same architecture under the same axes."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from launcher.config.layout_rules import least_ranks
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig, TrainConfig
from launcher.errors import UserError
from launcher.prove.shrink import (
    ORIGINAL_LENGTHS,
    SEQ_LEN,
    default_ranks,
    few_layers,
    shrink,
    shrink_experts,
    shrink_model,
    shrink_scaling,
)
from modeling.config import FAMILIES, ModelConfig
from modeling.dtypes import DTYPES
from modeling.families.family import family_of
from modeling.kernels import expert_passes
from modeling.linear_attention_config import LinearAttentionConfig
from modeling.moe_config import BiasBalance, MoEConfig
from modeling.mtp_config import MTPConfig
from modeling.optimizers.config import AdamWConfig, SGDConfig
from modeling.rope_scaling import YarnScaling
from parallel.config import ParallelConfig
from parallel.mesh import Degrees
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB, chunks
from small_models import MOE_FAMILIES, expressible, mla_configs, moe_configs


@st.composite
def run_configs(draw):
    """Large models of every family, under axes that they fit."""
    family = draw(st.sampled_from(FAMILIES))
    n_kv_heads = draw(st.sampled_from([1, 2, 4, 8, 64]))
    has_mla = family_of(family).has("mla")
    n_heads = n_kv_heads * (1 if has_mla else draw(st.sampled_from([1, 2, 3, 5, 16])))
    n_layers = draw(st.integers(1, 60))
    moe = None
    if family in MOE_FAMILIES:
        moe = draw(moe_configs(family, n_layers))
        moe = replace(moe, n_experts=16 * moe.n_experts, d_ff=256 * moe.d_ff)
    model = ModelConfig(
        family=family,
        vocab_size=128 * draw(st.integers(1, 500)),
        d_model=16 * n_heads,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=draw(st.sampled_from(expressible(family, "d_head", [None, 64]))),
        d_ff=1024,
        tie_embeddings=draw(st.booleans()),
        qk_norm=expressible(family, "qk_norm", [False, True])[0],
        rope_fraction=draw(st.sampled_from(expressible(family, "rope_fraction", [0.125, 0.4, 1.0]))),
        sliding_window=draw(st.none() | st.integers(1, 5000)) if expressible(family, "sliding_window", [5]) else None,
        mla=draw(mla_configs(family)) if has_mla else None,
        moe=moe,
    )
    fixed = {key: values[0] for key, values in family_of(family).expressible.items() if len(values) == 1}
    model = replace(model, **{key: value for key, value in fixed.items() if "." not in key})
    degrees = st.sampled_from([1, 2, 4, 8])
    ep = draw(degrees) if moe is not None else 1
    pipeline = draw(st.sampled_from([OneFOneB(), Interleaved(n_chunks=4), ZBV(), DualPipeV()]))
    pp = draw(degrees)
    if pp > 1 and n_layers % (pp * chunks(pipeline)) == 0 and draw(st.booleans()):
        share = n_layers // (pp * chunks(pipeline))
        pipeline = replace(pipeline, layers=(share,) * (pp * chunks(pipeline)))
    axes = {"tp": draw(degrees), "pp": pp, "cp": draw(degrees), "ep": ep}
    parallel = ParallelConfig(**axes, pipeline=pipeline, zero=draw(st.integers(0, 3)))
    precision = "fp32" if parallel.zero == 0 else draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    micro_batch_size = draw(st.integers(1, 9))
    train = TrainConfig(
        micro_batch_size=micro_batch_size, global_batch_size=512 * micro_batch_size, precision=precision
    )
    optimizer = draw(st.sampled_from([AdamWConfig(), AdamWConfig(clip_norm=None), SGDConfig(weight_decay=1e-3)]))
    settings = {"model": model, "train": train, "parallel": parallel, "optimizer": optimizer}
    return RunConfig(init_from="runs/other", **settings)


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(run_configs())
def test_a_legal_config_shrinks_to_a_legal_one_of_the_same_kind(config):
    assume(not check(config, least_ranks(config.parallel)))
    n_stages = config.parallel.pp * chunks(config.parallel.pipeline)
    assume(config.parallel.pp == 1 or n_stages <= config.model.n_layers)
    n_ranks = default_ranks(config)
    small = shrink(config, n_ranks)
    assert check(small, n_ranks) == []
    assert small.init_from is None  # another size
    assert n_ranks <= 16 and small.model.d_model <= 512 and small.data.seq_len <= 128
    degrees = Degrees.of(small.parallel, n_ranks)
    assert degrees.dp >= 2
    for axis in ("tp", "pp", "cp", "ep"):
        before, after = getattr(config.parallel, axis), getattr(small.parallel, axis)
        assert after <= before and (after > 1) == (before > 1)
    assert small.train.global_batch_size >= 2 * degrees.dp * small.train.micro_batch_size
    if degrees.pp > 1:
        n_small_stages = degrees.pp * chunks(small.parallel.pipeline)
        assert n_small_stages <= small.model.n_layers and small.parallel.pipeline.name == config.parallel.pipeline.name
        layers = small.parallel.pipeline.layers
        assert (layers is None) == (config.parallel.pipeline.layers is None)
        assert layers is None or (len(layers) == n_small_stages and sum(layers) == small.model.n_layers)
    assert small.parallel.zero == config.parallel.zero and small.train.precision == config.train.precision
    assert_same_kind(config.model, small.model)


def assert_same_kind(model, small):
    for name in ("family", "tie_embeddings", "qk_norm", "rope_theta", "norm_eps"):
        assert getattr(small, name) == getattr(model, name)
    assert (small.n_heads > small.n_kv_heads) == (model.n_heads > model.n_kv_heads)
    assert (small.n_kv_heads > 1) == (model.n_kv_heads > 1)
    assert (small.sliding_window is None) == (model.sliding_window is None)
    assert (small.d_head is None) == (model.d_head is None)
    assert (small.mla is None) == (model.mla is None)
    assert small.mla is None or (small.mla.q_lora_rank is None) == (model.mla.q_lora_rank is None)
    if model.moe is None or small.moe is None:
        assert small.moe is model.moe is None
        return
    for name in ("n_groups", "top_k_groups"):
        assert (getattr(small.moe, name) > 1) == (getattr(model.moe, name) > 1)
    for name in ("score", "normalize_top_k", "routed_scale"):
        assert getattr(small.moe, name) == getattr(model.moe, name)
    assert type(small.moe.balance) is type(model.moe.balance)
    assert (small.moe.n_shared_experts > 0) == (model.moe.n_shared_experts > 0)
    assert (small.moe.z_loss > 0) == (model.moe.z_loss > 0)
    assert (small.moe.every_n_layers > 1) == (model.moe.every_n_layers > 1 and model.n_moe_layers > 0)
    assert (small.n_moe_layers > 0) == (model.n_moe_layers > 0)
    assert (small.n_moe_layers < small.n_layers) == (model.n_moe_layers < model.n_layers)
    if model.n_moe_layers > 0 and dense_after_experts(model):
        assert dense_after_experts(small)
    assert 1 <= small.moe.top_k <= small.moe.n_experts and (small.moe.top_k > 1) == (model.moe.top_k > 1)


def dense_after_experts(config):
    """Whether a layer without experts comes after one with them."""
    kinds = [config.is_moe_layer(layer) for layer in range(config.n_layers)]
    return sorted(kinds) != kinds


@pytest.mark.parametrize(
    ("n_layers", "told", "small"),
    [
        (24, {"n_dense_layers": 3}, (3, (1, 2))),
        (24, {"every_n_layers": 2}, (4, (1, 3))),
        (24, {"every_n_layers": 4, "dense_layers": (7, 11)}, (4, (1,))),
        (24, {"n_dense_layers": 1, "dense_layers": (5,)}, (4, (1, 3))),
        (24, {"dense_layers": (0, 5)}, (4, (1, 3))),
        (24, {"dense_layers": (5,)}, (4, (0, 2, 3))),
        (2, {"every_n_layers": 2}, (2, (1,))),
        (2, {"dense_layers": (1,)}, (2, (0,))),
        (6, {"every_n_layers": 2, "n_dense_layers": 6}, (2, ())),
    ],
)
def test_a_small_model_keeps_both_kinds_of_layers(n_layers, told, small):
    model = ModelConfig(family="qwen3_moe", n_layers=n_layers, moe=MoEConfig(n_experts=16, **told))
    shrunk = shrink_model(model, Degrees(2), few_layers(model))
    assert not [*shrunk.problems()]
    with_experts = tuple(layer for layer in range(shrunk.n_layers) if shrunk.is_moe_layer(layer))
    assert (shrunk.n_layers, with_experts) == small


@pytest.mark.parametrize(
    ("keys", "values", "degrees", "small"),
    [
        (16, 32, Degrees(2), (2, 4)),
        (16, 16, Degrees(1), (2, 2)),
        (16, 48, Degrees(4, tp=2, cp=2), (4, 12)),
        (2, 32, Degrees(8, cp=8), (2, 8)),
    ],
)
def test_values_of_linear_attention_share_keys_in_the_small_model(keys, values, degrees, small):
    """As many heads as the ranks of tp and cp need, and more than one value a key where there were more."""
    linear = LinearAttentionConfig(n_k_heads=keys, n_v_heads=values)
    model = ModelConfig(family="none", n_layers=8, linear_attention=linear, full_attention_layers=(3, 7))
    shrunk = shrink_model(model, degrees, few_layers(model))
    assert not [*shrunk.problems()] and shrunk.linear_attention is not None
    found = shrunk.linear_attention
    assert (found.n_k_heads, found.n_v_heads) == small
    kinds = {shrunk.is_linear_layer(layer) for layer in range(shrunk.n_layers)}
    assert kinds == {True, False} and found.d_k < linear.d_k


@pytest.mark.parametrize(
    ("ranks", "given_axes", "kept"),
    [
        (2, {"tp": 1}, (1, 1, 1)),
        (2, {"tp": 2}, (2, 1, 1)),
        (4, {"tp": 8}, (2, 1, 1)),
        (8, {"tp": 8}, (4, 1, 1)),
        (6, {"tp": 3}, (3, 1, 1)),
        (8, {"tp": 4, "cp": 4, "ep": 16}, (2, 2, 8)),
        (4, {"ep": 64}, (1, 1, 4)),
    ],
)
def test_degrees_for_a_number_of_processes(ranks, given_axes, kept):
    from launcher.prove.shrink import shrink_parallel

    small = shrink_parallel(ParallelConfig(**given_axes), ranks)
    assert (small.tp, small.cp, small.ep) == kept


@pytest.mark.parametrize(
    ("ranks", "given_axes", "line"),
    [
        (3, {"tp": 2}, "--ranks=3 must be a multiple of parallel.tp=2 = 2 (the least degrees); try 2 or 4"),
        (2, {"tp": 2, "cp": 8}, "--ranks=2 must be a multiple of parallel.tp=2 x parallel.cp=2 = 4"),
        (1, {"ep": 2}, "--ranks=1 must be a multiple of 2 to hold parallel.ep=2; try 2"),
    ],
)
def test_too_few_processes_are_refused(ranks, given_axes, line):
    from launcher.prove.shrink import shrink_parallel

    with pytest.raises(UserError) as refusal:
        shrink_parallel(ParallelConfig(**given_axes), ranks)
    assert refusal.value.problems[0].startswith(line)


@pytest.mark.parametrize(("growth", "wanted"), [(0.0, 4096), (0.01, SEQ_LEN // ORIGINAL_LENGTHS)])
def test_queries_grow_within_a_small_sequence_where_they_do(growth, wanted):
    """Else no layout could be caught at taking other positions for it; and as strongly as what a section weighs."""
    small = shrink_scaling(YarnScaling(original_seq_len=4096, query_growth=growth), SEQ_LEN, 8)
    assert isinstance(small, YarnScaling)
    assert (small.original_seq_len, small.query_growth > 0.05) == (wanted, growth > 0)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["train.precision=bf16"], 32),
        (["train.precision=fp32"], 32),
        (["train.precision=fp16"], 24),
        (["train.precision=fp32", "model.moe.d_ff=1024"], 24),
        (["train.precision=bf16", "model.moe.d_ff=264"], 24),
        (["train.precision=bf16", "model.moe.d_ff=4096"], 24),
    ],
)
def test_experts_stay_wide_enough_for_the_kernel_that_the_run_takes(overrides, wanted):
    config = load_config("configs/quickstart.yaml", overrides)
    small = shrink(config, default_ranks(config)).model
    assert small.moe is not None and config.model.moe is not None and small.moe.d_ff == wanted
    size = DTYPES[config.train.precision].itemsize
    each = [(model.d_model, model.moe.d_ff) for model in (config.model, small) if model.moe is not None]
    taken = [expert_passes.suits(*widths, size) for widths in each]
    assert config.train.precision == "fp16" or taken == [wanted == 32] * 2


def test_the_quickstart_shrinks():
    config = load_config("configs/quickstart.yaml")
    small = shrink(config, default_ranks(config))
    assert check(small, 2) == []
    assert small.model.moe.balance.coefficient > config.model.moe.balance.coefficient


@dataclass(frozen=True)
class NewBalance:
    """A balancing rule of another's."""

    moves_bias: ClassVar[bool] = False
    strength: float = field(default=1e-4, metadata={"strong": 0.5})
    decay: float = field(default=0.0, metadata={"strong": 0.5})


def test_what_a_section_weighs_is_made_strong_and_what_is_off_stays_so():
    rule: Any = NewBalance()
    moe = MoEConfig(n_experts=8, top_k=2, balance=rule, z_loss=1e-4)
    assert shrink_experts(moe, Degrees(1)).balance == NewBalance(strength=0.5)
    model = ModelConfig(moe=moe, z_loss=1e-5, residual_dropout=0.2, mtp=MTPConfig(coefficient=0.1))
    small = shrink_model(model, Degrees(1), 2)
    assert (small.moe.z_loss, small.mtp.coefficient) == (0.01, 0.3)
    assert (small.z_loss, small.residual_dropout, small.embedding_dropout) == (0.01, 0.2, 0.0)
    assert shrink_experts(replace(moe, balance=BiasBalance(), z_loss=0.0), Degrees(1)).balance.rate == 0.01


@pytest.mark.parametrize(
    ("n_experts", "top_k", "ep", "small"), [(3, 3, 1, (3, 3)), (64, 8, 4, (8, 4)), (2, 1, 2, (2, 1)), (6, 2, 4, (4, 2))]
)
def test_few_experts_of_the_same_kind(n_experts, top_k, ep, small):
    shrunk = shrink_experts(MoEConfig(n_experts=n_experts, top_k=top_k), Degrees(ep, ep=ep))
    assert (shrunk.n_experts, shrunk.top_k) == small


@pytest.mark.parametrize(
    ("given_axes", "ranks", "small"),
    [
        ({"ep": 2, "ep_chunks": 2}, 2, (2, 4)),
        ({"ep": 4, "ep_chunks": 8}, 4, (3, 12)),
        ({"ep": 8, "ep_chunks": 8}, 2, (3, 6)),
        ({"tp": 2, "ep": 4, "ep_chunks": 3}, 4, (3, 12)),
    ],
)
def test_every_chunk_has_an_expert(given_axes, ranks, small):
    """Three chunks at most: a first, a middle and a last one."""
    overrides = ["model.moe.n_experts=64", *(f"parallel.{key}={value}" for key, value in given_axes.items())]
    shrunk = shrink(load_config("configs/quickstart.yaml", overrides), ranks)
    assert (shrunk.parallel.ep_chunks, shrunk.model.moe.n_experts) == small
    assert check(shrunk, ranks) == []


@pytest.mark.parametrize(
    ("groups", "ep", "small"),
    [((256, 8, 4, 8), 2, (16, 4, 2, 4)), ((6, 3, 1, 2), 1, (6, 3, 1, 2)), ((12, 6, 1, 2), 3, (12, 4, 1, 2))],
)
def test_few_groups_of_experts(groups, ep, small):
    names = ("n_experts", "n_groups", "top_k_groups", "top_k")
    shrunk = shrink_experts(MoEConfig(**dict(zip(names, groups, strict=True))), Degrees(ep, ep=ep))
    assert tuple(getattr(shrunk, name) for name in names) == small
    assert not [*shrunk.problems()]
