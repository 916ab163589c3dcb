"""What rank 0 makes of heartbeats and reports, without any rank."""

from dataclasses import replace

import pytest

from launcher.guard.hangs import CUT_SECONDS, Report, Seen, explain, judge, runs_of_ranks, unrolled
from launcher.guard.stragglers import AGAIN_STEPS, WINDOW_STEPS, OwnTimes, Stragglers
from modeling.config import ModelConfig
from parallel.mesh import Degrees
from parallel.pipeline.config import OneFOneB
from parallel.pipeline.stages import work_of_ranks

PLACES = Degrees(4, tp=2, pp=2).places()
BEAT = {"step": 5, "phase": "step", "age": 1.0, "limit": 10.0, "key": "train.step_timeout_seconds"}
NOW = 1000.0


def seen(**changed: Seen) -> dict[int, Seen]:
    """Four healthy ranks, but for r0 to r3 as given."""
    states = {rank: Seen(NOW - 1, dict(BEAT)) for rank in range(4)}
    return states | {int(name[1:]): state for name, state in changed.items()}


def report(rank: int, *, number: int | None = None, count: int = 7, group: str = "tp", ranks=(0, 1)) -> Report:
    waits = None
    if number is not None:
        names = {"operation": "all_reduce", "group": group, "axis": group, "ranks": runs_of_ranks(list(ranks))}
        waits = {**names, "number": number, "peer": None, "seconds": 3.0}
    return Report(rank, 5, "step", 11.0, "parallel/x.py:1 in f", waits, {group: count})


def test_the_rank_in_another_collective_is_out_of_step():
    """All wait in a circle: 0 and 1 on dp for 2 and 3, 2 on tp for 3, and 3 for all."""
    verdict = judge(seen(r0=Seen(NOW, {**BEAT, "age": 12.0})), PLACES, NOW)
    assert verdict is not None
    begun = {0: {"tp": 380, "dp": 46, "all": 9}, 1: {"tp": 380, "dp": 46, "all": 9}}
    begun |= {2: {"tp": 377, "dp": 45, "all": 9}, 3: {"tp": 376, "dp": 45, "all": 10}}
    waits = {0: ("dp02", (0, 2), 46), 1: ("dp13", (1, 3), 46), 2: ("tp", (2, 3), 377), 3: ("all", range(4), 10)}
    reports = {
        rank: replace(report(rank, number=number, count=number, group=group, ranks=ranks), by_axis=begun[rank])
        for rank, (group, ranks, number) in waits.items()
    }
    culprit, message = explain(verdict, reports, seen(), PLACES, NOW)
    assert culprit == 3
    assert "out of step with the others: rank 3 (pp 1, tp 1) waits in step 5 in all_reduce over all" in message
    reports[3] = replace(reports[3], by_axis=begun[2])
    assert explain(verdict, reports, seen(), PLACES, NOW)[0] is None, "nobody stands out"


def test_places_are_those_of_the_axes():
    assert PLACES == ["rank 0 (pp 0, tp 0)", "rank 1 (pp 0, tp 1)", "rank 2 (pp 1, tp 0)", "rank 3 (pp 1, tp 1)"]
    assert Degrees(2).places() == ["rank 0 (dp 0)", "rank 1 (dp 1)"]
    assert Degrees(1).places() == ["rank 0"]


def test_healthy_ranks_are_left_alone():
    assert judge(seen(), PLACES, NOW) is None
    assert judge(seen(r1=Seen(NOW - 500, dict(BEAT), left=True)), PLACES, NOW) is None
    assert judge(seen(r1=Seen(NOW - 500)), PLACES, NOW) is None  # has not beaten yet


@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        (Seen(NOW, dict(BEAT), failed=("ValueError: x", 2)), "failed", "rank 3 (pp 1, tp 1) failed: ValueError: x"),
        (Seen(NOW, dict(BEAT), gone=True), "gone", "rank 3 (pp 1, tp 1) ended without a message (killed"),
        (Seen(NOW - 11, dict(BEAT)), "hang", "rank 3 (pp 1, tp 1) has not been heard of for 11 s"),
        (Seen(NOW, {**BEAT, "age": 12.0}), "hang", "step 5 has taken 12 s; the limit is 10 s"),
        (Seen(NOW, {**BEAT, "age": 12.0, "phase": "checkpoint"}), "hang", "checkpoint after step 5 has taken 12 s"),
        (Seen(NOW, dict(BEAT), cut=(NOW - CUT_SECONDS - 1, "closed")), "cut", "lost a connection to another rank"),
    ],
)
def test_what_is_wrong_is_told(state, kind, words):
    verdict = judge(seen(r3=state), PLACES, NOW)
    assert verdict is not None
    assert (verdict.kind, words in verdict.text) == (kind, True), verdict


def test_a_cause_comes_before_its_consequences():
    states = seen(r0=Seen(NOW, dict(BEAT), cut=(NOW - 60, "closed")), r2=Seen(NOW, dict(BEAT), failed=("E: x", 1)))
    verdict = judge(states, PLACES, NOW)
    assert verdict is not None and verdict.rank == 2


