"""What the benchmarks on a CPU make of their measurements, and in which precision they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cpu_precision
import cpu_set
import linear_step_speed
import moe_layer
import sides
import step_speed
import zero_step_speed
from sides import Side, present, summary

BENCHMARKS = Path(sides.__file__).parent
SIDES = (
    Side(name="ours", beside=None),
    Side(name="eager"),
    Side(name="smaller"),
    Side(name="compiled", compiled=True),
    Side(name="ours_whole_rows", beside=None),
    Side(name="whole_rows", beside="ours_whole_rows", package="torch"),
    Side(name="halves", precisions=("bf16",)),
    Side(name="absent", package="no-such-package"),
)


@pytest.mark.parametrize(("speed", "chosen"), [(0.012, "fp32"), (0.999, "fp32"), (1.0, "bf16"), (16.0, "bf16")])
def test_auto_takes_what_the_processor_multiplies_faster(speed, chosen, monkeypatch):
    monkeypatch.setattr(cpu_precision, "narrow_cost", lambda: 1 / speed)
    assert cpu_precision.choose_precision("auto") == {"precision": chosen, "bf16_speed": speed}


def test_what_is_asked_for_is_not_measured(monkeypatch):
    monkeypatch.setattr(cpu_precision, "narrow_cost", pytest.fail)
    for asked in ("fp32", "bf16"):
        assert cpu_precision.choose_precision(asked) == {"precision": asked}


def test_both_precisions_are_measured():
    assert cpu_precision.narrow_cost() > 0


def test_sides_are_there_by_precision_and_package():
    there, told = present(SIDES, "fp32")
    assert [side.name for side in there] == [side.name for side in SIDES[:6]]
    assert told == {"absent": "not installed"}
    there, _ = present(SIDES, "bf16")
    assert "halves" in [side.name for side in there]


def test_ours_is_measured_for_peers_that_are_there():
    without = [side for side in SIDES if side.name != "whole_rows"]
    assert "ours_whole_rows" not in [side.name for side in present(without, "fp32")[0]]


def test_ratios_are_beside_the_best_peer_of_a_kind():
    found = {
        "ours": rounds(100.0, 1.0),
        "eager": rounds(50.0, 4.0),
        "smaller": rounds(40.0, 2.0),
        "compiled": rounds(80.0, 1.25),
        "ours_whole_rows": rounds(90.0, 1.5),
        "whole_rows": rounds(30.0, 6.0),
    }
    line = summary(SIDES, found)
    assert line["ours"] == {"tokens_a_cpu_second": 100.0, "peak_gb": 1.0}
    assert line["eager"] == {"tokens_a_cpu_second": 50.0, "peak_gb": 4.0, "ratio": 2.0, "peak_ratio": 0.25}
    assert line["whole_rows"] == {"tokens_a_cpu_second": 30.0, "peak_gb": 6.0, "ratio": 3.0, "peak_ratio": 0.25}
    assert (line["ratio"], line["peak_ratio"]) == (2.0, 0.5)
    assert (line["compiled_ratio"], line["compiled_peak_ratio"]) == (1.25, 0.8)


def rounds(speed: float, peak: float) -> list[sides.Figures]:
    """Three, whose medians are the two."""
    return [{"tokens_a_cpu_second": speed * each, "peak_gb": peak * each} for each in (1.0, 0.5, 2.0)]


def test_all_sides_run_in_the_chosen_precision_and_one_that_fails_is_told(monkeypatch, capsys):
    commands = []

    def run(command, **_):
        commands.append(command)
        failed = command[-1] == "whole_rows"
        stderr = "Traceback\nModuleNotFoundError: No module named 'triton'\n"
        answer = json.dumps({"tokens_a_cpu_second": 1.0, "peak_gb": 1.0})
        return subprocess.CompletedProcess(command, int(failed), "" if failed else f"noise\n{answer}\n", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(cpu_precision, "narrow_cost", lambda: 2.0)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--rounds", "2", "--steps", "1"])
    sides.compare("name", "script.py", None, SIDES, pytest.fail)
    line = json.loads(capsys.readouterr().out)
    assert (line["precision"], line["bf16_speed"], line["ratio"]) == ("fp32", 0.5, 1.0)
    assert line["absent"] == "not installed"
    assert line["whole_rows"] == "does not run: ModuleNotFoundError: No module named 'triton'"
    assert all(command[2:6] == ["--steps", "1", "--precision", "fp32"] for command in commands)
    told = [command[-1] for command in commands]
    assert told == [side.name for side in SIDES[:6]] + [side.name for side in SIDES[:5]]


def test_a_side_that_needs_no_package_must_run(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "boom\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: failed)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--precision", "fp32"])
    with pytest.raises(SystemExit, match="ours failed:\nboom"):
        sides.compare("name", "script.py", None, SIDES, pytest.fail)


@pytest.mark.parametrize("benchmark", [step_speed, zero_step_speed])
def test_each_peer_is_beside_a_side_of_ours(benchmark):
    ours = {side.name for side in benchmark.SIDES if side.beside is None}
    assert {side.beside for side in benchmark.SIDES} - {None} <= ours


SMALL = """
import json, sys
from dataclasses import replace
import linear_step_speed, step_speed, zero_step_speed
small = dict(vocab_size=64, d_model=32, n_layers=2, n_heads=2, n_kv_heads=1, d_head=16, d_ff=32)
for benchmark in (linear_step_speed, step_speed, zero_step_speed):
    moe = replace(benchmark.CONFIG.moe, n_experts=4, top_k=2, d_ff=16)
    if benchmark is linear_step_speed:
        linear = replace(benchmark.CONFIG.linear_attention, n_k_heads=1, n_v_heads=2, d_k=16, d_v=16)
        moe, small_too = replace(moe, shared_d_ff=16), dict(linear_attention=linear, full_attention_layers=(1,))
        benchmark.CONFIG = replace(benchmark.CONFIG, **small, **small_too, moe=moe)
    else:
        benchmark.CONFIG = replace(benchmark.CONFIG, **small, moe=moe)
