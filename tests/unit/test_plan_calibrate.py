"""`plan --calibrate`: what a run's rows correct, where that is kept, what is refused. The rows are written by hand."""

import json
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.config.checked import load_checked
from launcher.config.dump import dump_config
from launcher.plan import calibrate
from launcher.plan.corrections import corrected, corrections_file, factors_for, read_corrections
from launcher.plan.quick import quick_plan, room_on
from launcher.trace.hardware import read_hardware

CONFIG = "configs/quickstart.yaml"
H100 = "NVIDIA H100 80GB HBM3"
GIB = 2**30


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """A home of its own, and traces that fail: a process for each would take minutes (the slow test has one)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(calibrate, "ask", lambda *request, **options: None)
    return tmp_path / "home"


def write_run(folder: Path, *, seconds: float = 0.5, peak_gib: float = 1.5, steps: int = 30, **start) -> Path:
    """A run as `train` leaves it, of two processes on an H100, with slow first steps and one wait for samples."""
    config = load_checked(Path(CONFIG), [], world_size=2, data=False)
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    event = {"step": 0, "event": "start", "ranks": 2, "device": H100, "cuda": "12.8", **start}
    rows = [
        {"step": step, "tokens": step, "loss": 1.0, "peak_gib": peak_gib, "loader_wait_seconds": 0.25}
        | {"step_seconds": 60.0 if step <= 3 else seconds + 0.25}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [event, *rows]))
    return folder


def plan_of(hardware: str = "H100") -> dict:
    config = load_checked(Path(CONFIG), [], world_size=2, data=False)
    found = read_hardware(hardware)
    return quick_plan(config, 2, found, room_on(found))


def test_a_run_corrects_later_plans_on_its_hardware_until_it_is_forgotten(tmp_path, capsys, home):
    before, other = plan_of(), plan_of("H200")
    run = write_run(tmp_path / "run")
    assert main(["plan", "--calibrate", str(run), "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert (kept["hardware"], kept["gpus"], kept["kind"], kept["steps"]) == ("H100", 2, "MoE", 25)
    assert kept["measured"] == {"step_seconds": 0.5, "tensor_bytes": 1.5 * GIB}
    assert corrections_file() == home / "roundtable" / "calibrations.yaml"
    after = plan_of()
    assert after["step_seconds"] == pytest.approx(0.5)
    assert after["tensor_bytes"] == pytest.approx(1.5 * GIB)
    assert after["peak_bytes"] - before["peak_bytes"] == pytest.approx(
        room_on(read_hardware("H100")).reserved * (after["tensor_bytes"] - before["tensor_bytes"])
    )
    (origin,) = after["corrected_by"]
    assert kept["name"] in origin and kept["config_sha256"] in origin and "2 H100" in origin and kept["date"] in origin
    assert plan_of("H200") == other
    assert not factors_for("H100", "dense", "closed_forms") and not factors_for("H100", "MoE", "traced")
    assert main(["plan", "--calibrations"]) == 0
    assert kept["name"] in capsys.readouterr().out
    assert main(["plan", CONFIG, "--search", "--gpus", "2", "--traces", "0"]) == 0
    assert f"corrected by {kept['name']}" in capsys.readouterr().out
    assert main(["plan", "--forget", kept["name"]]) == 0 and read_corrections() == []
    assert plan_of() == before


def test_runs_are_averaged_and_a_run_again_takes_its_own_place(tmp_path):
    plain = plan_of()["step_seconds"]
    for name, seconds in (("one", 0.5), ("two", 0.5)):
        assert main(["plan", "--calibrate", str(write_run(tmp_path / name, seconds=seconds))]) == 0
    assert len(read_corrections()) == 1  # one config
    text = corrections_file().read_text()
    assert main(["plan", "--calibrate", str(tmp_path / "one")]) == 0
    assert corrections_file().read_text() == text.replace(str(tmp_path / "two"), str(tmp_path / "one"))
    assert factors_for("H100", "MoE", "closed_forms").step == pytest.approx(0.5 / plain)


def test_on_a_cpu_time_alone_is_corrected(tmp_path, capsys):
    text = (Path("configs/hardware") / "H100.yaml").read_text().replace(H100, "Some CPU")
    (tmp_path / "cpu.yaml").write_text(text)
    run = write_run(tmp_path / "run", device="Some CPU", cuda=None)
    assert main(["plan", "--calibrate", str(run), "--gpu", str(tmp_path / "cpu.yaml")]) == 0
    said = capsys.readouterr()
    assert "memory is not corrected" in said.err and "could not be traced" in said.err
    (kept,) = read_corrections()
    assert kept.hardware == "cpu" and kept.measured.keys() == {"step_seconds"}


def test_what_follows_from_a_traced_plan_is_corrected_with_it(tmp_path, monkeypatch):
    traced = {"step_seconds": 0.25, "positions": [{"peak_bytes": GIB}]}
    monkeypatch.setattr(calibrate, "ask", lambda *request, **options: traced)
    assert main(["plan", "--calibrate", str(write_run(tmp_path / "run"))]) == 0
    factors = factors_for("H100", "MoE", "traced")
    assert (factors.step, factors.memory) == (pytest.approx(2.0), pytest.approx(1.5))
    plan = {"step_seconds": 1.0, "peak_bytes": 10, "memory_bytes": 14, "fits": True, "hours": 3.0, "gpu_hours": 6.0}
    plan |= {"energy_kwh": None, "cost": 12.0, "tokens_per_second": 8.0, "mfu": 0.4}
    found = corrected(plan, factors)
    assert (found["step_seconds"], found["hours"], found["cost"]) == (2.0, 6.0, 24.0)
    assert (found["tokens_per_second"], found["mfu"], found["energy_kwh"]) == (4.0, 0.2, None)
    assert found["peak_bytes"] == 15 and not found["fits"] and found["corrections"]["before"]["fits"]


def test_planted_a_mean_with_the_first_steps_would_be_off(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", steps=28)
    monkeypatch.setattr(calibrate, "WARM", 0)
    monkeypatch.setattr(calibrate.np, "median", calibrate.np.mean)
    found, _ = calibrate.measure_run(run, None)
    assert found.measured["step_seconds"] > 5


@pytest.mark.parametrize(
    ("run", "arguments", "line"),
    [
        ({"steps": 24}, [], "must have at least 20 steps after the first 5 of its last start, and has 19; train it"),
        ({"step": 20}, [], "must have at least 20 steps after the first 5 of its last start, and has 5"),
        ({}, ["--gpu", "H200"], "--gpu=H200 must be what RUN ran on, 'NVIDIA H100 80GB HBM3', and its torch_name is"),
        ({}, ["--gpu", "H9"], "--gpu=H9 must be one of A100-40GB"),
        ({"device": "AMD EPYC"}, [], "ran on 'AMD EPYC', of which there is no file in configs/hardware"),
        ({"ranks": None}, [], "must be a run that has trained, with its config.yaml and metrics.jsonl"),
    ],
)
def test_what_says_too_little_or_is_of_another_gpu_is_refused(tmp_path, capsys, home, run, arguments, line):
    path = write_run(tmp_path / "run", **run)
    assert main(["plan", "--calibrate", str(path), *arguments]) == 2
    said = capsys.readouterr()
    assert line.replace("RUN", str(path)) in said.err and said.err.count("\n") == 1 and not said.out
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--calibrate", "nowhere"], "RUN=nowhere must be a run directory"),
        (["--forget", "nothing"], "--forget=nothing must name a calibration; there are: none"),
        ([CONFIG, "--calibrations"], "--calibrations and configs/quickstart.yaml do not go together"),
        (["--calibrations", "--forget", "a"], "--calibrations and --forget do not go together"),
        ([CONFIG, "--rows", "file"], "--rows and configs/quickstart.yaml do not go together"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(capsys, arguments, line):
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(line) and said.err.count("\n") == 1 and not said.out


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("gpus: 2", "gpus: two"),
        lambda text: text.replace("step_seconds: 0.5", "step_seconds: -1"),
        lambda text: text.replace("kind: MoE", "kind: none"),
        lambda text: "calibrations: 3\n",
        lambda text: "[]\n",
        lambda text: text.replace("name:", "nome:"),
    ],
)
def test_a_damaged_file_is_named_by_every_command_that_reads_it(tmp_path, capsys, damage):
    assert main(["plan", "--calibrate", str(write_run(tmp_path / "run"))]) == 0
    text = corrections_file().read_text()
    assert damage(text) != text
    corrections_file().write_text(damage(text))
    capsys.readouterr()
    for arguments in (["--calibrations"], [CONFIG, "--search", "--gpus", "2", "--traces", "0"]):
        assert main(["plan", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"{corrections_file()}") and said.count("\n") == 1
