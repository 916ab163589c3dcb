"""Small models of every family, and batches of packed documents for them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from modeling.config import (
    DROPOUTS,
    FAMILIES,
    ActivationName,
    AttentionGate,
    FamilyName,
    MLAConfig,
    ModelConfig,
    PositionsName,
)
from modeling.context import Context
from modeling.decoder import Decoder, build_decoder
from modeling.dims import stated_weights
from modeling.expert_layers import from_first_listed
from modeling.families.family import family_of
from modeling.families.shared import ACTIVATION
from modeling.init import draw_normal, materialize
from modeling.linear_attention_config import LinearAttentionConfig
from modeling.loss import IGNORE
from modeling.moe_config import BiasBalance, MoEConfig, NoBalance, SequenceAuxBalance
from modeling.mtp_config import MTPConfig
from modeling.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)

MOE_FAMILIES = [name for name in FAMILIES if family_of(name).has("moe")]
# queries grow with their positions, several times within a row; 96 tokens at most (hf_folders.SEQ_LEN)
GROWING = YarnScaling(factor=24.0, original_seq_len=4, query_growth=0.5)
LENGTHS = [[7, 1, 12], [20], [3, 9, 8]]  # document lengths in each row


def expressible(family: FamilyName, key: str, values: Sequence[Any]) -> list[Any]:
    """Those of ``values`` that the family's class can express for the model's field ``key``."""
    allowed, least = family_of(family).expressible.get(key), family_of(family).at_least.get(key)
    return [
        value
        for value in values
        if (allowed is None or value in allowed)
        and (least is None or value is None or value >= least)
        and not (value is None and key in family_of(family).needs)
    ]


def usual_activation(family: FamilyName) -> ActivationName:
    """The activation that the family's class takes where config.json names none, or the only one that it can have."""
    defaults = family_of(family).defaults
    named = [ACTIVATION.read(defaults[key]) for key, ours in family_of(family).keys.items() if ours is ACTIVATION]
    return named[0]["activation"] if named else expressible(family, "activation", get_args(ActivationName))[0]


