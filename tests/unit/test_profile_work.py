"""What operations ask for, and the least time of it: nothing is free because nobody counted it."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from launcher.cli import main
from launcher.closed_form.again import again_of, core_flops, kind_of
from launcher.config.yaml_text import read_yaml_file
from launcher.errors import UserError
from launcher.trace.hardware import FOLDER, checked, known_hardware, read_hardware
from launcher.trace.ops import Op, Uncounted, Work, attention_flops, host_copy, work_of
from launcher.trace.parts import Axes
from launcher.trace.recorder import Recorder
from launcher.trace.regions import Regions
from launcher.trace.roofline import Rates, least_seconds
from launcher.watch.speed import listed_peak
from modeling.config import ModelConfig
from modeling.counts import active_elements, multiplied_by_layer
from modeling.dtypes import DTYPES
from modeling.logical import logical_tensors
from modeling.moe import Experts
from modeling.optimizers.muon import MuonConfig
from modeling.optimizers.orthogonal import orthogonal
from parallel.recompute import Recompute, apply_recompute
from small_models import Rows, build, example_config, packed_rows

RATES = Rates(
    name="a machine",
    products={"fp32": 100.0},
    grouped_products={"fp32": 50.0},
    attention_forward={"fp32": 40.0},
    attention_backward={"fp32": 20.0},
    bandwidth=10.0,
    launch_seconds=0.5,
    wires={"communication: tp": 2.0},
)


def op(**changes) -> Op:
    work = {"name": "mm", "kind": "product", "dtype": torch.float32, "bytes": 1, "flops": 0.0, **changes}
    return Op(Work(**work), "communication: tp", "forward")


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"flops": 1000.0}, (10.0, "compute")),
        ({"flops": 1000.0, "kind": "grouped product"}, (20.0, "compute")),
        ({"flops": 1000.0, "kind": "attention", "name": "_flash_attention_backward"}, (50.0, "compute")),
        ({"flops": 1000.0, "bytes": 200}, (20.0, "memory")),
        ({}, (0.5, "launches")),
        ({"kind": "wire", "collective": "all-reduce", "sent_bytes": 8.0}, (4.0, "wire")),
    ],
)
def test_the_longest_of_its_times_bounds_an_operation(changes, least):
    assert least_seconds(op(**changes), RATES) == least


@pytest.mark.parametrize("limits", [(-1, -1), (-1, 0), (3, 0), (0, -1), (5, -1), (4, 2), (None, None)])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (7, 7), (9, 4), (3, 12)])
def test_a_variable_length_kernel_multiplies_the_pairs_within_its_limits(limits, n_queries, n_keys):
    """Counted one by one, from the diagonal that ends at the last query and the last key."""
    left, right = (99 if limit is None or limit < 0 else limit for limit in limits)
    ends = [i + n_keys - n_queries for i in range(n_queries)]
    pairs = sum(end - left <= j <= end + right for end in ends for j in range(n_keys))
    told = {"max_q": n_queries, "max_k": n_keys, "is_causal": limits == (-1, 0)}
    named = {"window_size_left": limits[0], "window_size_right": limits[1]}
    query, key = torch.empty(n_queries, 4, 8), torch.empty(n_keys, 2, 8)
    for options in (named, {"window_size": list(limits)}):
        flops = attention_flops("_flash_attention_forward", [query, key, key], told | options)
        assert flops == pytest.approx(pairs * 2 * 4 * (8 + 8))


def test_planted_operation_without_a_rate_raises():
    with pytest.raises(UserError, match="no rate for mm in fp16; it has fp32"):
        least_seconds(op(flops=1.0, dtype=torch.float16), RATES)
    wire = Op(Work("send", "wire", None, 1, 0, 1.0, "send"), "communication: cp", "forward")
    with pytest.raises(UserError, match="no rate for communication: cp"):
        least_seconds(wire, RATES)


def test_planted_operation_that_nobody_counts_raises():
    with pytest.raises(Uncounted, match="aten::convolution"), Recorder(Regions(), Axes()):
        torch.nn.functional.conv1d(torch.ones(1, 1, 8), torch.ones(1, 1, 3))
    product = torch.library.custom_op(
        "elsewhere::product", lambda x: x @ x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    with pytest.raises(Uncounted, match="elsewhere::product"), Recorder(Regions(), Axes()):
        product(torch.ones(2, 2))


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (3, 16, 16)], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_product_of_a_matrix_with_itself_counts(shape, dtype):
    """As Muon's are: A A + A, whose three factors and terms are one tensor, which is read once."""
    with Recorder(Regions(), Axes()) as recorder:
        orthogonal(torch.randn(shape), DTYPES[dtype])
    products = [each.work for each in recorder.ops if each.work.kind == "product"]
    told = MuonConfig(iteration_dtype=dtype).matrix_work(*shape[-2:])
    matrices = math.prod(shape[:-2])
    assert sum(each.flops for each in products) == matrices * told.flops
    assert {each.dtype for each in products} == {DTYPES[dtype]}
    size, square = math.prod(shape), matrices * min(shape[-2:]) ** 2
    assert {each.bytes // DTYPES[dtype].itemsize for each in products} <= {2 * size + square, 2 * square, 3 * size}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_operation_finds_its_part_forward_and_backward(recompute):
    """Product FLOPs by part and phase are what the weights' shapes say: twice a multiplication, twice that backward."""
    config = example_config("llama")
    model, rows = build(config, 0), packed_rows(config.vocab_size, 0, [[20]])
    apply_recompute(model, recompute)
    regions = Regions()
    with regions.of(model), Recorder(regions, Axes()) as recorder:
        model(rows.tokens_BS, rows.context(), rows.tokens_BS).loss.backward()
    flops: dict[tuple[str, str], float] = {}
    for each in recorder.ops:
        if each.work.kind == "product":
            flops[each.part, each.phase] = flops.get((each.part, each.phase), 0) + each.work.flops
    layers = 2 * rows.tokens_BS.numel() * sum(multiplied_by_layer(config))
    halves = ("attention: products", "feed-forward: products")
    assert sum(flops.get((half, "forward"), 0) for half in halves) == layers
    assert sum(flops.get((half, "backward"), 0) for half in halves) == 2 * layers
    assert flops["head and loss", "forward"] == 3 * 2 * rows.tokens_BS.numel() * config.vocab_size * config.d_model
    again = sum(flops.get((half, "recompute"), 0) for half in halves)
    assert (again > 0) == (recompute == "full")
    assert not any(model_hooks(module) for module in model.modules())


def product_flops(config: ModelConfig, mode: Recompute, rows: Rows) -> float:
    """Of both passes, without attention's core and the experts, whose rows are filled up."""
    model = build(config, 0)
    apply_recompute(model, mode)
    regions = Regions()
    with regions.of(model), Recorder(regions, Axes()) as recorder:
        model(rows.tokens_BS, rows.context(), rows.tokens_BS).loss.backward()
    products = [each for each in recorder.ops if each.work.kind == "product" and each.part != "experts: products"]
    return sum(each.work.flops for each in products)


@pytest.mark.parametrize("mode", ["selective", "feed_forward", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm4_moe"])
def test_what_is_computed_again_is_what_the_forms_say(family, mode, monkeypatch):
    """To the last multiplication; values that a bias was added to are kept, which the forms leave out.

    The forms are of GPUs, where experts do not go one after another.
    """
    monkeypatch.setattr(Experts, "go_by_turn", lambda *_: False)
    config = dataclasses.replace(example_config(family), qkv_bias=False, o_bias=False)
    rows = packed_rows(config.vocab_size, 0, [[20]])
    tokens, expected = rows.tokens_BS.numel(), 0.0
    for layer in range(config.n_layers):
        kind = kind_of(config, layer)
        form = again_of(config, kind, mode, tokens, exchanges=False, weights_stay=True).flops
        form -= core_flops(config, tokens, kind[1]) if mode == "full" else 0.0
        tensors = [each for each in logical_tensors(config).values() if each.layer == layer and each.is_expert]
        form -= sum(2 * active_elements(config, each) for each in tensors) if mode != "selective" else 0.0
        expected += tokens * form
    assert product_flops(config, mode, rows) - product_flops(config, "none", rows) == expected > 0


def model_hooks(module: torch.nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def test_memory_counts_each_storage_from_its_making_to_its_end():
    before = torch.zeros(1000, dtype=torch.uint8)
    recorder = Recorder(Regions(), Axes(), held={"weights": [before, before.view(10, 100)]})
    with recorder:
        made = before + 1
        twice = made + 1
        del made
        assert twice.view(-1).sum() == 2000
    memory = recorder.finish()
    assert memory.held[0]["weights"] == 1000
    assert memory.at_peak["activations"] >= 2000
    assert memory.held[-1]["activations"] < 1100


def test_memory_that_turns_out_to_be_weights_is_told_as_weights_until_it_goes():
    recorder = Recorder(Regions(), Axes(), held={"weights": []})
    with recorder:
        made = torch.zeros(999, dtype=torch.uint8) + 1
        recorder.sort({"weights": [made.view(9, 111)]})
        rest = torch.ones(1, dtype=torch.uint8)
        del made
        rest += 1
    held = recorder.finish().held
    assert max(now["weights"] for now in held) == 999 and held[-1]["weights"] == 0
    assert all(now[holder] >= 0 for now in held for holder in now)


def test_each_gpu_s_file_has_a_source_and_the_peaks_that_mfu_is_told_by():
    assert {"A100-40GB", "A100-80GB", "B200", "GB200", "H100", "H200", "H800", "MI300X"} <= set(known_hardware())
    for name in known_hardware():
        hardware = read_hardware(name.lower())
        assert "atasheet" in (FOLDER / f"{name}.yaml").read_text()
        for dtype, flops in hardware.peak_flops.items():
            assert flops == listed_peak(hardware.torch_name, dtype)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"family": "hoper"},
            "GPU: family=hoper must be one of ampere, hopper, blackwell, cdna, whose shares of peaks",
        ),
        ({"also": "H20"}, "GPU: also=H20 must be a list of names; try [H20]"),
        (
            {"low_precision_flops": 2e15},
            "GPU: low_precision_flops=2000000000000000.0 must be rates by format; try {fp8:",
        ),
        ({"peak_flops": {"fp16": 1e15}}, "GPU: peak_flops.bf16=None must be a number above 0"),
        ({"peak_flops": {"bf16": 0}}, "GPU: peak_flops.bf16=0 must be a number above 0"),
        ({"memory_bytes_per_second": -1.0}, "GPU: memory_bytes_per_second=-1.0 must be a number above 0"),
    ],
)
def test_a_gpu_s_file_says_nothing_that_would_not_count(change, told):
    tree = read_yaml_file(FOLDER / "H100.yaml")
    with pytest.raises(UserError) as refused:
        checked("mine", {**tree, **change}, "GPU")
    (problem,) = refused.value.problems
    assert problem.startswith(told)


