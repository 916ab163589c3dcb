"""Ten runs of the kill drill (`make drill` has two hundred): killed at each kind of moment, resumed, equal to the last
bit."""

from pathlib import Path

import pytest

import launcher.train
from kill_drill import MOMENTS, Drill, plan, summary
from launcher.watch.metrics import MetricsFile

SEED = 4
RUNS = 10


@pytest.mark.timeout(1800)
def test_killed_runs_resume_to_the_same_end(tmp_path):
    """Each moment twice. A kill may come a little after its moment; where none came, there was nothing to resume."""
    drill = Drill(tmp_path, SEED)
    outcomes = [drill.run(number) for number in range(RUNS)]
    result = summary(outcomes, SEED)
    assert result["failed"] == []
    assert {kill.moment for outcome in outcomes for kill in outcome.kills} == set(MOMENTS)
    assert sum("not at all" not in outcome.landed for outcome in outcomes) >= RUNS // 2


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
    real = launcher.train.restore

    def restore(*arguments):
        state, warnings = real(*arguments)
        state.consumed = 0
        return state, warnings

    launcher.train.restore = restore


@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", [keep_later_rows, forget_position])
def test_planted_fault_in_resuming_fails_the_drill(tmp_path, plant):
    number = next(
        number
        for number in range(1000)
        for layout, kills in [plan(SEED, number)]
        if layout == "dp2 zero1" and kills[0].moment == "step" and kills[0].occurrence in (4, 6)
    )
    outcome = Drill(tmp_path, SEED, plant).run(number)
    assert any("differ" in problem for problem in outcome.problems), outcome
    assert any("skipped or repeated" in problem for problem in outcome.problems), outcome
