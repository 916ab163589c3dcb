"""Our model against Hugging Face transformers' own classes, loaded from the exported folder.

Tolerances are those of tests/support/hf_comparison.py.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_comparison import (
    FEW,
    LOGITS_TOLERANCE,
    Routes,
    check_gradients,
    check_logits,
    exported,
    our_logits,
    recorded_routes,
    told_of,
)
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.families.family import family_of
from modeling.moe_config import BiasBalance, MoEConfig
from modeling.rope_scaling import DynamicScaling, LongRopeScaling, YarnScaling
from rotating import some_fast
from small_models import LENGTHS, MOE_FAMILIES, build, configs, example_config, next_tokens, packed_rows


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal(family: FamilyName) -> None:
    """Random small configurations: the exported model's logits are ours."""

    @FEW
    @given(config=configs(family), seed=st.integers(0, 2**20))
    def check(config: ModelConfig, seed: int) -> None:
        model = build(config, seed)
        check_logits(model, exported(model, config), config, packed_rows(config.vocab_size, seed, LENGTHS))

    check()


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if family_of(name).turns and "dynamic" in family_of(name).rope_scalings]
)
def test_dynamic_base_goes_by_the_longest_sequence_of_a_pass(family: FamilyName) -> None:
    """Packed rows of up to 20 tokens, beyond an original length of 8, equal theirs; rows within it are not scaled."""
    config = example_config(family, rope_scaling=DynamicScaling(factor=3.0, original_seq_len=8))
    model, plain = build(config, 1), build(replace(config, rope_scaling=None), 1)
    theirs = exported(model, config)
    is_packed = config.linear_attention is None  # whose class does not tell documents of a row apart
    within = packed_rows(config.vocab_size, 1, [[4, 3], [7]] if is_packed else [[7], [7]])
    with torch.no_grad():
        for rows in (packed_rows(config.vocab_size, 1, LENGTHS if is_packed else [[20]]), within):
            with recorded_routes(theirs) as routes:
                reference_BSV = theirs(rows.tokens_BS, **told_of(theirs, rows), use_cache=False).logits
            logits_BSV = our_logits(model, config, rows, routes)
            torch.testing.assert_close(logits_BSV, reference_BSV, rtol=0.0, atol=LOGITS_TOLERANCE)
        assert torch.equal(logits_BSV, our_logits(plain, config, within, routes))


@pytest.mark.parametrize("attention_factor", [None, 0.8])
def test_longrope_goes_by_the_longest_sequence_of_a_pass(attention_factor: float | None) -> None:
    """Packed rows of up to 20 tokens, beyond an original length of 8, and rows within it equal theirs."""
    scaling = LongRopeScaling(
        original_seq_len=8,
        longest_seq_len=96,
        short_factor=(1.0, 1.1, 1.5, 2.0),
        long_factor=(1.2, 3.0, 9.0, 40.0),
        attention_factor=attention_factor,
    )
    config = example_config("phi3", rope_scaling=scaling, rope_fraction=1.0)
    others = [replace(scaling, long_factor=scaling.short_factor), replace(scaling, short_factor=scaling.long_factor)]
    model, theirs = build(config, 1), exported(build(config, 1), config)
    with torch.no_grad():
        for lengths, other in zip((LENGTHS, [[4, 3], [7]]), others, strict=True):
            rows = packed_rows(config.vocab_size, 1, lengths)
            reference_BSV = theirs(rows.tokens_BS, **told_of(theirs, rows), use_cache=False).logits
            logits_BSV = our_logits(model, config, rows, Routes())
            torch.testing.assert_close(logits_BSV, reference_BSV, rtol=0.0, atol=LOGITS_TOLERANCE)
            wrong = replace(config, rope_scaling=other)  # planted: the other factors
            assert not torch.allclose(our_logits(build(wrong, 1), wrong, rows, Routes()), reference_BSV, atol=1e-3)
    rows = packed_rows(config.vocab_size, 1, LENGTHS)
    check_gradients(model, theirs, config, rows, next_tokens(rows))


@pytest.mark.parametrize("original", [8, 40, 4096])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_yarn_without_a_ramp_equals(family: FamilyName, original: int) -> None:
    """Kimi K2 has beta_fast = beta_slow = 1: a frequency is kept or divided by the whole factor, or lies between."""
    scaling = YarnScaling(factor=32.0, original_seq_len=original, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)
    config = example_config(family, rope_scaling=scaling)
    model = build(config, 1)
    assert list(config.problems()) == []
    check_logits(model, exported(model, config), config, packed_rows(config.vocab_size, 1, LENGTHS))


@pytest.mark.parametrize("fraction", [0.125, 0.75])
@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_any_part_of_a_head_turns_in_neighbouring_channels(family: FamilyName, fraction: float) -> None:
    """One pair of a head's 16 channels, and 12 of them: the files' rows are in another order within that part alone."""
    config = example_config(family, rope_fraction=fraction)
    model, theirs = build(config, 1), exported(build(config, 1), config)
    rows = packed_rows(config.vocab_size, 1, LENGTHS)
    check_logits(model, theirs, config, rows)
    check_gradients(model, theirs, config, rows, next_tokens(rows))


GRADIENTS_FAST = ("llama", "gpt2", "gemma2", "bloom", "qwen2_moe", "gpt_oss", "granitemoe", "deepseek_v3")


@pytest.mark.parametrize("family", some_fast(FAMILIES, *GRADIENTS_FAST))
def test_gradients_equal(family: FamilyName) -> None:
    """Random small configurations: every gradient of one training step is transformers' own."""

    @FEW
    @given(config=configs(family), seed=st.integers(0, 2**20))
    def check(config: ModelConfig, seed: int) -> None:
        model = build(config, seed)
        rows = packed_rows(config.vocab_size, seed, LENGTHS)
        check_gradients(model, exported(model, config), config, rows, next_tokens(rows))

    check()


MANY_EXPERTS = MoEConfig(
    n_experts=256,
    top_k=8,
    d_ff=8,
    n_shared_experts=1,
    n_dense_layers=1,
    n_groups=8,
    top_k_groups=4,
    score="sigmoid",
    routed_scale=2.5,
    balance=BiasBalance(),
)


def test_many_narrow_experts_equal() -> None:
    """As many experts, groups and choices as DeepSeek-V3 has, each 8 channels wide."""
    config = example_config("deepseek_v3", moe=MANY_EXPERTS)
    model = build(config, 5)
    theirs, rows = exported(model, config), packed_rows(config.vocab_size, 5, LENGTHS)
    check_logits(model, theirs, config, rows)
    check_gradients(model, theirs, config, rows, next_tokens(rows))


@pytest.mark.slow
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_any_number_of_experts_and_choices_equals(family: FamilyName) -> None:
    """Up to 160 experts, and any number of them for a token."""

    @FEW
    @given(config=configs(family), share=st.integers(2, 160), choice=st.integers(0, 10_000), seed=st.integers(0, 2**20))
    def check(config: ModelConfig, share: int, choice: int, seed: int) -> None:
        assert config.moe is not None
        n_groups = config.moe.n_groups
        moe = replace(config.moe, n_experts=n_groups * max(2, share // n_groups), d_ff=8)
        config = replace(config, moe=replace(moe, top_k=1 + choice % moe.choosable))
        model = build(config, seed)
        theirs, rows = exported(model, config), packed_rows(config.vocab_size, seed, LENGTHS)
        check_logits(model, theirs, config, rows)
        check_gradients(model, theirs, config, rows, next_tokens(rows))

    check()
