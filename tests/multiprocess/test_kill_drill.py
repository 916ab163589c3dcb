"""Some runs of the kill drill (`make drill` has two hundred): ranks, launchers and fork servers killed at each kind of
moment, nobody left, resumed, equal to the last bit."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import launcher.guard.watchdog
import launcher.training.loop
from kill_drill import LAUNCHER, MOMENTS, PIDS, SERVER, Drill, judge_left, plan, start, summary, write_config
from launcher.guard.watchdog import Watchdog
from launcher.watch.metrics import MetricsFile
from layout_runs import write_tokens
from parallel.mesh import Mesh

SEED = 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("numbers", [range(5), range(5, 15)], ids=["five", "ten more"])
def test_killed_runs_resume_to_the_same_end(tmp_path, numbers):
    """Each moment comes. A kill may come a little after its moment; where none came, there was nothing to resume."""
    drill = Drill(tmp_path, SEED)
    outcomes = [drill.run(number) for number in numbers]
    result = summary(outcomes, SEED)
    assert result["failed"] == []
    assert {kill.moment for outcome in outcomes for kill in outcome.kills} == set(MOMENTS)
    assert sum("not at all" not in outcome.landed for outcome in outcomes) >= len(numbers) // 2
    assert {LAUNCHER, SERVER} < {kill.victim for outcome in outcomes for kill in outcome.kills}


def test_a_run_of_the_drill_can_be_repeated():
    assert plan(SEED, 3) == plan(SEED, 3)
    assert len({str(plan(SEED, number)) for number in range(50)}) == 50


def keep_later_rows() -> None:
    """metrics.jsonl and the ledger keep the rows of steps that are done again."""

    def resume(cls: type[MetricsFile], path: Path, *_: object) -> MetricsFile:
        return cls(path)

    setattr(MetricsFile, "resume", classmethod(resume))  # noqa: B010  (an assignment would be a type error)


def forget_position() -> None:
    """The next sample after a load is the first one."""
    real = launcher.training.loop.restore

    def restore(*arguments):
        state, warnings = real(*arguments)
        state.consumed = 0
        return state, warnings

    launcher.training.loop.restore = restore


def test_planted_process_that_is_left_fails_the_drill(tmp_path, monkeypatch):
    monkeypatch.setattr("orphans.ORPHAN_SECONDS", 0.3)
    (tmp_path / PIDS).mkdir()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (tmp_path / PIDS / "rank 0").write_text(f"{process.pid} {psutil.Process(process.pid).create_time()}")
    (problem,) = judge_left(tmp_path)
    assert f"pid={process.pid}" in problem and "outlived its launcher" in problem
    process.wait(5)
    assert judge_left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("plant", "told"),
    [(keep_later_rows, ["each step comes once"]), (forget_position, ["differ", "skipped or repeated"])],
)
def test_planted_fault_in_resuming_fails_the_drill(tmp_path, plant, told):
    number = next(
        number
        for number in range(1000)
        for layout, kills in [plan(SEED, number)]
        # Early in step 6: the save after step 4 has waited for the first one, so there is a checkpoint to come back to.
        if layout == "dp2 zero1" and kills[0].moment == "step" and kills[0].occurrence == 6
        if kills[0].delay_seconds < 0.01
    )
    outcome = Drill(tmp_path, SEED, plant).run(number)
    assert all(any(words in problem for problem in outcome.problems) for words in told), outcome


def end_between_word_and_look() -> None:
    """Rank 0's main thread ends just after its watchdog's thread has sent what it knew; the other ranks end later."""
    real, meet = Watchdog.send_own, launcher.guard.watchdog.wait_for_all

    def send_own(self: Watchdog, *arguments) -> None:
        real(self, *arguments)
        deadline = time.monotonic() + 20
        while self.mesh.rank == 0 and self.phase == "end" and self.own_end is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def wait_for_all(mesh: Mesh) -> None:
        meet(mesh)
        time.sleep(8 if mesh.rank else 4)  # the thread sends every two seconds

    Watchdog.send_own = send_own
    launcher.guard.watchdog.wait_for_all = wait_for_all


@pytest.mark.slow
def test_a_rank_that_ends_as_it_should_always_says_so(tmp_path):
    """The kill drill found it: one end in dozens was taken for a death, on a busy machine."""
    config = write_config(tmp_path, "run", write_tokens(tmp_path), "dp2 zero1")
    assert start(config, 2, None, end_between_word_and_look) == (0, "")
