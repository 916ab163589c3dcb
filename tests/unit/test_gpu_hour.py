"""`make gpu` as far as a CPU can tell: its checks, its reports, what a crash or a hang costs, the page of figures."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import gpu_compare
import gpu_correctness
import gpu_device
import gpu_page
import gpu_ring
import gpu_turn
import gpu_wheels
import hour
import parallel.context_parallel.pieces as ring_pieces
import parallel.context_parallel.ring as ring
from gpu_part import PARTS, Check, Place
from gpu_report import Report, Skipped, from_root
from modeling.context import Context
from modeling.kernels.attention import attend
from modeling.kernels.experts import experts_grouped

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def place_at(folder: Path, report: Report | None = None) -> Place:
    return Place(CPU, True, folder, 1, report, "check")


def make_gpu(*variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["make", "--silent", "gpu", *variables],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
        env=environment,
        check=False,
    )


def written(out: Path, part: int) -> dict[str, Any]:
    return json.loads((out / f"part-{part}.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        "attention bf16: padding and window",
        "attention fp16: sinks and window",
        "attention bf16: window of one",
        "attention fp16: cap, sinks, window, padding, by pieces",
        "attention bf16: cap and slopes by pieces",
        "pieces fp16: window of earlier keys",
        "pieces bf16: single queries",
        "ring bf16: one query of a document",
        "ring fp16: padding and window",
        "ring bf16: sinks and window",
        "experts bf16: no rows at all",
        "experts bf16: biases, empty ones",
        "loss chunks",
        "router",
        "dropout: the same masks as on a CPU",
        "model: gpt2",
    ],
)
def test_a_check_holds_on_the_cpu(name, tmp_path):
    (check,) = [each for each in gpu_correctness.checks(1, dry=True) if each.name == name]
    check.run(place_at(tmp_path))


def test_names_of_checks_are_told_apart():
    import importlib

    for part in PARTS:
        for dry in (True, False):
            names = [check.name for check in importlib.import_module(part.module).checks(1, dry=dry)]
            assert names
            assert len(names) == len({*names}), part.title


def wider_window(*arguments: Any) -> Tensor:
    *tensors, context, window, terms = arguments
    return attend(*tensors, context, window + 1, terms)


def across_documents(*arguments: Any) -> Tensor:
    *tensors, context, window, terms = arguments
    whole = Context(context.positions_BS, torch.zeros_like(context.documents_BS))
    return attend(*tensors, whole, window, terms)


@pytest.mark.parametrize(("kernel", "case"), [(wider_window, "window"), (across_documents, "one-token documents")])
def test_planted_a_wrong_kernel_is_seen(kernel, case, tmp_path):
    (chosen,) = [each for each in gpu_correctness.ATTENTION if each.name == case]
    with pytest.raises(AssertionError, match="output: row"):
        gpu_correctness.check_attention(chosen, "bf16", place_at(tmp_path), kernel)


@pytest.mark.parametrize(
    ("module", "name", "replaced", "told"),
    [
        (ring_pieces, "whole_pieces", lambda made: lambda *a: [p._replace(right=0) for p in made(*a)], "output: row"),
        (ring, "merge", lambda _: lambda out, lse, block, block_lse: out.copy_(block), "output: row"),
        (
            ring_pieces,
            "documents_of",
            lambda made: lambda bounds, size, *a: made(sorted({b + (b % size > 0) for b in bounds}), size, *a),
            "output: row",
        ),
        (gpu_ring, "attend_pieces_backward", lambda _: lambda *a: None, "gradient of queries: row"),
    ],
)
def test_planted_a_wrong_ring_is_seen(monkeypatch, module, name, replaced, told, tmp_path):
    """A full piece called causal, blocks not merged, documents a token longer, no gradients."""
    monkeypatch.setattr(module, name, replaced(getattr(module, name)))
    (check,) = [each for each in gpu_correctness.checks(1, dry=True) if each.name == "ring bf16: grouped heads"]
    with pytest.raises(AssertionError, match=told):
        check.run(place_at(tmp_path))


def test_planted_a_wrong_expert_is_seen(monkeypatch, tmp_path):
    def shifted(hidden_TD: Tensor, indices_TK: Tensor, *rest: Any) -> Tensor:
        return experts_grouped(hidden_TD, (indices_TK + 1) % rest[1].shape[0], *rest)

    monkeypatch.setattr(gpu_correctness, "experts_grouped", shifted)
    with pytest.raises(AssertionError, match="output: row"):
        gpu_correctness.check_experts(gpu_correctness.EXPERTS[0], "bf16", place_at(tmp_path))


def test_a_nan_differs():
    with pytest.raises(AssertionError):
        gpu_compare.compare("x", torch.tensor([[float("nan")]]), torch.ones(1, 1), 1.0)


def test_waits_are_counted_by_torchs_own_words():
    with gpu_device.counting_waits(CPU) as waits:
        warnings.warn(f"{gpu_device.WAIT_MESSAGE} (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert len(waits) == 1
    assert Path(__file__).name in waits[0]


def test_the_warning_about_waits_is_in_torchs_library():
    """The words that are counted by are those of the installed torch; a build for CPUs alone has none."""
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    if not library.exists():
        pytest.skip(f"torch {torch.__version__} has no {library.name}")
    assert gpu_device.WAIT_MESSAGE.encode() in library.read_bytes()


def test_operators_of_a_call_are_told():
    rows = gpu_device.profiled(lambda: torch.ones(64, 64) @ torch.ones(64, 64), CPU, count=3).kernels
    assert 1 <= len(rows) <= 3
    assert all(row["calls"] > 0 for row in rows)
    assert rows == sorted(rows, key=lambda row: -row["ms"])


def test_gaps_are_the_times_in_which_no_kernel_runs():
    """Kernels of several streams may overlap; one that ends before another has begun after it hides nothing."""
    spans = [(0.0, 2000.0, "a"), (1000.0, 1500.0, "b"), (2500.0, 3000.0, "c"), (3000.0, 3500.0, "d")]
    busy_ms, gaps = gpu_device.busy_and_gaps(spans[::-1])
    assert busy_ms == 3.0
    assert gaps == [{"ms": 0.5, "after": "a", "before": "c"}]


def test_side_by_side_parts_take_turns_in_what_they_time(monkeypatch, tmp_path):
    monkeypatch.setenv("GPU_TURN", str(tmp_path / "turn"))
    with gpu_turn.turn(), open(tmp_path / "turn") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / "turn") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back


def test_whoever_is_timed_has_the_gpu_alone(monkeypatch, tmp_path):
    """The others' processes stand still, its own and those of other turns do not; nobody stays stopped."""
    monkeypatch.setenv("GPU_TURN", str(tmp_path / "turn"))
    monkeypatch.setenv("GPU_OWNER", "mine")
    sides = {"mine": {}, "another": {"GPU_OWNER": "another"}, "apart": {"GPU_TURN": "/other", "GPU_OWNER": "another"}}
    started = {
        name: subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, **own})
        for name, own in sides.items()
    }
    try:
        with gpu_turn.turn():
            assert stopped(started) == {"another"}
        assert stopped(started) == set()
        started["another"].send_signal(signal.SIGSTOP)  # as by a part that was killed in its turn
        gpu_turn.wake_others("mine")
        assert stopped(started) == set()
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def stopped(started: dict[str, subprocess.Popen]) -> set[str]:
    """Which of the processes stand still, half a second from now: a signal takes its time."""
    time.sleep(0.5)
    status = {name: psutil.Process(process.pid).status() for name, process in started.items()}
    return {name for name, each in status.items() if each == psutil.STATUS_STOPPED}


