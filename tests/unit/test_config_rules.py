"""Every rule between a config's values: its line, a remedy that works, and no other line."""

import ast
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from config_cases import BASES, CASES, loader, split_overrides
from launcher.config import batch_rules, families, layout_rules, ranges, rules
from launcher.config.checked import load_checked
from launcher.config.dump import config_to_json
from launcher.config.json_schema import config_schema
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.slurm import rules as slurm_rules
from modeling import config as model_config
from modeling import expert_layers, moe_config, rope_scaling
from modeling.config import MLAConfig, ModelConfig
from modeling.moe_config import MoEConfig
from modeling.rope_scaling import LinearScaling


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Callable[..., RunConfig]:
    return loader(tmp_path_factory.mktemp("config"))


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_each_base_breaks_no_rule(load, family, world_size):
    assert check(load(*BASES[family]), world_size) == []


@pytest.mark.parametrize(
    ("base", "change", "world_size", "line", "remedy"), CASES, ids=[f"{case[0]} {case[1]}" for case in CASES]
)
def test_each_rule_has_its_line_and_a_remedy_that_works(load, base, change, world_size, line, remedy):
    overrides = [*BASES[base], *split_overrides(change)]
    assert check(load(*overrides), world_size) == [line]
    assert check(load(*overrides, remedy), world_size) == []


def test_the_json_schema_refuses_a_case_where_a_range_does_and_no_remedy(load):
    """A rule between values is not a schema's; what is beyond a range, or right, it tells alone."""
    validator, refused = Draft202012Validator(config_schema()), 0
    for base, change, _, line, remedy in CASES:
        wrong = load(*BASES[base], *split_overrides(change))
        mended = load(*BASES[base], *split_overrides(change), remedy)
        told = list(ranges.range_problems(wrong))
        assert validator.is_valid(json.loads(config_to_json(wrong))) == (told != [line]), change
        assert validator.is_valid(json.loads(config_to_json(mended))), remedy
        refused += told == [line]
    assert refused >= 15


def test_token_files_have_no_held_out_split(load, tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"a{suffix}").touch()
    overrides = ["train.eval_every_steps=5", f"data.sources=[{{path: {tmp_path}/a}}]"]
    (line,) = check(load(*overrides), 1)
    assert line.startswith("train.eval_every_steps=5 needs held-out data, but all of data.sources are token files")
    assert check(load(*overrides, f"data.heldout_path={tmp_path}/a"), 1) == []
    assert check(load(*overrides, f"data.sources.1.path={tmp_path}"), 1) == []


def test_tasks_are_read_by_a_tokenizer(load, tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"a{suffix}").touch()
    overrides = ["train.eval_tasks=[a.yaml]", f"data.sources=[{{path: {tmp_path}/a}}]"]
    (line,) = check(load(*overrides), 1)
    assert line.startswith("train.eval_tasks need a tokenizer, but all of data.sources are token files")
    assert check(load(*overrides, "data.tokenizer=gpt2"), 1) == []
    assert check(load(*overrides, f"data.sources.1.path={tmp_path}"), 1) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rope_theta": 5.0}, "model.rope_theta=5.0 is not possible where model.positions=alibi (no channel turns); try model.rope_theta=10000.0"),
        ({"local_rope_theta": 5.0}, "model.local_rope_theta=5.0 is not possible where model.positions=alibi (no channel turns); try model.local_rope_theta=null"),
        ({"rope_fraction": 0.5}, "model.rope_fraction=0.5 is not possible where model.positions=alibi (no channel turns); try model.rope_fraction=1.0"),
        ({"nope_layers": (1,)}, "model.nope_layers=[1] is not possible where model.positions=alibi (no channel turns); try model.nope_layers=[]"),
        ({"rope_scaling": LinearScaling()}, "model.rope_scaling.name=linear is not possible where model.positions=alibi (no channel turns); try model.rope_scaling=null"),
        ({"mla": MLAConfig()}, "model.positions=alibi must be rope where model.mla is given (channels of its keys turn); try rope"),
    ],
)  # fmt: skip
def test_where_no_channel_turns_nothing_says_how(changes, line):
    assert [*ModelConfig(positions="alibi", **changes).problems()] == [line]
    assert [*ModelConfig(positions="alibi").problems()] == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"t5_buckets": 8}, "model.positions=rope"),
        ({"qk_norm_over": "all_heads"}, "model.qk_norm=false"),
        ({"qk_norm_after_rope": True}, "model.qk_norm=false"),
        ({"qk_norm_after_rope": True, "qk_norm": True, "positions": "alibi"}, "model.positions=alibi"),
        ({"local_rope_theta": 5.0}, "model.sliding_window=null"),
        ({"score_channels": 9.0, "score_scale": 0.5}, "model.score_scale is given"),
        ({"qkv_bias": True, "mla": MLAConfig()}, "model.mla is given"),
        ({"ff_bias": True, "moe": MoEConfig(n_dense_layers=0)}, "no layer is dense"),
        ({"activation": "gelu", "moe": MoEConfig(n_dense_layers=0)}, "no layer is dense and no expert shared"),
    ],
)  # fmt: skip
def test_without_a_family_no_field_is_set_in_vain(changes, reason):
    key, value = next(iter(changes.items()))
    (line,) = families.check_family(ModelConfig(family="none", **changes))
    told = value if isinstance(value, str) else json.dumps(value)
    assert line.startswith(f"model.{key}={told} changes nothing where {reason}; try model.{key}=")
    del changes[key]
    assert [*families.check_family(ModelConfig(family="none", **changes))] == []


