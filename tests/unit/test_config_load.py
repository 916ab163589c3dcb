"""The config loader: YAML, overrides, and one line for each thing that is wrong."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings

from config_strategies import configs
from launcher.config.dump import config_to_json, describe_config, dump_config
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.config.validate import build_config
from launcher.config.yaml_text import parse_yaml
from launcher.errors import UserError
from modeling.moe_config import BiasBalance, MoEConfig, SequenceAuxBalance
from modeling.optimizers.config import AdamWConfig, SGDConfig
from modeling.schedules import WSDSchedule


@pytest.fixture
def write(tmp_path):
    def write_text(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write_text


def problems_of(path, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    assert all("\n" not in line and line for line in caught.value.problems)
    return caught.value.problems


def test_a_tilde_is_the_home_directory(write, monkeypatch):
    """Shells leave the one in run_dir=~/x alone; a folder named ~ is never what was meant."""
    monkeypatch.setenv("HOME", "/home/somebody")
    paths = ["run_dir=~/a", "data.token_dir=~/b", "checkpoint.dir=~/c", "slurm.scratch=~/d", "slurm.python=~/e/python"]
    config = load_config(write("{}"), paths)
    assert (config.run_dir, config.data.token_dir) == ("/home/somebody/a", "/home/somebody/b")
    assert (config.checkpoint.dir, config.slurm.scratch) == ("/home/somebody/c", "/home/somebody/d")
    assert config.slurm.python == "/home/somebody/e/python"


def test_an_empty_file_gives_the_defaults(write):
    assert load_config(write("# nothing\n")) == RunConfig()


def test_yaml_1_2(write):
    config = load_config(
        write("name: no\nrun_dir: 2026-11-20\noptimizer: {lr: 3e-4, eps: 1e-9}\nmodel: {rope_theta: 5}\n")
    )
    assert (config.name, config.run_dir) == ("no", "2026-11-20")
    assert config.optimizer == AdamWConfig(lr=3e-4, eps=1e-9)
    assert config.model.rope_theta == 5.0
    assert isinstance(config.model.rope_theta, float)


def test_aliases_and_merges_share_nothing(write):
    text = "data:\n  sources:\n    - &a {path: x, weight: 2}\n    - {<<: *a, path: y}\n    - *a\n"
    config = load_config(write(text), ["data.sources.0.weight=5"])
    assert [(source.path, source.weight) for source in config.data.sources] == [("x", 5.0), ("y", 2.0), ("x", 2.0)]


def test_overrides(write):
    path = write("optimizer: {lr: 1e-3}\ndata: {sources: [{path: a}]}\n")
    config = load_config(
        path,
        [
            "optimizer.lr=2e-4",
            "data.sources[0].path=b",
            "data.sources.1={path: c, weight: 3}",
            "run_dir=null",
            "name='7'",
        ],
    )
    assert config.optimizer.lr == 2e-4
    assert [source.path for source in config.data.sources] == ["b", "c"]
    assert (config.run_dir, config.name) == (None, "7")


def test_an_override_replaces_a_whole_list(write):
    config = load_config(write("data: {sources: [{path: a}, {path: b}]}"), ["data.sources=[{path: a.txt}]"])
    assert [source.path for source in config.data.sources] == ["a.txt"]


def test_model_moe_can_be_unset_and_created(write):
    path = write("model: {moe: {n_experts: 4, balance: {name: bias, rate: 0.5}}}")
    assert load_config(path, ["model.moe=null"]).model.moe is None
    changed = MoEConfig(n_experts=4, top_k=1, balance=BiasBalance(rate=0.5))
    assert load_config(path, ["model.moe.top_k=1"]).model.moe == changed
    assert load_config(write("model: {moe: null}"), ["model.moe.top_k=1"]).model.moe == MoEConfig(top_k=1)


def test_a_missing_union_name_is_the_defaults(write):
    config = load_config(write("optimizer: {beta1: 0.8}\nmodel: {moe: {balance: {coefficient: 0.5}}}"))
    assert config.optimizer == AdamWConfig(beta1=0.8)
    assert config.model.moe == MoEConfig(balance=SequenceAuxBalance(coefficient=0.5))


def test_an_override_of_a_union_name_drops_the_old_alternatives_keys(write):
    path = write(
        "optimizer: {name: adamw, lr: 0.5, beta1: 0.8, eps: 1}\nmodel: {moe: {balance: {name: sequence_aux, coefficient: 1}}}"
    )
    config = load_config(path, ["optimizer.name=sgd", "model.moe.balance.name=bias", "schedule.name=wsd"])
    assert config.optimizer == SGDConfig(lr=0.5)
    assert config.model.moe == MoEConfig(balance=BiasBalance())
    assert config.schedule == WSDSchedule()


@pytest.mark.parametrize(
    "overrides", [("optimizer.name=sgd", "optimizer.beta1=0.9"), ("optimizer.beta1=0.9", "optimizer.name=sgd")]
)
def test_an_overrides_own_key_of_another_alternative_is_told(write, overrides):
    path = write("optimizer: {beta1: 0.5}")
    assert problems_of(path, *overrides) == [
        "optimizer.beta1=0.9 does not belong to optimizer.name=sgd, only to optimizer.name=adamw or "
        "optimizer.name=muon; remove it, or set optimizer.name=adamw or optimizer.name=muon"
    ]


def test_a_typo_is_not_dropped_with_the_old_alternative(write):
    assert "optimizer.beta9" in problems_of(write("optimizer: {name: adamw, beta9: 1}"), "optimizer.name=sgd")[0]


CASES = [
    ("train: {steps: ten}", "train.steps='ten' must be an integer; write a whole number, e.g. 1000"),
    ("train: {steps: '8'}", "train.steps='8' must be an integer; write a whole number, e.g. 8"),
    ("train: {steps: 8.0}", "train.steps=8.0 must be an integer; write a whole number, e.g. 8"),
    ("train: {steps: true}", "train.steps=true must be an integer; write a whole number, e.g. 1000"),
    ("train: {eval_every_steps: x}", "train.eval_every_steps='x' must be an integer or null; write a whole number, e.g. 1"),
    ("optimizer: {lr: fast}", "optimizer.lr='fast' must be a number; write one, e.g. 0.0003"),
    ("optimizer: {lr: '3e-4'}", "optimizer.lr='3e-4' must be a number; write one, e.g. 0.0003"),
    ("optimizer: {lr: .nan}", "optimizer.lr=.nan must be a finite number; write one, e.g. 1e-3"),
    ("optimizer: {lr: 1e999}", "optimizer.lr=.inf must be a finite number; write one, e.g. 1e-3"),
    ("train: {steps: -.inf}", "train.steps=-.inf must be a finite number; write one, e.g. 1e-3"),
    ("train: {deterministic: 1}", "train.deterministic=1 must be true or false; write true"),
    ("model: {tie_embeddings: yes}", "model.tie_embeddings='yes' must be true or false; write true"),
    ("train: {deterministic: Off}", "train.deterministic='Off' must be true or false; write false"),
    ("train: {deterministic: maybe}", "train.deterministic='maybe' must be true or false; write one of the two"),
    ("name: 12", "name=12 must be text; quote it: name='\"12\"'"),
    ("name: [a]", "name=[\"a\"] must be text; write it in quotes"),
    ("run_dir: 3", "run_dir=3 must be text or null; quote it: run_dir='\"3\"'"),
    ("train: {precision: int4}", "train.precision='int4' must be one of fp32, bf16, fp16, fp8; try fp32"),
    ("train: {precision: bf_16}", "train.precision='bf_16' must be one of fp32, bf16, fp16, fp8; did you mean bf16?"),
    ("train: {precision: 16}", "train.precision=16 must be one of fp32, bf16, fp16, fp8; did you mean fp16?"),
    ("optimizer: {name: adam}", "optimizer.name='adam' must be one of adamw, sgd, muon; did you mean adamw?"),
    ("optimizer: {name: null}", "optimizer.name=null must be one of adamw, sgd, muon; try adamw"),
    ("optimizer: sgd", "optimizer='sgd' must be a section; write optimizer.name=sgd"),
    ("metrics:", "metrics=null must be a section; write its keys below it, or leave it out for the defaults"),
    ("model: {moe: 8}", "model.moe=8 must be a section or null; write its keys below it, or leave it out for the defaults"),
    ("data: {sources: x}", "data.sources='x' must be a list; write a list of sections, e.g. [{...}]"),
    ("data: {sources: [x]}", "data.sources[0]='x' must be a section; write its keys below it, or leave it out for the defaults"),
    ("data: {sources: [{path: a, exclude: b}]}", "data.sources[0].exclude='b' must be a list; write a list, e.g. [a, b]"),
    ("data: {sources: [{weight: 1}]}", "data.sources[0].path is missing and has no default; write text there"),
    ("trian: {}", "trian={} is not a known key; did you mean train?"),
    ("train: {stepz: 3}", "train.stepz=3 is not a known key; did you mean train.steps?"),
    ("lr: 1", "lr=1 is not a known key; did you mean optimizer.lr?"),
    ("train: {d_ff: 1}", "train.d_ff=1 is not a known key; did you mean model.d_ff or model.moe.d_ff?"),
    ("parallel: {qqq: 1}", "parallel.qqq=1 is not a known key; parallel has "),
    ("train.steps: 3", "train.steps=3 is not a known key; in YAML, write each part on a line of its own, the next one indented"),
    ("optimizer: {momentum: 0.9}", "optimizer.momentum=0.9 does not belong to optimizer.name=adamw, only to optimizer.name=sgd or optimizer.name=muon; remove it, or set optimizer.name=sgd or optimizer.name=muon"),
    ("schedule: {name: constant, min_ratio: 0}", "schedule.min_ratio=0 does not belong to schedule.name=constant, only to schedule.name=cosine or schedule.name=wsd; remove it, or set schedule.name=cosine or schedule.name=wsd"),
    ("name: \"\\ud800\"", "the config cannot be read: "),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), CASES, ids=[text for text, _ in CASES])
def test_each_mistake_is_one_line(write, text, line):
    (problem,) = problems_of(write(text))
    assert problem.startswith(line)
    assert problem == line or line.endswith((" ", "has "))


def test_every_mistake_is_told_at_once(write):
    text = "\n".join(
        ["train: {steps: x, stepz: 1}", "optimizer: {lr: .inf, name: lion}", "schedule: 3", "data: {sources: [1, {}]}"]
    )
    lines = problems_of(write(text), "bad", "checkpoint.keep_last=x", "seed=", "=1", "name=[", "train.steps.x=1")
    keys = [line.partition(" ")[0].partition("=")[0].strip(":") for line in lines]
    assert sorted(keys) == sorted(
        [
            *("'bad'", "seed", "'", "name", "train.steps.x", "optimizer.name", "optimizer.lr", "train.steps"),
            *("train.stepz", "schedule", "data.sources[0]", "data.sources[1].path", "checkpoint.keep_last"),
        ]
    )


FILES = [
    (
        "a: 1\na: 2\nb:\n  c: 1\n  c: 2\n",
        [":2: the key 'a' appears twice (first on line 1); keep one", ":5: the key 'c' appears"],
    ),
    ("train:\n\tsteps: 2\n", [":2: a tab cannot indent YAML; use spaces"]),
    ("a: 1\nb: [1, 2\nc: 3\n", [":3: not valid YAML ("]),
    ("- 1\n- 2\n", [":1: the file holds a list; write keys at the top level"]),
    ("hello", [":1: the file holds a single value; write keys"]),
    ("a: 1\n---\nb: 2\n", [":2: a second document begins (---); keep one per file"]),
    (
        "1: a\n? [x]\n: 2\n",
        [":1: '1' is used as a key; keys are text", ":2: a list or map is used as a key; keys are text"],
    ),
    ("a: !!set {b}\nc: !mine 3\n", [":1: the tag !!set is not known", ":2: the tag !mine is not known"]),
    ("a: &x\n  b: *x\n", [":1: an alias (*) refers to what contains it; write the value out"]),
    ("a: " + "9" * 5000, [": not valid YAML ("]),
]


@pytest.mark.parametrize(("text", "expected"), FILES, ids=[text[:12] for text, _ in FILES])
def test_a_file_that_is_no_mapping_is_told_by_line(write, text, expected):
    path = write(text)
    lines = problems_of(path)
    assert len(lines) == len(expected)
    assert all(line.startswith(f"{path}{start}") for line, start in zip(lines, expected, strict=True))


def test_a_file_that_cannot_be_read(tmp_path):
    assert problems_of(tmp_path / "no.yaml")[0].startswith(f"{tmp_path}/no.yaml: no such file; give the path")
    assert "cannot be read (Is a directory)" in problems_of(tmp_path)[0]
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nname: \xe9\n")
    assert problems_of(tmp_path / "latin.yaml") == [f"{tmp_path}/latin.yaml:2: not UTF-8 text; save the file as UTF-8"]


OVERRIDES = [
    ("train.steps", "'train.steps' is not an override; write key=value, e.g. train.steps=100"),
    ("train..steps=1", "'train..steps=1' has an empty name before '='; write key=value, e.g. train.steps=100"),
    ("train.steps=", "train.steps= has no value; write one, or leave it out"),
    ("optimizer.lr=", "optimizer.lr= has no value; write one, or leave it out"),
    ("run_dir=", "run_dir= has no value; write one, or run_dir=null to unset it"),
    ("data.sources[0].nothing=", "data.sources.0.nothing= has no value; write one, or leave it out"),
    ("data.sources.7.path=x", "data.sources.7.path='x' cannot be set: data.sources is a list of 1; write an index from 0 to 1"),
    ("data.sources.x.path=x", "data.sources.x.path='x' cannot be set: data.sources is a list of 1; write an index from 0 to 1"),
    ("seed.x=1", "seed.x=1 cannot be set: seed is 5, not a section"),
    ("optimizr.lr=1", 'optimizr={"lr": 1} is not a known key; did you mean optimizer?'),
    ("train.0=1", "train=[1] must be a section; write its keys below it, or leave it out for the defaults"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "line"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_each_bad_override_is_one_line(write, override, line):
    assert problems_of(write("seed: 5\ndata: {sources: [{path: a}]}"), override) == [line]


@settings(max_examples=25)
@given(configs())
def test_a_dumped_config_loads_as_itself(config):
    for text in (dump_config(config), describe_config(config)):
        tree, problems = parse_yaml(text)
        assert not problems
        assert build_config(tree) == (config, [])


def test_a_dump_states_every_key_and_a_description_marks_the_differences(write):
    config = load_config(
        write("seed: 3\nmodel: {moe: {top_k: 1}}\nschedule: {name: wsd}\ndata: {sources: [{path: a, weight: 2}]}")
    )
    assert "#" not in dump_config(config)
    marked = {line.strip() for line in describe_config(config).splitlines() if "#" in line}
    assert marked == {
        "seed: 3 # default: 0",
        "moe: # default: null",
        "top_k: 1 # default: 2",
        "schedule: # default: {name: cosine}",
        "sources: # default: []",
        "weight: 2.0 # default: 1.0",
    }
    assert '"seed": 3' in config_to_json(config)


def test_infinity_never_reaches_a_config(write):
    config = load_config(write("optimizer: {lr: 1.7e308}"))
    assert math.isfinite(config.optimizer.lr)