def test_files_name_no_path_of_the_machine(tmp_path):
    """Where waits are, and where a failure was raised."""
    assert from_root(f"{ROOT}/parallel/mesh.py:3") == "parallel/mesh.py:3"
    assert from_root(f'File "{torch.__file__}", line 1') == 'File "torch/__init__.py", line 1'
    report = Report.begin(tmp_path / "part-1.json", 1, "planted", dry=True)
    report.end("planted", "failed", f"{ROOT}/launcher/x.py", 1.0)
    assert str(ROOT) not in (tmp_path / "part-1.json").read_text()


def fails(place: Place) -> None:
    raise ValueError("on purpose")


def skips(place: Place) -> None:
    raise Skipped("for a reason")


def measures(place: Place) -> None:
    place.figure("length", 3.5, "m")


def test_one_failure_stops_no_other_check(tmp_path):
    report = Report.begin(tmp_path / "part-1.json", 1, "x", dry=True)
    for name, run in (("first", fails), ("second", skips), ("third", measures)):
        hour.run_check(Check(name, run), report, Place(CPU, True, tmp_path))
    content = json.loads(report.path.read_text())
    assert [(row["check"], row["status"]) for row in content["checks"]] == [
        ("first", "failed"),
        ("second", "skipped"),
        ("third", "passed"),
    ]
    assert "ValueError: on purpose" in content["checks"][0]["message"]
    assert content["figures"] == [{"check": "third", "name": "length", "value": 3.5, "unit": "m"}]


CRASHING = """
import os, time
from gpu_part import Check
def dies(place): place.figure("before", 1, ""); os.abort()
def hangs(place): time.sleep(100)
def holds(place): place.figure("after", 2, "")
def checks(n_devices, *, dry):
    return [Check("dies", dies, 60), Check("hangs", hangs, 0.2), Check("holds", holds, 60)]
"""


