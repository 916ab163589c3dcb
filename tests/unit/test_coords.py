"""The coordinate check: flat under muP, growing under the standard, and it sees where muP is not right."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.load import load_config
from launcher.coords.judge import STEEPEST, faults, slopes_of
from launcher.coords.measure import PARAMETRIZATIONS, measure, small_relative, widened
from launcher.prove import reference
from modeling.config import ModelConfig
from modeling.linear_attention_config import LinearAttentionConfig
from modeling.mup import widths_of
from modeling.optimizers.config import AdamWConfig, MuonConfig, OptimizerConfig, SGDConfig
from rotating import some_fast

MODELS = Path(__file__).parents[2] / "configs/models"
TIMES = (1, 2, 4)
STEPS = 3
ADAMW, SGD, MUON = AdamWConfig(lr=1e-2), SGDConfig(lr=0.1), MuonConfig(lr=3e-3)


@functools.cache
def slopes(name: str, rule: OptimizerConfig = ADAMW, fault: str = ""):
    small = small_relative(load_config(MODELS / f"{name}.yaml", ["model.tie_embeddings=false"]))
    measured = {}
    for each in PARAMETRIZATIONS[: 1 if fault else 2]:
        models = [widened(small, times * small.d_model, small.d_model, each) for times in TIMES]
        measured[each] = measure(models, rule, steps=STEPS, seq_len=16, seed=0)
    return slopes_of(measured)


# Rotary positions; LayerNorm and biases; experts; latent attention, shared experts; their gate; norms of outputs.
CASES = [
    ("llama-3-8b", ADAMW),
    ("llama-3-8b", SGD),
    ("llama-3-8b", MUON),
    ("gpt2", ADAMW),
    ("qwen3-30b-a3b", ADAMW),
    ("qwen3-30b-a3b", SGD),
    ("deepseek-v2-lite", ADAMW),
    ("qwen1-5-moe-a2-7b", ADAMW),
    ("olmo-2-1124-7b", ADAMW),
]


def test_heads_of_linear_attention_grow_with_the_width():
    linear = LinearAttentionConfig(n_k_heads=2, n_v_heads=4, d_k=8, d_v=16)
    small = ModelConfig(family="none", d_model=32, n_heads=2, n_kv_heads=2, linear_attention=linear)
    wide = widened(small, 96, 32, "mup").linear_attention
    assert wide == replace(linear, n_k_heads=6, n_v_heads=12)


@pytest.mark.parametrize("case", some_fast(CASES, CASES[0]), ids=str)
def test_sizes_are_flat_under_mup_and_grow_without_it(case):
    found = slopes(*case)
    assert [*faults(found)] == []
    assert all(power > STEEPEST for power in found["standard"]["logits"].values()), found["standard"]
    assert [*faults({"mup": found["standard"]})] != []


@pytest.mark.parametrize("name", some_fast(["llama-3-8b", "qwen3-30b-a3b"], "llama-3-8b"))
def test_planted_rates_that_do_not_go_by_the_width_are_seen(monkeypatch, name):
    monkeypatch.setattr(reference, "widths_of", lambda config: {})
    found = slopes(name, fault="rates")
    assert found["mup"]["logits"]["changes"] > STEEPEST
    assert any(line.startswith("logits: changes grow with width to the power +") for line in faults(found))


@pytest.mark.slow
def test_planted_rates_that_go_by_half_of_the_dims_are_seen(monkeypatch):
    """Feed-forward layers' own width is forgotten: their second matrix learns too fast."""
    monkeypatch.setattr(
        reference, "widths_of", lambda config: {**widths_of(config), "d_ff": 1.0, "heads": 1.0, "kv_heads": 1.0}
    )
    found = slopes("llama-3-8b", fault="half")
    assert any(line.startswith(("feed_forward", "attention")) for line in faults(found)), found


def config_of(folder: Path, **model: object) -> str:
    path = folder / "small.yaml"
    path.write_text(json.dumps({"name": "small", "model": {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, **model}}))
    return str(path)


@pytest.mark.parametrize("key", some_fast(["residual_dropout", "attention_dropout"], "residual_dropout"))
def test_the_command_draws_and_tells(tmp_path, capsys, key):
    """Of a config with dropout, which is left out: as published GPT-2 and Granite have it."""
    out = tmp_path / "coords.png"
    options = ["optimizer.lr=3e-3", f"model.{key}=0.1", "--widths", "32,64,128", "--steps", "2"]
    arguments = ["coords", config_of(tmp_path), str(out), *options]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert told["widths"] == [32, 64, 128] and told["flat"] is True and told["problems"] == []
    assert len(told["mup"]["attention"]["sizes"]) == 3 and len(told["standard"]["logits"]["changes"][2]) == 3
    assert told["mup"]["logits"]["sizes"][0][0] == told["standard"]["logits"]["sizes"][0][0]  # the same at the base


@pytest.mark.parametrize(
    ("model", "arguments", "line"),
    [
        ({}, ["--widths", "32"], "--widths=32 must be two widths or more; try 128,256,512,1024"),
        ({}, ["--widths", "32,x"], "--widths=32,x must be whole numbers with commas between; try 128,256,512,1024"),
        ({}, ["--widths", "32,40"], "--widths=32,40 must be multiples of 32 (the model's heads, as"),
        ({"tie_embeddings": True}, [], "model.tie_embeddings=true is not possible under muP with model.family=llama,"),
        ({"n_kv_heads": 3}, [], "model.n_kv_heads=3 must divide model.n_heads=4"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_refused_in_a_line(tmp_path, capsys, model, arguments, line):
    out = tmp_path / "coords.png"
    assert main(["coords", config_of(tmp_path, **model), str(out), *arguments]) == 2
    assert line in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama-3-2-1b", ["model.tie_embeddings=true"]),
        ("gemma-3-1b", ["model.tie_embeddings=true", "model.family=gemma3_text"]),
        ("bloom-560m", ["model.tie_embeddings=true", "model.family=bloom"]),
    ],
)
def test_a_family_without_mup_is_refused_by_the_config_s_own_values(tmp_path, capsys, name, keys):
    """Not by those that the command itself would set; and the remedy helps."""
    arguments = ["coords", str(MODELS / f"{name}.yaml"), str(tmp_path / "coords.png"), "--widths", "64,128"]
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0] for line in lines] == keys
    assert all("model.family=none" in line for line in lines)
    assert main([*arguments, "--steps", "1", "model.family=none"]) == 0


def test_a_picture_of_no_kind_is_refused(tmp_path, capsys):
    assert main(["coords", config_of(tmp_path), str(tmp_path / "coords.txt")]) == 2
    assert "OUT=" in capsys.readouterr().err