@st.composite
def configs(draw: st.DrawFn, family: FamilyName, *, predicts_further: bool = False) -> ModelConfig:
    """Random small models that the family can express; with ``predicts_further``, some have multi-token prediction."""
    has_mtp = predicts_further and family_of(family).has("mtp")
    n_kv_heads = draw(st.sampled_from([1, 2, 3]))
    has_mla = family_of(family).has("mla")
    n_heads = n_kv_heads * (1 if has_mla else draw(st.sampled_from([1, 2, 3])))
    n_layers = draw(st.integers(1, 3))
    widths = [each for each in expressible(family, "d_head", [4, 8, 16]) if each]
    has_even_heads = family_of(family).heads_divide_d_model or not (widths or has_mla)
    # the variance of 4 channels may nearly vanish, so that rounding shows in LayerNorm's gradient
    per_head = [8, 12, 16] if expressible(family, "norm", ["layer"]) else [4, 8, 12]
    d_model = n_heads * draw(st.sampled_from(per_head)) if has_even_heads else 4 * draw(st.integers(2, 12))
    window = draw(st.none() | st.integers(1, 9)) if expressible(family, "sliding_window", [5]) else None
    has_linear = family_of(family).has("linear_attention")
    has_patterns = window is not None and bool(expressible(family, "full_attention_layers", [(0,)]))
    return with_told_together(
        ModelConfig(
            family=family,
            vocab_size=draw(st.integers(11, 90)),
            d_model=d_model,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            # with 2, QK norm's gradient nearly cancels and rounding shows
            d_head=draw(st.sampled_from(widths or [None])),
            d_ff=4 * draw(st.integers(1, 12)),
            tie_embeddings=(tied := draw(st.booleans())),
            norm_placement=draw(st.sampled_from(expressible(family, "norm_placement", ["pre", "post", "both"]))),
            norm_adds_one=expressible(family, "norm_adds_one", [False, True])[0],
            norm=expressible(family, "norm", ["rms", "layer"])[0],
            embedding_norm=expressible(family, "embedding_norm", [False, True])[0],
            parallel_block=draw(st.sampled_from(expressible(family, "parallel_block", [False, True]))),
            ff_gated=expressible(family, "ff_gated", [True, False])[0],
            activation=draw(st.sampled_from(expressible(family, "activation", get_args(ActivationName)))),
            positions=expressible(family, "positions", get_args(PositionsName))[0],
            max_positions=draw(st.integers(24, 40)) if "max_positions" in family_of(family).told else None,
            qk_norm=draw(st.sampled_from(expressible(family, "qk_norm", [False, True]))),
            qk_norm_over=expressible(family, "qk_norm_over", ["head", "all_heads"])[0],
            qk_norm_after_rope=expressible(family, "qk_norm_after_rope", [False, True])[0],
            qkv_bias=draw(st.sampled_from(expressible(family, "qkv_bias", [False, True]))),
            o_bias=draw(st.sampled_from(expressible(family, "o_bias", [False, True]))),
            ff_bias=draw(st.sampled_from(expressible(family, "ff_bias", [False, True]))),
            sinks=expressible(family, "sinks", [False, True])[0],
            attention_gate=expressible(family, "attention_gate", get_args(AttentionGate))[0],
            sliding_window=window,
            full_attention_layers=tuple(draw(some_of(range(n_layers)))[: n_layers - 1])
            if has_patterns or has_linear
            else (),
            nope_layers=tuple(draw(some_of(range(n_layers)))) if "nope_layers" in family_of(family).told else (),
            rope_theta=draw(st.sampled_from(expressible(family, "rope_theta", [100.0, 10000.0, 1e6]))),
            embedding_scale=draw(st.sampled_from(expressible(family, "embedding_scale", [1.0, 12.0]))),
            residual_scale=draw(st.sampled_from(expressible(family, "residual_scale", [1.0, 0.22]))),
            logit_divisor=draw(st.sampled_from(expressible(family, "logit_divisor", [1.0, 6.0]))),
            score_scale=draw(st.sampled_from(expressible(family, "score_scale", [None, 0.3]))),
            score_cap=draw(st.sampled_from(expressible(family, "score_cap", [None, 0.8]))),
            logit_cap=draw(st.sampled_from(expressible(family, "logit_cap", [None, 1.5]))),
            score_channels=draw(st.sampled_from(expressible(family, "score_channels", [None, 9.0]))),
            local_rope_theta=draw(st.sampled_from(expressible(family, "local_rope_theta", [None, 50.0]))),
            rope_fraction=draw(st.sampled_from(expressible(family, "rope_fraction", [0.5, 1.0]))),
            rope_scaling=draw(rope_scalings(family)) if "rope_scaling" in family_of(family).told else None,
            **{key: 0.1 if tied else 0.0 for key in DROPOUTS if key in family_of(family).told},
            # linear attention's output at a document's first tokens may be so small that its norm amplifies rounding
            norm_eps=draw(st.sampled_from([1e-4, 1e-3] if has_linear else [1e-6, 1e-5])),
            init_std=0.7 * d_model**-0.5,
            mla=draw(mla_configs(family)) if has_mla else None,
            linear_attention=draw(linear_configs()) if has_linear else None,
            moe=draw(moe_configs(family, n_layers)) if family in MOE_FAMILIES else None,
            mtp=draw(st.none() | st.builds(MTPConfig, depth=st.integers(1, 3))) if has_mtp else None,
        )
    )


