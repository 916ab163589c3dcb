"""Weights at step 0: a function of (seed, name) alone."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import modeling.init as module
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.decoder import Decoder, build_decoder
from modeling.init import Spread, draw, draw_box, initial_box, initial_tensor, materialize
from modeling.init_config import NormalInit, XavierInit
from modeling.logical import logical_tensors
from modeling.moe_config import MoEConfig
from small_models import example_config, tensors_of


def fresh(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    with torch.device("meta"):
        model = build_decoder(config)
    materialize(model, config, seed, "cpu", dtype)
    return model


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> set[str]:
    """Names of equal tensors."""
    return {name for name in first if name in second and torch.equal(first[name], second[name])}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_do_not_depend_on_torch_seed(family: FamilyName) -> None:
    config = example_config(family)
    torch.manual_seed(0)
    first = tensors_of(fresh(config, 7))
    torch.manual_seed(1)
    assert same(first, tensors_of(fresh(config, 7))) == first.keys()


def test_another_seed_changes_every_drawn_tensor() -> None:
    config = example_config("glm4_moe")
    equal = same(tensors_of(fresh(config, 0)), tensors_of(fresh(config, 1)))
    assert all(name.endswith(("norm.weight", "bias")) for name in equal)


def test_names_differ_in_values() -> None:
    """No two tensors of one shape are equal, within a layer or across layers."""
    tensors = [t for t in tensors_of(fresh(example_config("qwen3_moe", n_layers=3), 0)).values() if t.std() > 0]
    parts = [part for tensor in tensors for part in (tensor if tensor.ndim == 3 else [tensor])]
    for number, part in enumerate(parts):
        assert not any(part.shape == other.shape and torch.equal(part, other) for other in parts[:number])


def test_an_expert_does_not_depend_on_the_others() -> None:
    """Six experts or four: the first four are the same, so ep may cut the stack anywhere."""
    config = example_config("mixtral")
    assert config.moe is not None
    six = tensors_of(fresh(config, 0))
    four = tensors_of(fresh(replace(config, moe=replace(config.moe, n_experts=4)), 0))
    for name in four:
        if ".experts." in name:
            assert torch.equal(six[name][:4], four[name])


def test_other_tensors_do_not_depend_on_the_experts() -> None:
    config = example_config("qwen3_moe")
    assert config.moe is not None
    wide = tensors_of(fresh(replace(config, moe=replace(config.moe, n_experts=9, d_ff=48)), 0))
    assert same(tensors_of(fresh(config, 0)), wide) == {
        name for name in wide if ".experts." not in name and "router" not in name
    }


def test_tied_weights_are_one_parameter() -> None:
    model = fresh(example_config("llama", tie_embeddings=True), 0)
    assert model.head.weight is model.embed.weight
    untied = fresh(example_config("llama"), 0)
    assert not torch.equal(untied.head.weight, untied.embed.weight)
    assert torch.equal(untied.embed.weight, model.embed.weight)


def test_spread() -> None:
    """Normal with init_std, and smaller where a matrix writes to the residual stream."""
    config = replace(ModelConfig(moe=MoEConfig()), init_std=0.02, n_layers=8)
    q = initial_tensor(config, 0, "layers.0.attention.q.weight", (400, 400))
    o = initial_tensor(config, 0, "layers.0.attention.o.weight", (400, 400))
    down = initial_tensor(config, 0, "layers.0.feed_forward.experts.down", (4, 200, 200))
    assert float(q.std()) == pytest.approx(0.02, rel=0.01)
    assert float(q.mean()) == pytest.approx(0.0, abs=2e-4)
    assert float(o.std()) == pytest.approx(0.005, rel=0.01)
    assert float(down.std()) == pytest.approx(0.005, rel=0.01)


def test_half_precision_is_the_rounded_fp32() -> None:
    config = example_config("glm4_moe")
    half, full = tensors_of(fresh(config, 0, torch.bfloat16)), tensors_of(fresh(config, 0))
    for name, tensor in half.items():
        assert tensor.dtype == (torch.float32 if name.endswith("router.bias") else torch.bfloat16)
        assert torch.equal(tensor, full[name].to(tensor.dtype))


def test_values_stay_what_they_are() -> None:
    """A change here would give every seed another model."""
    q = initial_tensor(ModelConfig(), 0, "layers.0.attention.q.weight", (2, 2))
    expected = [[-0.007500820327550173, 0.020525304600596428], [0.011436904780566692, 0.019702883437275887]]
    torch.testing.assert_close(q, torch.tensor(expected), rtol=0.0, atol=1e-7)


BOXES = {
    "embed.weight": (0, 0),
    "layers.1.feed_forward.experts.gate": (2, 3, 0),
    "layers.1.feed_forward.experts.down": (5, 0, 7),
    "layers.1.attention.o.weight": (3, 5),
    "final_norm.weight": (2,),
}


@pytest.mark.parametrize("init", [NormalInit(), XavierInit(distribution="uniform")], ids=["normal", "uniform"])
@pytest.mark.parametrize("name", BOXES)
def test_a_box_has_the_values_of_the_whole(name, init, monkeypatch) -> None:
    """Whatever blocks a matrix is drawn in, and however many elements are left for the last one."""
    config = replace(example_config("qwen3_moe", n_layers=2), init=init)
    shape, start = logical_tensors(config)[name].shape, BOXES[name]
    whole = initial_tensor(config, 3, name, shape)
    for numel in (1, 100, 1000, 10**6):
        monkeypatch.setattr(module, "BLOCK_NUMEL", numel)
        for size in (1, 2, None):
            part = tuple(n - low if size is None else min(size, n - low) for low, n in zip(start, shape, strict=True))
            found = initial_box(config, 3, name, start, part, shape)
            inside = tuple(slice(low, low + n) for low, n in zip(start, part, strict=True))
            assert torch.equal(found, whole[inside]), (numel, part)


@pytest.mark.parametrize("shape", [(5, 1), (16, 1), (17, 1), (31, 1), (33, 1), (35, 3), (48, 7), (21, 5, 3), (100,)])
@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_blocks_drawn_one_after_another_are_the_whole(shape, distribution, monkeypatch) -> None:
    spread = Spread(0.5, distribution)
    whole = draw(1, "a", shape, spread)
    monkeypatch.setattr(module, "BLOCK_NUMEL", 1)
    for first in range(shape[0]):
        start, part = (first, *(0,) * (len(shape) - 1)), (shape[0] - first, *shape[1:])
        if first:
            assert torch.equal(draw_box(1, "a", shape, spread, start, part), whole[first:])
        assert torch.equal(draw_box(1, "a", shape, spread, start, (1, *shape[1:])), whole[first : first + 1])


def test_planted_block_that_ends_within_a_vector_draws_other_values(monkeypatch) -> None:
    """What VECTOR is for: torch makes so many normal values together."""
    monkeypatch.setattr(module, "BLOCK_NUMEL", 1)
    monkeypatch.setattr(module, "VECTOR", 5)
    spread, shape = Spread(0.5), (60, 1)
    assert not torch.equal(draw_box(1, "a", shape, spread, (40, 0), (20, 1)), draw(1, "a", shape, spread)[40:])


HELD = """
import sys
from dataclasses import replace
from pathlib import Path
from modeling.config import ModelConfig
from modeling.moe_config import MoEConfig
from modeling.init import initial_box, initial_tensor
def kib(what):
    return int(Path("/proc/self/status").read_text().partition(what + ":")[2].split()[0])
config = replace(ModelConfig(n_layers=1, d_model=1024, moe=MoEConfig(n_experts=64, d_ff=512)))
name, shape = "layers.0.feed_forward.experts.gate", (64, 512, 1024)
initial_tensor(config, 0, "layers.0.attention.q.weight", (64, 64))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kib("VmRSS")
if sys.argv[1] == "held":
    initial_box(config, 0, name, (7, 0, 0), (2, 512, 1024), shape)
else:
    initial_tensor(config, 0, name, shape)
print((kib("VmHWM") - before) / 1024)
"""


def peak_mebibytes(which: str) -> float:
    """What a process of its own takes to draw what it is asked for."""
    command = [sys.executable, "-c", HELD, which]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process's peak")
def test_only_the_experts_of_a_box_are_drawn_and_held() -> None:
    """Two of 64 experts of 2 MiB each, where all of them are 128 MiB."""
    assert 4 <= peak_mebibytes("held") < 12
    assert peak_mebibytes("whole") >= 128