def test_the_rank_that_did_not_come_is_named():
    verdict = judge(seen(r0=Seen(NOW, {**BEAT, "age": 12.0})), PLACES, NOW)
    assert verdict is not None
    everybody = {rank: report(rank, number=8, count=8) for rank in range(4)}
    missing = {rank: each for rank, each in everybody.items() if rank != 2}
    assert explain(verdict, missing, seen(), PLACES, NOW)[0] == 2
    at_work = everybody | {1: report(1)}
    culprit, message = explain(verdict, at_work, seen(), PLACES, NOW)
    assert culprit == 1 and "slowest: rank 1 (pp 0, tp 1) is at work in step 5, at parallel/x.py:1 in f" in message
    assert "  rank 0 (pp 0, tp 0) waits in step 5 in all_reduce over tp (ranks 0, 1), number 8 there" in message
    elsewhere = everybody | {0: report(0, number=8, count=8), 1: report(1, number=3, group="dp", ranks=(1, 3))}
    elsewhere[1] = replace(elsewhere[1], counts={"tp": 7, "dp": 3})
    elsewhere[3] = replace(elsewhere[3], counts={"tp": 8, "dp": 3})
    assert explain(verdict, elsewhere, seen(), PLACES, NOW)[0] == 1


def test_nobody_is_named_where_all_have_begun_the_same():
    """So it is on NCCL where a GPU or a cable fails: hosts begin all of a step, and wait for its end."""
    verdict = judge(seen(r0=Seen(NOW, {**BEAT, "age": 12.0})), PLACES, NOW)
    assert verdict is not None
    everybody = {rank: report(rank, number=8, count=8, group="all", ranks=range(4)) for rank in range(4)}
    culprit, message = explain(verdict, everybody, seen(), PLACES, NOW)
    assert culprit is None and "nobody is late" in message and "slowest" not in message
    assert all(f"  {place} waits in step 5 in all_reduce over all" in message for place in PLACES)
    behind = everybody | {2: replace(everybody[2], step=4)}
    assert explain(verdict, behind, seen(), PLACES, NOW)[0] == 2
    behind = everybody | {2: report(2, number=7, count=7, group="all", ranks=range(4))}
    assert explain(verdict, behind, seen(), PLACES, NOW)[0] == 2
    assert explain(verdict, {0: everybody[0]}, {0: Seen(NOW)}, PLACES, NOW)[0] == 0, "there is no other"


def test_own_times_are_the_window_median_of_what_communication_leaves():
    own = OwnTimes()
    for step in range(WINDOW_STEPS):
        assert own.figure() is None
        own.add(wall=9.0 if step % 3 == 0 else 2.0, held=1.0)
    assert own.figure() == 1.0


def test_stragglers_are_named_once_and_again_when_they_stay():
    stragglers = Stragglers(Degrees(4, pp=2).stages())
    even = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.1}  # the second stage has more to do
    assert stragglers.find(even, 20) == []
    slow = even | {1: 2.0}
    (found,) = stragglers.find(slow, 21)
    assert (found.rank, found.ratio, found.seconds) == (1, 2.0, 2.0)
    assert stragglers.find(slow, 22) == []
    assert stragglers.find(slow, 21 + AGAIN_STEPS) != []
    assert stragglers.find({0: 1.0}, 9999) == []  # not everybody has a figure


def test_a_lone_rank_of_a_stage_is_compared_with_all():
    (found,) = Stragglers(Degrees(2, pp=2).stages()).find({0: 1.0, 1: 1.6}, 1)
    assert (found.rank, round(found.ratio, 2)) == (1, 1.6)


@pytest.mark.parametrize(
    ("figures", "slow"),
    [
        pytest.param({0: 1.0, 1: 1.0, 2: 1.0, 3: 4.0}, [], id="the head takes its time"),
        pytest.param({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.1}, [], id="and less than its products"),
        pytest.param({0: 1.0, 1: 2.0, 2: 1.0, 3: 4.0}, [1], id="a slow one beside it"),
        pytest.param({0: 1.0, 1: 1.0, 2: 1.0, 3: 9.0}, [3], id="the head is slow"),
    ],
)
def test_a_lone_rank_with_more_to_do_is_no_straggler(figures, slow):
    """A pipeline whose last stage has a large head, or more layers."""
    model = ModelConfig(n_layers=4, d_model=64, n_heads=2, n_kv_heads=2, d_ff=64, vocab_size=1024)
    work = work_of_ranks(model, OneFOneB(layers=(1, 1, 1, 1)), pp=4)
    assert work[0] < 1.5 * work[1] and 3 < work[3] / work[1] < 5
    found = Stragglers(Degrees(4, pp=4).stages(), work).find(figures, 1)
    assert [each.rank for each in found] == slow
    assert all(each.ratio >= 1.5 for each in found)


@pytest.mark.parametrize(
    "ranks", [[], [3], [0, 1, 2, 3], [5, 9, 13], [0, 1, 8, 9, 16, 17], [7, 3, 1], list(range(0, 2048, 8))]
)
def test_a_groups_ranks_are_told_in_few_numbers(ranks):
    assert unrolled(runs_of_ranks(ranks)) == ranks
    assert len(runs_of_ranks(list(range(0, 2048, 8)))) == 1