@pytest.mark.slow
def test_a_crash_and_a_hang_lose_nothing_but_themselves(tmp_path):
    """The part's process is begun again; figures told before the crash stay."""
    (tmp_path / "crashing.py").write_text(CRASHING)
    content = run_planted(tmp_path, minutes=2.0)
    found = {row["check"]: (row["status"], row["message"]) for row in content["checks"]}
    assert found["dies"] == ("failed", "the process ended: signal SIGABRT")
    assert found["hangs"][0] == "failed" and "ended: no end within" in found["hangs"][1]
    assert found["holds"][0] == "passed"
    assert [row["name"] for row in content["figures"]] == ["before", "after"]
    assert content["finished"] and content["dry"]


@pytest.mark.slow
def test_what_does_not_fit_in_the_minutes_is_told(tmp_path):
    (tmp_path / "crashing.py").write_text(CRASHING.replace("0.2", "60").replace("os.abort()", "pass"))
    started = time.monotonic()
    content = run_planted(tmp_path, minutes=0.5)
    assert time.monotonic() - started < 90
    assert [row["status"] for row in content["checks"]] == ["passed", "failed", "skipped"]
    assert content["checks"][-1]["message"] == "not begun: the part's minutes were over"


def run_planted(folder: Path, minutes: float) -> dict[str, Any]:
    """A part whose checks are those of crashing.py."""
    program = folder / "planted.py"
    program.write_text(
        "import sys, hour\n"
        "from gpu_part import Part\n"
        "hour.PARTS = [Part(1, 'planted', 1, 'crashing')]\n"
        "hour.WORKER = __file__\n"
        "if __name__ == '__main__': sys.exit(hour.main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(hour.__file__).parent)])}
    arguments = ["--dry", "--part", "1", "--minutes", str(minutes), "--out", str(folder / "out")]
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return written(folder / "out", 1)


def test_make_gpu_refuses_in_one_line():
    for variables, told in (
        (["PART=9", "DRY=1"], "PART=1 to 5"),
        (["MINUTES=0", "DRY=1"], "MINUTES=0 must be above 0"),
        (["PART=1"], "make gpu needs a GPU"),
    ):
        done = make_gpu(*variables)
        ours = [
            line for line in done.stderr.splitlines() if not line.startswith(("make: ", "make["))
        ]  # where make itself runs the tests
        assert done.returncode == 2
        assert len(ours) == 1 and told in ours[0], done.stderr
        assert not done.stdout


@pytest.mark.slow
def test_make_gpu_writes_a_dry_report(tmp_path):
    done = make_gpu("PART=1", "DRY=1", "CHECK=dropout", f"OUT={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    content = written(tmp_path, 1)
    assert content["dry"] is True
    assert content["hardware"] == {"name": "CPU", "count": 0}
    assert content["versions"]["torch"] == torch.__version__
    assert content["commit"] != "unknown" or not (ROOT / ".git").exists()
    assert [row["status"] for row in content["checks"]] == ["passed"]
    (tmp_path / "results").mkdir()
    (tmp_path / "part-1.json").rename(tmp_path / "results" / "part-1.json")
    with pytest.raises(gpu_page.Bad, match="is of a dry run, of which no figure counts"):
        gpu_page.page(tmp_path / "results")


def test_the_page_is_what_its_script_writes():
    assert gpu_page.PAGE.read_text() == gpu_page.page(gpu_page.RESULTS)


def test_nothing_is_measured_where_no_file_says_so(tmp_path):
    lines = gpu_page.page(tmp_path).splitlines()
    cells = [line.split(" | ")[-1].removesuffix(" |") for line in lines if line.startswith("| ")]
    rows = sum(len(table.rows) for table in gpu_page.tables())
    assert cells.count(gpu_page.NOT_MEASURED) == rows
    assert cells.count("not run") == len(PARTS)


def result(path: Path, **changes: Any) -> None:
    """A file as a GPU would leave it, with one figure."""
    name = "Llama 3 8B: roundtable"
    content = {
        "part": 3,
        "dry": False,
        "date": "2031-01-02 03:04:05 UTC",
        "commit": "abc",
        "hardware": {"name": "NVIDIA H200", "count": 1},
        "versions": {"torch": "2.11.0"},
        "checks": [{"check": name, "status": "passed", "message": "", "seconds": 1.0}],
        "figures": [{"check": name, "name": "step_ms", "value": 1234.5, "unit": "ms"}],
    }
    path.write_text(json.dumps(content | changes))


def test_planted_a_result_changes_its_cells(tmp_path):
    result(tmp_path / "part-3.json")
    text = gpu_page.page(tmp_path)
    assert "| step | 1,234 ms |" in text or "| step | 1,235 ms |" in text
    assert "| 3 baselines | 1 passed |" in text
    assert "NVIDIA H200, 2031-01-02" in text
    assert "torch 2.11.0; commit abc" in text


def test_a_check_that_was_run_again_ends_as_the_last_time(tmp_path):
    name = "Llama 3 8B: roundtable"
    result(tmp_path / "1-part-3.json", checks=[{"check": name, "status": "failed", "message": "", "seconds": 1.0}])
    result(tmp_path / "2-part-3.json")
    assert "| 3 baselines | 1 passed |" in gpu_page.page(tmp_path)


def test_a_turn_that_cannot_be_taken_is_refused_before_anything_begins(tmp_path, monkeypatch):
    for turn in (tmp_path / "nowhere" / "turn", tmp_path):
        monkeypatch.setenv("GPU_TURN", str(turn))
        done = make_gpu("PART=3", "DRY=1", f"OUT={tmp_path / 'out'}")
        assert done.returncode == 2 and not (tmp_path / "out").exists()
        assert f"GPU_TURN={turn} must be a file in a folder that is there" in done.stderr


def test_checks_are_chosen_by_one_of_several_texts():
    names = [check.name for check in hour.chosen_checks(PARTS[2], 0, dry=True, text="matmul|head chunks")]
    assert names == ["matmul", "head chunks"]
    assert [check.name for check in hour.chosen_checks(PARTS[2], 0, dry=True, text="matmul|")] == ["matmul"]


def test_a_name_that_no_check_has_is_refused_before_anything_begins(tmp_path):
    done = make_gpu("PART=1", "DRY=1", "CHECK=head chunks", f"OUT={tmp_path / 'out'}")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    (line,) = done.stderr.splitlines()[:1]
    assert line == "make gpu: CHECK=head chunks must be in the name of a check that part 1 has; try CHECK=kernels"


def test_parts_without_a_check_of_the_name_are_left_out(tmp_path):
    done = make_gpu("DRY=1", "CHECK=kernels: a launch", f"OUT={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "out").glob("part-*.json")] == ["part-3.json"]


def test_a_figure_of_a_failed_check_does_not_count(tmp_path):
    checks = [{"check": "Llama 3 8B: roundtable", "status": "failed", "message": "", "seconds": 1.0}]
    result(tmp_path / "part-3.json", checks=checks)
    assert f"| step | {gpu_page.NOT_MEASURED} |" in gpu_page.page(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dry": True}, "dry run"),
        ({"dry": None}, "dry run"),
        ({"hardware": {"name": "CPU", "count": 0}}, "dry run"),
        ({"hardware": None}, "is not a file that make gpu wrote"),
    ],
)
def test_planted_a_file_without_a_gpu_is_refused(changes, told, tmp_path):
    result(tmp_path / "part-3.json", **changes)
    with pytest.raises(gpu_page.Bad, match=told):
        gpu_page.page(tmp_path)


def test_planted_a_wheel_that_lacks_one_is_seen(tmp_path, monkeypatch):
    """The set is refused where a carried wheel needs what is neither carried nor there."""
    from zipfile import ZipFile

    with ZipFile(tmp_path / "one-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one-1.0.dist-info/METADATA", "Name: one\nVersion: 1.0\nRequires-Dist: two>=3\n")
    monkeypatch.setattr(gpu_wheels, "dependencies", lambda: ["one>=1"])
    gpu_wheels.check(tmp_path, {"two"})
    with pytest.raises(gpu_wheels.Lacking, match="needs two>=3, which is neither carried nor there"):
        gpu_wheels.check(tmp_path, set())
    monkeypatch.setattr(gpu_wheels, "dependencies", lambda: ["one>=2"])
    with pytest.raises(gpu_wheels.Lacking, match=r"roundtable needs one>=2, and 1.0 is carried"):
        gpu_wheels.check(tmp_path, {"two"})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_hour_on_the_cpu(tmp_path):
    """Every part, end to end; each figure that the page wants of a check that is run has its name."""
    done = subprocess.run(
        ["make", "--silent", "gpu", "DRY=1", f"OUT={tmp_path}", "MINUTES=25"],
        capture_output=True,
        text=True,
        timeout=1700,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    named: dict[int, set[tuple[str, str]]] = {}
    ran: dict[int, set[str]] = {}
    for part in PARTS:
        content = written(tmp_path, part.number)
        assert content["finished"] and content["dry"]
        named[part.number] = {(row["check"], row["name"]) for row in content["figures"]}
        ran[part.number] = {row["check"] for row in content["checks"] if row["status"] == "passed"}
    for table in gpu_page.tables():
        for row in table.rows:
            wanted = {(row.check, figure) for figure in row.figure.split("|")}
            assert row.check not in ran[row.part] or wanted <= named[row.part], row
