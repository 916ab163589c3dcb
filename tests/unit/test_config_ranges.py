"""Every number of a config has a range: what is out of it is told by a line whose remedy works."""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Literal

import pytest
from annotated_types import Interval

from config_cases import BASES, is_integer, loader
from config_ranges import RANGES, range_faults
from launcher.config.dump import config_to_json, describe_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.slurm.profile import job_script
from launcher.slurm.script import render
from launcher.training.start import checkpoint_gib, room_needed
from modeling.counts import flops_per_token
from pace import is_within


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Callable[..., RunConfig]:
    return loader(tmp_path_factory.mktemp("config"))


def base_of(key: str) -> list[str]:
    """The overrides under which a config has the key and breaks no rule."""
    family = (
        "deepseek_v3"
        if ".mla." in key or "_groups" in key
        else "qwen3_5_text"
        if ".linear_attention." in key
        else "qwen3_moe"
        if "n_shared" in key or "dense_layers" in key or "every_n" in key
        else "qwen2_moe"
        if "shared_d_ff" in key
        else "gpt_oss"
        if "swiglu" in key
        else "gemma3_text"
        if "score_channels" in key or "local_rope" in key
        else "granitemoe"
        if any(part in key for part in ("score_scale", "residual_scale", "logit_divisor", "embedding_scale"))
        else "gpt2"
        if "max_positions" in key
        else "glm4_moe"
        if ".moe." in key or ".mtp." in key or "base_expert" in key
        else "qwen2"
        if "sliding" in key or "full_attention" in key
        else "gemma2"
        if "_cap" in key
        else "smollm3"
        if "nope" in key
        else "phi3"
        if any(part in key for part in LONGROPE)
        else "llama"
    )
    base = list(BASES[family])
    base += ["optimizer={name: sgd}"] if "momentum" in key else ["schedule={name: wsd}"] if "decay_steps" in key else []
    base += ["checkpoint.every_steps=100"] if "keep_every" in key else []
    base += ["model.moe.balance={name: sequence_aux}"] if "balance.coefficient" in key else []
    base += ["model.sliding_window=8"] if "full_attention" in key else []
    base += ["model.rope_scaling={name: llama3}"] if "freq_factor" in key or "original" in key else []
    base += ONE_PAIR if any(part in key for part in LONGROPE) else []
    base += (
        ["model.rope_scaling={name: yarn}"]
        if any(part in key for part in ("beta_", "attention_f", "mscale", "query_growth"))
        else []
    )
    base += ["model.init.name=mup"] if "base_" in key else []
    base += ["parallel.pipeline.name=interleaved"] if "n_chunks" in key else []
    base += ["data.cleaning.language={model: lid.bin}"] if "cleaning.language" in key else []
    base += ["data.stages=[{weights: [1.0]}]"] if "data.stages" in key else []
    return base + (["data.sources=[{path: a}]"] if "data.sources" in key else [])


ONE_PAIR = ["model.rope_scaling={name: longrope, short_factor: [1.0], long_factor: [1.0]}", "model.d_model=16"]
LONGROPE = ("short_factor", "long_factor", "longest_seq_len")


def place_of(key: str) -> str:
    """Where an override sets one number of the key."""
    return {
        "data.sources.weight": "data.sources[0].weight",
        "data.sources.max_epochs": "data.sources[0].max_epochs",
        "data.sources.max_bad_share": "data.sources[0].max_bad_share",
        "data.stages.from_tokens": "data.stages[0].from_tokens",
        "data.stages.weights": "data.stages[0].weights[0]",
        "parallel.pipeline.layers": "parallel.pipeline.layers[0]",
        "model.full_attention_layers": "model.full_attention_layers[0]",
        "model.nope_layers": "model.nope_layers[0]",
        **{f"model.rope_scaling.{key}": f"model.rope_scaling.{key}[0]" for key in LONGROPE if "factor" in key},
        "model.moe.dense_layers": "model.moe.dense_layers[0]",
    }.get(key, key)