def with_told_together(config: ModelConfig) -> ModelConfig:
    """The config with fields made equal that the family's class has as one key, and with the fields it derives."""
    family = family_of(config.family)
    equal = {second: getattr(config, first) for first, second in family.equal}
    if isinstance(config.rope_scaling, DynamicScaling) and config.rope_dim == 2:
        config = replace(config, rope_scaling=None)  # dynamic scaling is not possible with one pair of channels
    if isinstance(config.rope_scaling, LongRopeScaling):
        short, long = (
            factors[: config.rope_dim // 2]
            for factors in (config.rope_scaling.short_factor, config.rope_scaling.long_factor)
        )
        config = replace(config, rope_scaling=replace(config.rope_scaling, short_factor=short, long_factor=long))
    if config.moe is not None and config.moe.n_shared_experts == 0:
        config = replace(config, moe=replace(config.moe, shared_d_ff=None))  # has no effect without shared experts
    return replace(config, **equal, **{name: value(config) for name, value in family.derived.items()})


def some_of(numbers: Sequence[int]) -> st.SearchStrategy[list[int]]:
    """Random subsets of ``numbers``, ascending."""
    return st.sets(st.sampled_from(numbers)).map(sorted)


def rope_scalings(family: FamilyName) -> st.SearchStrategy[RopeScaling | None]:
    """Random RoPE scalings of the family's kinds, with short original sequences, so that they show in small models."""
    factors, lengths, weights = (
        st.sampled_from([1.0, 2.0, 5.5]),
        st.sampled_from([4, 32, 100] if family_of(family).scales_queries else [32, 100]),
        st.none() | st.just(0.7),
    )
    pairs = st.lists(st.sampled_from([1.0, 1.3, 4.5, 30.0]), min_size=8, max_size=8).map(tuple)
    kinds: dict[str, st.SearchStrategy[RopeScaling]] = {
        "linear": st.builds(LinearScaling, factor=factors),
        "dynamic": st.builds(DynamicScaling, factor=factors, original_seq_len=lengths),
        "llama3": st.builds(
            Llama3Scaling,
            factor=st.sampled_from([2.0, 5.5]),
            original_seq_len=lengths,
            high_freq_factor=st.sampled_from([1.5, 4.0]),
        ),
        "yarn": st.builds(
            YarnScaling,
            factor=factors,
            original_seq_len=lengths,
            beta_fast=st.sampled_from([4.0, 32.0]),
            attention_factor=weights,
            mscale=st.none() | st.just(0.8),
            mscale_all_dim=weights,
            truncate=st.booleans() if expressible(family, "rope_scaling.truncate", [False]) else st.just(True),
            query_growth=st.sampled_from(expressible(family, "rope_scaling.query_growth", [0.0, 0.1, 2.0])),
        ),
        "longrope": st.builds(
            LongRopeScaling,
            original_seq_len=lengths,
            longest_seq_len=st.sampled_from([32, 400]),
            short_factor=pairs,
            long_factor=pairs,
        ),
    }
    possible = [kind for name, kind in kinds.items() if name in family_of(family).rope_scalings]
    return st.one_of(*(() if family_of(family).scales_queries else (st.none(),)), *possible)


@st.composite
def mla_configs(draw: st.DrawFn, family: FamilyName) -> MLAConfig:
    """Random latent attention for a small model of the family."""
    even = family_of(family).even
    d_nope = draw(st.sampled_from([2, 4, 8] if "mla.d_nope" in even else [3, 4, 8]))
    d_rope = draw(st.sampled_from([2, 4, 8]))
    return MLAConfig(
        kv_lora_rank=draw(st.sampled_from([4, 6, 16] if "mla.kv_lora_rank" in even else [4, 7, 16])),
        q_lora_rank=draw(st.sampled_from([None, 5, 24])),
        d_nope=d_nope,
        d_rope=d_rope,
        d_v=draw(st.integers(1, d_nope + d_rope)),
    )


@st.composite
def linear_configs(draw: st.DrawFn) -> LinearAttentionConfig:
    """Random linear attention for a small model."""
    n_k_heads = draw(st.integers(1, 3))
    return LinearAttentionConfig(
        n_k_heads=n_k_heads,
        n_v_heads=n_k_heads * draw(st.integers(1, 3)),
        d_k=draw(st.sampled_from([8, 12, 16])),
        d_v=draw(st.sampled_from([8, 12, 16])),
        conv_size=draw(st.integers(1, 5)),
    )


@st.composite
def moe_configs(draw: st.DrawFn, family: FamilyName, n_layers: int) -> MoEConfig:
    """Random experts for a small model of the family with ``n_layers`` layers."""

    def any_of(name: str, values: Sequence[Any]) -> Any:
        return draw(st.sampled_from(expressible(family, f"moe.{name}", values)))

    n_groups = any_of("n_groups", [1, 2, 3])
    top_k_groups = draw(st.integers(1, n_groups))
    n_experts = any_of("n_experts", range(1, 10)) if n_groups == 1 else n_groups * draw(st.integers(2, 4))
    has_bias = family_of(family).has_selection_bias
    balances = [BiasBalance(), NoBalance()] if has_bias else [SequenceAuxBalance(coefficient=0.0)]
    step = any_of("every_n_layers", range(1, n_layers + 1))
    n_dense = any_of("n_dense_layers", range(0, n_layers + 1, step))
    with_experts = [layer for layer in range(n_dense, n_layers) if (layer + 1) % step == 0]
    lists_layers = "moe.dense_layers" in family_of(family).told
    moe = MoEConfig(
        n_experts=n_experts,
        top_k=draw(st.integers(1, n_experts // n_groups * top_k_groups)),
        n_groups=n_groups,
        top_k_groups=top_k_groups,
        d_ff=4 * draw(st.integers(1, 9)),
        n_shared_experts=any_of("n_shared_experts", [0, 1, 2]),
        shared_d_ff=None
        if expressible(family, "moe.shared_d_ff", [None, 8]) == [None]
        else 4 * draw(st.integers(1, 9)),
        shared_gate=any_of("shared_gate", [False, True]),
        group_score=any_of("group_score", ["best_two", "best"]),
        every_n_layers=step,
        n_dense_layers=n_dense,
        dense_layers=tuple(draw(some_of(with_experts))) if with_experts and lists_layers else (),
        score=any_of("score", ["softmax", "sigmoid"]),
        normalize_top_k=any_of("normalize_top_k", [False, True]),
        expert_bias=any_of("expert_bias", [False, True]),
        swiglu_limit=any_of("swiglu_limit", [None, 0.3, 7.0]),
        logit_bias=any_of("logit_bias", [False, True]),
        routed_scale=any_of("routed_scale", [1.0, 2.5]),
        balance=draw(st.sampled_from(balances)),
    )
    behind = family_of(family).dense_layers_are_last
    return replace(moe, dense_layers=from_first_listed(moe, n_layers)) if behind else moe


def example_config(family: FamilyName, **changes: Any) -> ModelConfig:
    """One fixed small model of the family, with every feature that planted faults damage."""
    moe = MoEConfig(
        n_experts=6,
        # three experts: with two and groups rated by their best expert, groups would not change the choice
        top_k=2 if "best_two" in expressible(family, "moe.group_score", ["best_two"]) else 3,
        n_groups=expressible(family, "moe.n_groups", [3, 1])[0],
        top_k_groups=expressible(family, "moe.top_k_groups", [2, 1])[0],
        d_ff=24,
        n_shared_experts=expressible(family, "moe.n_shared_experts", [0, 1])[0],
        shared_d_ff=None if expressible(family, "moe.shared_d_ff", [None, 8]) == [None] else 40,
        shared_gate=expressible(family, "moe.shared_gate", [False, True])[0],
        group_score=expressible(family, "moe.group_score", ["best_two", "best"])[0],
        n_dense_layers=expressible(family, "moe.n_dense_layers", [1, 0])[0],
        score=expressible(family, "moe.score", ["softmax", "sigmoid"])[0],
        normalize_top_k=expressible(family, "moe.normalize_top_k", [True, False])[0],
        expert_bias=expressible(family, "moe.expert_bias", [False, True])[0],
        swiglu_limit=expressible(family, "moe.swiglu_limit", [None, 7.0])[0],  # version 4 knows 7 alone
        logit_bias=expressible(family, "moe.logit_bias", [False, True])[0],
        balance=BiasBalance() if family_of(family).has_selection_bias else NoBalance(),
    )
    has_mla, has_linear = (family_of(family).has(section) for section in ("mla", "linear_attention"))
    linear = LinearAttentionConfig(n_k_heads=2, n_v_heads=4, d_k=8, d_v=12)
    has_full = has_linear or "nope_layers" in family_of(family).derived
    config = ModelConfig(
        family=family,
        vocab_size=61,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=4 if has_mla else 2,
        d_head=expressible(family, "d_head", [16, None])[0],
        d_ff=40,
        norm_placement=expressible(family, "norm_placement", ["both", "post", "pre"])[0],
        norm_adds_one=expressible(family, "norm_adds_one", [False, True])[0],
        norm=expressible(family, "norm", ["rms", "layer"])[0],
        embedding_norm=expressible(family, "embedding_norm", [True, False])[0],
        parallel_block=expressible(family, "parallel_block", [True, False])[0],
        ff_gated=expressible(family, "ff_gated", [True, False])[0],
        activation=usual_activation(family),
        positions=expressible(family, "positions", get_args(PositionsName))[0],
        max_positions=96 if "max_positions" in family_of(family).told else None,
        qk_norm=expressible(family, "qk_norm", [True, False])[0],
        qk_norm_over=expressible(family, "qk_norm_over", ["head", "all_heads"])[0],
        qk_norm_after_rope=expressible(family, "qk_norm_after_rope", [False, True])[0],
        qkv_bias=expressible(family, "qkv_bias", [True, False])[0],
        o_bias=expressible(family, "o_bias", [True, False])[0],
        ff_bias=expressible(family, "ff_bias", [True, False])[0],
        # in families where only layers with a window have RoPE, one layer needs a window
        sliding_window=9 if "nope_layers" in family_of(family).derived else None,
        full_attention_layers=(1,) if has_full else (),
        nope_layers=(1,) if "nope_layers" in family_of(family).told else (),
        residual_scale=expressible(family, "residual_scale", [0.5, 1.0])[0],
        score_cap=expressible(family, "score_cap", [0.8, None])[0],
        logit_cap=expressible(family, "logit_cap", [1.5, None])[0],
        logit_divisor=expressible(family, "logit_divisor", [2.0, 1.0])[0],
        sinks=expressible(family, "sinks", [False, True])[0],
        attention_gate=expressible(family, "attention_gate", get_args(AttentionGate))[0],
        local_rope_theta=expressible(family, "local_rope_theta", [None, 50.0])[0],
        rope_fraction=expressible(family, "rope_fraction", [0.5, 1.0])[0],
        rope_scaling=GROWING if family_of(family).scales_queries else None,
        init_std=0.12,
        mla=MLAConfig(kv_lora_rank=20, q_lora_rank=28, d_nope=12, d_rope=8, d_v=10) if has_mla else None,
        linear_attention=linear if has_linear else None,
        moe=moe if family in MOE_FAMILIES else None,
    )
    return with_told_together(replace(config, **changes))


def softmax_layers(config: ModelConfig) -> list[int]:
    """The layers whose attention is not linear, in which tokens have weights for each other."""
    return [layer for layer in range(config.n_layers) if not config.is_linear_layer(layer)]


def build(config: ModelConfig, seed: int) -> Decoder:
    """Roundtable's model in fp32; weights that start at ones or zeros are shifted, so that leaving one out shows."""
    with torch.device("meta"):
        model = build_decoder(config)
    materialize(model, config, seed, "cpu", torch.float32)
    with torch.no_grad():
        tensors = tensors_of(model)
        for name, weight in stated_weights(model).items():
            if weight.init in ("ones", "zeros"):
                tensors[name] += draw_normal(seed, f"{name} shift", tensors[name].shape, 0.25)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's logical tensors by name: each parameter once, and the buffers."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@dataclass
class Rows:
    """A batch of rows packed with documents: tokens, positions, documents, all (B, S)."""

    tokens_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor

    def context(self, choices: dict[int, Tensor] | None = None) -> Context:
        """A new context of these rows; ``choices`` are routers' choices to replay, by layer."""
        return Context(self.positions_BS, self.documents_BS, choices={} if choices is None else choices)


def packed_rows(vocab_size: int, seed: int, lengths: list[list[int]]) -> Rows:
    """Random tokens in documents of the given lengths, row by row; all rows' lengths must have the same sum."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(vocab_size, (len(lengths), sum(lengths[0])), generator=generator)
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    documents = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return Rows(tokens_BS, torch.stack(positions), torch.stack(documents))


def next_tokens(rows: Rows) -> Tensor:
    """targets_BS: the next token of the same document, IGNORE at each document's last."""
    targets_BS = torch.full_like(rows.tokens_BS, IGNORE)
    same_BS = rows.documents_BS[:, 1:] == rows.documents_BS[:, :-1]
    targets_BS[:, :-1] = torch.where(same_BS, rows.tokens_BS[:, 1:], IGNORE)
    return targets_BS