step_speed.BATCH = zero_step_speed.BATCH = 2
step_speed.SEQ_LEN = zero_step_speed.SEQ_LEN = 32
step_speed.LENGTHS = (4, 20)
name, *sides = sys.argv[1:]
for side in sides:
    print(json.dumps(sys.modules[name].measure(side, 1, "bf16")), flush=True)
"""


RUN = (
    (step_speed, ("ours", "transformers", "transformers_autocast", "ours_whole_rows")),
    (linear_step_speed, ("ours", "transformers")),
    (zero_step_speed, ("ours",)),  # each opens a process group
    (zero_step_speed, ("transformers",)),
    (zero_step_speed, ("transformers_fp32_sums",)),
)


@pytest.mark.parametrize(("benchmark", "sides"), RUN, ids=[f"{run.__name__} {'+'.join(sides)}" for run, sides in RUN])
def test_sides_run(benchmark, sides, monkeypatch):
    """Small: each prints what it measured."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)]))
    done = subprocess.run(
        [sys.executable, "-c", SMALL, benchmark.__name__, *sides], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(sides) and all(each["tokens_a_cpu_second"] > 0 for each in found)


def test_all_sides_are_run_that_need_no_package_and_no_compiler():
    for benchmark in (step_speed, linear_step_speed, zero_step_speed):
        run = [side for each, sides in RUN if each is benchmark for side in sides]
        assert run == [side.name for side in benchmark.SIDES if not side.package and not side.compiled]


def test_a_row_is_one_document_where_it_has_to_be():
    tokens_BS, targets_BS, positions_BS, documents_BS = step_speed.batch(1, whole_rows=True)
    assert documents_BS.shape == tokens_BS.shape and not documents_BS.any()
    assert torch.equal(positions_BS, torch.arange(step_speed.SEQ_LEN).expand_as(tokens_BS))
    packed = step_speed.batch(1)
    assert torch.equal(packed[0], tokens_BS) and torch.equal(packed[1], targets_BS) and packed[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_has_the_precision(dtype):
    for kind in moe_layer.KINDS:
        layer, _ = moe_layer.build("64 x 64", kind, dtype)
        assert {weight.dtype for weight in layer.parameters()} == {dtype}


TURNS = """
import sys
from sides import takes_turns
turns = iter(range(int(sys.argv[-1])))
takes_turns(lambda: 10 * len(sys.argv[2]) + next(turns))
"""


def test_sides_that_wait_are_measured_when_their_turn_comes(tmp_path, monkeypatch):
    """Each process goes on where it was; the first figure, of its warm-up, is nobody's."""
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    script = tmp_path / "script.py"
    script.write_text(TURNS)
    with sides.waiting(str(script), [("a", "b"), ("abc", "d")], ["4"]) as measured:
        told = [measured(side) for side in [("a", "b"), ("abc", "d"), ("a", "b")]]
    assert told == [11, 31, 12]
    both = sides.in_turn(str(script), [("a", "b"), ("abc", "d")], ["4"], starts=2, turns=3)
    assert both == {("a", "b"): [11, 12, 13] * 2, ("abc", "d"): [31, 32, 33] * 2}


def test_planted_a_side_that_ends_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    script = tmp_path / "script.py"
    script.write_text(TURNS)
    with sides.waiting(str(script), [("a", "b")], ["2"]) as measured, pytest.raises(SystemExit, match="a b failed"):
        assert [measured(("a", "b")) for _ in range(2)] == [11]


@pytest.mark.parametrize(("precision", "fewer"), [("bf16", False), ("fp32", True)])
def test_the_set_hands_the_precision_on(monkeypatch, capsys, precision, fewer):
    commands = []

    def run(command, **_):
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 0, "{}\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["cpu_set", "--precision", precision])
    cpu_set.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["precision"] == precision
    assert len(commands) == len(cpu_set.SET)
    assert all(arguments[-2:] == ["--precision", precision] for _, *arguments in commands)
    of_modes = next(arguments for script, *arguments in commands if script.endswith("recomputation.py"))
    assert ("--turns" in of_modes) is fewer