CONFIG = "name: small\nmodel: {n_layers: 2}\ndata: {sources: [{path: none.txt}]}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "0"], "--steps=0 --warmup=2: --steps must be at least 1"),
        (["--warmup", "-1"], "--steps=3 --warmup=-1"),
        (["--as", "H200", "--ranks", "2"], "--as=H200 starts no processes, and --ranks=2 asks for some"),
        (["--as", "H2000"], "--as=H2000 must be one of A100-40GB, A100-80GB, B200, B300, GB200, GB300"),
        (["--as", "gpu.yaml"], "efficiency.memory=2 must be at most 1"),
        (["--as", "none.yaml"], "--as=none.yaml must be a YAML file that is there"),
        (["--out", "full"], "--out=full must be a new folder or an empty one, and holds files"),
        (["--out", "c.yaml"], "--out=c.yaml must be a folder that can be written to"),
        (["parallel.tp=3"], "parallel.tp=3"),
        (["--ranks", "3", "parallel.tp=2"], "parallel.tp=2"),
    ],
)
def test_refusals_are_one_line_and_change_nothing(tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "c.yaml").write_text(CONFIG)
    text = (FOLDER / "H200.yaml").read_text()
    (tmp_path / "gpu.yaml").write_text(text.replace("memory: 0.76", "memory: 2"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert main(["profile", "c.yaml", *arguments]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_compiler_an_estimate_says_so(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where no compiled device lies
    assert main(["profile", "c.yaml", "--as", "H200", "--json"]) == 2
    captured = capfd.readouterr()
    assert "--as=H200 needs a device to trace on" in captured.err and len(captured.err.splitlines()) == 1
    assert json.dumps(captured.out) == '""'


def test_a_copy_between_a_device_and_the_host_is_no_kernels_work():
    copy, here, there = torch.ops.aten.copy_.default, torch.empty(8), torch.empty(8, device="meta")
    for target, source in ((here, there), (there, here)):
        assert host_copy(copy, (target, source)) == 32
        assert work_of(copy, (target, source), {}, target) is None
    assert host_copy(copy, (here, here.clone())) == 0
    assert work_of(copy, (here, here.clone()), {}, here) is not None