SINGLE_VALUES = [
    (key, illegal, words)
    for key, limits in RANGES.items()
    for illegal, words in (
        (limits.minimum - 1 if is_integer(key) else limits.minimum - 1e-9, f"must be at least {limits.minimum}"),
        (limits.maximum + max(1, limits.maximum // 1000), f"must be at most {limits.maximum}"),
    )
]


@pytest.mark.parametrize(
    ("key", "illegal", "words"), SINGLE_VALUES, ids=[f"{key} {words}" for key, _, words in SINGLE_VALUES]
)
def test_each_range_refuses_and_its_remedy_works(load, key, illegal, words):
    base, usual = base_of(key), RANGES[key].usual
    lines = check(load(*base, f"{place_of(key)}={illegal}"), 1)
    assert [line.partition("=")[0] for line in lines] == [place_of(key)]
    assert f" {words}; try {usual}" in lines[0]
    assert [line for line in check(load(*base, f"{place_of(key)}={usual}"), 1) if line.startswith(f"{key}=")] == []


@pytest.mark.parametrize("key", [key for key in RANGES if key.startswith(("model.", "parallel."))])
def test_a_number_out_of_range_is_told_in_8_bits_too(load, key):
    """The rule of 8 bits builds the model, which a width below zero has none of."""
    config = load(*base_of(key), "train.precision=fp8", f"{place_of(key)}=-1")
    assert place_of(key) in [line.partition("=")[0] for line in check(config, 1)]


def test_every_number_of_the_tree_has_both_bounds():
    assert range_faults(RunConfig) == []
    assert len(RANGES) == 167


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    name: Literal["planted"] = "planted"
    good: Annotated[int, Interval(ge=0, le=9)] = 3
    null: Annotated[int, Interval(ge=0, le=9)] | None = field(default=None, metadata={"usual": 3})
    flag: bool = False
    free: int = 3
    free_list: tuple[float, ...] = ()
    no_maximum: Annotated[int, Interval(ge=0)] = 3
    no_remedy: Annotated[int, Interval(ge=0, le=9)] | None = None
    wrong_remedy: Annotated[int, Interval(ge=1, le=9)] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
    name: Literal["other"] = "other"
    good: Annotated[int, Interval(ge=0, le=8)] = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedTree:
    sections: tuple[Planted | Other, ...] = ()


def test_planted_numbers_without_a_range_are_seen():
    faulty = ["free", "free_list", "no_maximum", "no_remedy", "wrong_remedy", "good"]
    assert [fault.split()[0] for fault in range_faults(PlantedTree)] == [f"sections.{name}" for name in faulty]


def test_a_number_out_of_range_is_told_by_the_ranges_alone(load):
    """Pydantic, which knows the marker as well, would use words of its own and hide what the rules have to say."""
    config = load("train.steps=0", "parallel.pipeline.layers=[0]", "model.rope_theta=0.5", "model.n_kv_heads=3")
    assert check(config, 1) == [
        "model.rope_theta=0.5 must be at least 1.0; try 10000.0",
        "train.steps=0 must be at least 1; try 1000",
        "parallel.pipeline.layers[0]=0 must be at least 1; try 1 or null",
        "model.n_kv_heads=3 must divide model.n_heads=8; try 2 or 4",
    ]


EXTREMES = [
    "0",
    "-1",
    "1",
    str(2**31),
    str(2**63),
    str(10**18),
    str(10**30),
    "1e308",
    ".inf",
    "-.inf",
    ".nan",
    "1e-320",
]


@pytest.fixture(scope="module")
def imported() -> None:
    """What takes seconds to import is there, so that no case's time counts it."""
    checkpoint_gib(RunConfig())


@pytest.mark.parametrize("key", RANGES)
def test_any_number_ends_in_a_line_or_a_config_within_two_seconds(load, imported, key):
    """Each extreme for each key: refused in plain lines, or a config that is shown, counted and planned for."""
    for value in (*EXTREMES, str(RANGES[key].minimum), str(RANGES[key].maximum), "1" + "0" * 400):
        begun = time.process_time()
        try:
            config = load(*base_of(key), f"{place_of(key)}={value}")
        except UserError as error:
            lines = error.problems
        else:
            lines = check(config, 1)
            if not lines:
                assert describe_config(config)
                assert json.loads(config_to_json(config))
                assert checkpoint_gib(config) > 0
                assert flops_per_token(config.model, config.data.seq_len) > 0
                assert room_needed(config)[0] > 0
                assert render(job_script("train"), config, "python")
        assert all(line.isprintable() and "; " in line and len(line) < 500 for line in lines)
        assert is_within(time.process_time() - begun, 2)


@pytest.mark.parametrize("ranks", [2**31, 2**63, 10**30])
def test_any_number_of_processes_gets_an_answer(load, ranks):
    begun = time.process_time()
    assert check(load("parallel.tp=3", "parallel.pp=2"), ranks)
    assert is_within(time.process_time() - begun, 2)
