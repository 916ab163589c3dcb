"""Any config, drawn at random: a config that passes is sound, and doing what the lines say ends in one."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config_cases import BASES, assert_sound, is_integer, loader
from config_ranges import RANGES
from config_strategies import configs
from launcher.config import rules
from launcher.config.rules import check
from launcher.config.tree import RunConfig


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Callable[..., RunConfig]:
    return loader(tmp_path_factory.mktemp("config"))


@given(configs() | configs(st.integers(-2, 12)), st.integers(1, 16))
def test_any_config_gets_an_answer_of_plain_lines(config, world_size):
    lines = check(config, world_size)
    assert all(isinstance(line, str) and line.isprintable() and "; " in line for line in lines)
    if not lines:
        assert_sound(config, world_size)


NOT_ALONE = (
    "decay",
    "init.base",
    "full_attention",
    "nope_layers",
    "moe.dense_layers",
    "original_seq_len",
    "longest_seq_len",
    "parallel.pipeline",
    "data.",
    "train.global_batch_size",
    "train.batch_ramp",
    "train.eval_every",
)  # need others with them
INTEGER_KEYS = [key for key in RANGES if is_integer(key) and not any(part in key for part in NOT_ALONE)]

SMALL_VALUES = {
    "train.steps": [1, 2, 7],
    "train.global_batch_size": [1, 4, 6, 8, 12],
    "train.batch_ramp": ["null", "{}", "{start: 2, increment: 2, samples: 20}", "{start: 4, increment: 8, samples: 1}"],
    "train.micro_batch_size": [1, 2, 3],
    "train.precision": ["fp32", "bf16"],
    "parallel.zero": [0, 1, 3],
    "schedule": ["{name: cosine}", "{name: wsd, decay_steps: 2}", "{name: constant, warmup_steps: 2}"],
    "schedule.warmup_steps": [0, 1, 3, 7],
    "model.n_layers": [1, 3],
    "model.n_heads": [1, 2, 3, 4, 6],
    "model.n_kv_heads": [1, 2, 3, 4],
    "model.d_model": [12, 24, 36, 48],
    "model.d_head": ["null", 4, 5, 6],
    "model.sliding_window": ["null", 4],
    "model.rope_fraction": [0.1, 0.5, 1.0],
    "model.qk_norm": ["true", "false"],
}


@given(
    st.sampled_from(sorted(BASES)),
    st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in SMALL_VALUES.items()}),
    st.integers(1, 4),
)
def test_a_config_that_passes_does_not_trip_later(load, family, changes, world_size):
    config = load(
        *BASES[family], "model.vocab_size=64", "model.d_ff=24", *(f"{key}={value}" for key, value in changes.items())
    )
    if not check(config, world_size):
        assert_sound(config, world_size)


@given(
    st.sampled_from(sorted(BASES)),
    st.fixed_dictionaries({}, optional={key: st.integers(-1, 70) for key in (*INTEGER_KEYS, "parallel.zero")}),
    st.sampled_from(["fp32", "bf16"]),
    st.integers(1, 4),
)
def test_doing_what_the_lines_say_ends_in_a_config_that_passes(load, family, changes, precision, world_size):
    changes = {**changes, "train.precision": precision}
    for _ in range(6):
        config = load(*BASES[family], *(f"{key}={value}" for key, value in changes.items()))
        lines = check(config, world_size)
        if not lines:
            return
        for line in lines:
            key, value = re.findall(r"; try (?:([^\s=]+)=)?(\[[^\]]*\]|[^ ,]+)", line)[0]
            changes[key or line.partition("=")[0]] = value
    pytest.fail(f"still refused after six rounds: {lines}")


def test_planted_a_rule_that_is_missing_is_seen(load, monkeypatch):
    """Without the attention rules, a config with an odd head passes the check, and the soundness test above fails."""
    monkeypatch.setattr(rules, "_check_attention", lambda config: iter(()))
    config = load("model.n_kv_heads=3")
    assert check(config, 1) == []
    with pytest.raises(AssertionError):
        assert_sound(config, 1)
