"""How the batch grows: the table of sizes against Megatron-LM's rule, followed update by update."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.config.tree import RunConfig, TrainConfig
from launcher.guard.watchdog import LONGEST_FACTOR, STEP, Watchdog
from launcher.training.batch_ramp import Batches, BatchRamp, batches_of
from launcher.watch.progress import RunProgress
from parallel.mesh import lone_mesh


def follow(full: int, ramp: BatchRamp, steps: int) -> list[int]:
    """The sizes of the first updates, as Megatron-LM computes each from the samples consumed before it."""
    sizes, consumed, n_increments = [], 0, (full - ramp.start) // ramp.increment
    for _ in range(steps):
        passed = consumed * n_increments // ramp.samples  # parts of the ramp that are over
        sizes.append(full if consumed >= ramp.samples else ramp.start + passed * ramp.increment)
        consumed += sizes[-1]
    return sizes


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 12), st.integers(1, 400))
@example(start=4, increment=4, n_increments=1, samples=4)  # a size of one update
@example(start=1, increment=9, n_increments=12, samples=5)  # sizes of none
def test_the_sizes_are_those_of_megatrons_rule(start, increment, n_increments, samples):
    full = start + n_increments * increment
    ramp = BatchRamp(start=start, increment=increment, samples=samples)
    batches, steps = batches_of(full, ramp), 2 * samples // start + 3
    sizes = [batches.size_at(step) for step in range(1, steps + 1)]
    assert sizes == follow(full, ramp, steps)
    assert [batches.samples_in(step) for step in range(steps + 1)] == [sum(sizes[:step]) for step in range(steps + 1)]
    assert all(batches.steps_for(batches.samples_in(step)) == step for step in range(steps + 1))
    assert sizes[-1] == batches.sizes[-1] == full and sizes == sorted(sizes)


def test_a_ramp_by_hand():
    """8 sequences until 50 of 100 have passed, which the seventh update begins below; then 16, and 24 from 100 on."""
    batches = batches_of(24, BatchRamp(start=8, increment=8, samples=100))
    assert batches == Batches((8, 16, 24), (0, 7, 10), (0, 56, 104))
    assert batches.steps_for(64) == 7.5


def test_without_a_ramp_every_update_is_alike():
    batches = batches_of(24, None)
    assert {batches.size_at(step) for step in (1, 2, 10**9)} == {24} and batches.samples_in(10**9) == 24 * 10**9


def test_the_time_left_goes_by_sequences(tmp_path):
    """7 updates of 8 sequences took 56 s; 3 of 16 and 10 of 24 are left."""
    batches = batches_of(24, BatchRamp(start=8, increment=8, samples=100))
    progress = RunProgress(20, 1, "run", tmp_path, batches=batches)
    progress._moments.clear()
    progress._moments += [(0.0, 0), (56.0, 7)]
    assert progress.seconds_left() == 3 * 16 + 10 * 24


def test_a_larger_batch_may_take_longer(monkeypatch, tmp_path):
    """A step's limit is three times the longest one before it, for each sequence; without a ramp, as it always was."""
    for ramp, expected in ((BatchRamp(start=2, increment=10, samples=6), 6 * 1000.0), (None, 1000.0)):
        now, train = 0.0, TrainConfig(global_batch_size=12, batch_ramp=ramp, timeout_seconds=60)
        monkeypatch.setattr("launcher.guard.watchdog.time.monotonic", lambda: now)  # noqa: B023
        watchdog = Watchdog(RunConfig(train=train, run_dir=str(tmp_path)), lone_mesh(torch.device("cpu")))
        for step in range(1, 5):
            watchdog.beat(step, STEP)
            now += 1000.0 if step < 4 else 0.0
        assert watchdog.limit() == LONGEST_FACTOR * expected