def test_half_of_the_buckets_are_for_longer_distances():
    assert [*ModelConfig(positions="t5", t5_max_distance=16).problems()] == [
        "model.t5_max_distance=16 must be above half of model.t5_buckets=32 (each of these is one distance); try 32"
    ]


def test_every_angle_has_a_sine_and_a_cosine():
    assert [*ModelConfig(positions="sinusoidal", d_model=33).problems()] == [
        "model.d_model=33 must be even where model.positions=sinusoidal (each angle has a sine and a cosine); try 34"
    ]


T5 = "model.t5_max_distance=16"


def test_muon_goes_with_every_stage_and_precision(load):
    for zero, precision in itertools.product((1, 2, 3), ("fp32", "bf16", "fp16")):
        for axis in ("tp", "pp", "cp"):
            config = load(
                "optimizer={name: muon}", f"train.precision={precision}", f"parallel.{axis}=2", f"parallel.zero={zero}"
            )
            assert check(config, 2) == []


def test_every_line_of_the_rules_has_a_case(load, tmp_path):
    """Each `yield` in the rules is reached by a case above: a rule added without one fails here."""
    wanted = {
        (module.__file__, node.lineno)
        for module in (
            rules,
            batch_rules,
            ranges,
            families,
            layout_rules,
            slurm_rules,
            model_config,
            moe_config,
            expert_layers,
            rope_scaling,
        )
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
        if isinstance(node, ast.Yield)
    }
    cases = [(load(*BASES[base], *split_overrides(change)), world_size) for base, change, world_size, _, _ in CASES]
    for suffix in (".bin", ".idx"):
        (tmp_path / f"a{suffix}").touch()
    cases.append((load("train.eval_every_steps=5", f"data.sources=[{{path: {tmp_path}/a}}]"), 1))
    cases.append((load("train.eval_tasks=[a.yaml]", f"data.sources=[{{path: {tmp_path}/a}}]"), 1))
    cases += [
        (load(*BASES[family], f"model.positions={positions}", "model.d_model=33", "model.rope_theta=5", T5), 1)
        for family in ("deepseek_v3", "llama")
        for positions in ("alibi", "sinusoidal", "t5")
    ]
    assert wanted - set(lines_run(cases)) == set()


def lines_run(cases: list[tuple[RunConfig, int]]) -> Iterator[tuple[str, int]]:
    """Every (file, line) that checking ``cases`` runs through."""
    seen: set[tuple[str, int]] = set()

    def trace(frame, event, argument):
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        for config, world_size in cases:
            check(config, world_size)
    finally:
        sys.settrace(previous)
    yield from seen


def test_problems_of_every_section_are_told_at_once(load):
    lines = check(
        load(
            "train.steps=0",
            "model.n_kv_heads=3",
            "optimizer.lr=-1",
            "parallel.zero=0",
            "name=a/b",
            "model.qk_norm=true",
        ),
        3,
    )
    assert [line.partition("=")[0] for line in lines] == [
        "train.steps", "optimizer.lr", "name", "train.global_batch_size", "model.n_kv_heads", "parallel.zero", "model.qk_norm",
    ]  # fmt: skip


def test_load_checked_tells_all_problems_of_config_and_data(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{sources: [{{path: {tmp_path}/none.txt}}]}}\ntrain: {{steps: 0}}\n")
    with pytest.raises(UserError) as caught:
        load_checked(path, world_size=1)
    assert [line.partition("=")[0] for line in caught.value.problems] == ["train.steps", "data.sources[0].path"]
    with pytest.raises(UserError) as caught:
        load_checked(path, ["train.steps=5", "data.seq_len=0"], world_size=1)
    assert len([line for line in caught.value.problems if line.startswith("data.seq_len=")]) == 1
    assert dataclasses.is_dataclass(load_checked(path, ["train.steps=5"], world_size=1, data=False))


def test_a_run_directory_that_a_source_would_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus/x").mkdir(parents=True)
    Path("corpus/a.txt").write_text("text")
    Path("corpus/x/a.jsonl").write_text('{"text": "a"}')
    Path("config.yaml").write_text("name: one\ndata: {sources: [{path: .}], token_dir: elsewhere/.tokens}\n")
    with pytest.raises(UserError) as caught:
        load_checked("config.yaml", world_size=1)
    (line,) = caught.value.problems
    assert line.startswith(
        "run_dir=null (runs/one) lies in data.sources[0].path='.', which would read its files as text;"
    )
    assert line.endswith("; name a folder outside of it, or add '**/runs/**' to that source's exclude")
    for fitting in ("data.sources=[{path: ., exclude: ['**/runs/**']}]", "data.sources=[{path: corpus}]"):
        assert load_checked("config.yaml", [fitting], world_size=1)
    with pytest.raises(
        UserError, match=r"^run_dir='corpus/here' lies in data\.sources\[0\]\.path='corpus/\*/\*\.jsonl'"
    ):
        load_checked("config.yaml", ["data.sources=[{path: corpus/*/*.jsonl}]", "run_dir=corpus/here"], world_size=1)
    with pytest.raises(UserError) as caught:  # two keys, two lines
        load_checked("config.yaml", ["data.token_dir=tokens"], world_size=1)
    assert [line.partition("=")[0] for line in caught.value.problems] == ["data.token_dir", "run_dir"]
