"""Samples read ahead by a thread: the same ones, whatever the depth; what was read in vain, what fails, what hangs."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import data.read_ahead as module
from data.batch import Batch
from data.dataset import Dataset, open_dataset
from data.errors import DataError, UnreadObject
from data.order import take
from data.read_ahead import ReadAhead, UnreadSamples
from data_reference import ARRAYS
from launcher.config.tree import RunConfig, TrainConfig
from launcher.errors import UserError
from launcher.guard.hangs import main_line
from launcher.training.batch_ramp import BatchRamp
from launcher.training.batches import narrow
from launcher.training.run_dir import check_same_run
from launcher.training.samples import open_samples, steps_to_come
from launcher.training.step import read_micro_batch
from layout_runs import VOCAB_SIZE, run_config, write_tokens
from parallel.batch import MicroBatch
from parallel.mesh import lone_mesh

MICRO = 2
DEPTHS = (0, 1, 3, 100)


class Recorder:
    """A dataset that can be slow, fail, or give each batch in the same memory."""

    def __init__(self, dataset: Dataset, before: Callable[[np.ndarray], object] = lambda indices: None) -> None:
        self.dataset, self.before = dataset, before
        self.n_reads = 0
        self.reused: Batch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def read(self, indices: np.ndarray) -> Batch:
        self.n_reads += 1
        self.before(indices)
        return self.dataset.read(indices)


class Reusing(Recorder):
    def read(self, indices: np.ndarray) -> Batch:
        batch = super().read(indices)
        self.reused = self.reused or batch
        for name in ARRAYS:
            getattr(self.reused, name)[...] = getattr(batch, name)
        return self.reused


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    return run_config(write_tokens(tmp_path_factory.mktemp("tokens")), steps=12)


@pytest.fixture(scope="module")
def dataset(config) -> Dataset:
    return open_dataset(config.data, seed=config.seed, vocab_size=VOCAB_SIZE, split="train")


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert [each.name for each in threading.enumerate() if each.name == "read ahead"] == []


def reader(dataset: Any, depth: int, n_further: int = 2) -> ReadAhead[Batch]:
    return ReadAhead(
        dataset, lambda indices: indices.reshape(-1, MICRO), lambda batch: batch, depth=depth, n_further=n_further
    )


def hash_of(batch: Any) -> str:
    return xxhash.xxh3_64(b"".join(getattr(batch, name).tobytes() for name in ARRAYS)).hexdigest()


def as_asked(samples: Any, indices: np.ndarray) -> list[Any]:
    """What one step is given: its counts, twice, and its batches once all are read."""
    counts = [samples.count(indices), samples.count(indices), samples.count_further(indices, 2)]
    batches = [samples.read(part) for part in indices.reshape(-1, MICRO)]
    return counts + [hash_of(batch) for batch in batches]


def through(samples: ReadAhead[Batch], plan: list[tuple[int, np.ndarray]], pause: float = 0.0) -> list[Any]:
    """The steps of a plan, which the reader expects; ``pause``: what a step computes."""
    found = []
    for _, indices in plan:
        found.append(as_asked(samples, indices))
        time.sleep(pause)
    return found


RAMP = BatchRamp(start=2, increment=2, samples=12)
PLANS = {
    "plain": partial(steps_to_come, TrainConfig(steps=6, global_batch_size=8), 0, 0, []),
    "resumed": partial(steps_to_come, TrainConfig(steps=9, global_batch_size=8), 4, 48, [(16, 32)]),
    "skipped": partial(steps_to_come, TrainConfig(steps=6, global_batch_size=8), 0, 0, [(3, 5), (20, 41)]),
    "ramp": partial(steps_to_come, TrainConfig(steps=8, global_batch_size=8, batch_ramp=RAMP), 0, 0, [(9, 11)]),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_each_depth_gives_the_samples_that_the_dataset_gives(dataset, plan):
    expected = [as_asked(dataset, indices) for _, indices in plan()]
    for depth in DEPTHS:
        with reader(dataset, depth) as samples:
            samples.expect(plan())
            assert through(samples, list(plan())) == expected, depth


def test_the_plan_is_what_steps_take():
    """Sizes by the ramp, ranges hopped over, each step going on where the one before it ended."""
    train = TrainConfig(steps=8, global_batch_size=8, batch_ramp=RAMP)
    consumed = 0
    for step, indices in steps_to_come(train, 0, 0, [(9, 11)]):
        np.testing.assert_array_equal(indices, take(consumed, train.batches.size_at(step), [(9, 11)]))
        consumed = int(indices[-1]) + 1
    assert (step, len(indices)) == (8, 8)


@pytest.mark.parametrize("depth", DEPTHS)
def test_after_a_rollback_what_was_read_is_thrown_away(dataset, depth):
    before, after = list(PLANS["plain"]()), list(PLANS["resumed"]())
    with reader(dataset, depth) as samples:
        samples.expect(iter(before))
        through(samples, before[:2], pause=0.05)
        samples.expect(iter(after))
        assert through(samples, after) == [as_asked(dataset, indices) for _, indices in after]
        thrown_away = samples.figures().get("loader_thrown_away", 0)
    n_steps_ahead = min(depth, len(before) - 2)
    assert thrown_away == 4 * n_steps_ahead


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_wrong_guess_is_never_used(dataset, depth):
    """The plan is a step off: each step gets its own samples all the same."""
    plan = list(PLANS["plain"]())
    with reader(dataset, depth) as samples:
        samples.expect(iter(plan[1:]))
        assert through(samples, plan) == [as_asked(dataset, indices) for _, indices in plan]


def test_planted_batch_of_the_next_step_is_seen(dataset, monkeypatch):
    """Where a reader hands out what it has, the comparison above fails."""

    def whatever_comes(self: ReadAhead, request: Any) -> bool:
        with self._changed:
            self._expected or self._plan_step()
            self._expected.popleft()
        return True

    monkeypatch.setattr(ReadAhead, "_comes_next", whatever_comes)
    plan = list(PLANS["plain"]())
    with reader(dataset, 3) as samples:
        samples.expect(iter(plan[1:]))
        found = through(samples, plan[:3])
    assert all(mine != as_asked(dataset, indices) for mine, (_, indices) in zip(found, plan, strict=False))


def test_planted_batch_that_a_later_one_overwrites_is_seen(dataset):
    plan = list(PLANS["plain"]())
    expected = [as_asked(dataset, indices) for _, indices in plan]
    with reader(Reusing(dataset), 2) as samples:
        samples.expect(iter(plan))
        assert through(samples, plan, pause=0.02) != expected


def test_the_thread_is_so_many_steps_ahead_and_no_more(dataset):
    counted, plan = Recorder(dataset), list(PLANS["plain"]())
    with reader(counted, 2) as samples:
        samples.expect(iter(plan))
        for step, (_, indices) in enumerate(plan, 1):
            as_asked(samples, indices)
            expected = 4 * min(step + 2, len(plan))
            wait_until(lambda expected=expected: counted.n_reads == expected)
            time.sleep(0.02)
            assert counted.n_reads == expected


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_counting_again_searches_nothing(dataset, monkeypatch):
    """Within a step, a dataset searches for documents once, whoever asks; a reader's thread does it."""
    searches: list[str] = []
    find = dataset._boundaries.find
    monkeypatch.setattr(
        dataset._boundaries, "find", lambda *rows: searches.append(threading.current_thread().name) or find(*rows)
    )
    indices = np.arange(400, 480)
    for _ in range(3):
        dataset.count(indices), dataset.count_further(indices, 3)
    assert len(searches) == 1
    searches.clear()
    with ReadAhead(dataset, lambda indices: indices[:0], lambda batch: batch, depth=1, n_further=3) as samples:
        samples.expect([(1, indices + 80)])
        for _ in range(3):
            samples.count(indices + 80), samples.count_further(indices + 80, 3)
    assert searches == ["read ahead"]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("error", "raised", "line"),
    [
        (DataError("tokens.bin: token id 7 is wrong"), DataError, "step 3: tokens.bin: token id 7 is wrong"),
        (OSError(5, "Input/output error"), UnreadSamples, "step 3: its samples cannot be read: [Errno 5] Input/output"),
        (UnreadObject("s3://b/a.bin cannot be read"), UnreadObject, "step 3: its samples cannot be read: s3://b/a.bin"),
    ],
    ids=["data", "disk", "store"],
)
def test_what_fails_in_the_thread_is_raised_at_its_step(dataset, depth, error, raised, line):
    def fail(indices: np.ndarray) -> None:
        if 20 in indices:  # in step 3
            raise error

    plan = list(PLANS["plain"]())
    with reader(Recorder(dataset, fail), depth) as samples:
        samples.expect(iter(plan))
        assert len(through(samples, plan[:2], pause=0.02)) == 2
        with pytest.raises(raised) as told:
            through(samples, plan[2:])
    assert str(told.value).startswith(line) and "\n" not in str(told.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_holds_nobody_up(dataset):
    def die(indices: np.ndarray) -> None:
        if threading.current_thread().name == "read ahead":
            raise SystemExit

    plan = list(PLANS["plain"]())
    with reader(Recorder(dataset, die), 2) as samples:
        samples.expect(iter(plan))
        assert through(samples, plan) == [as_asked(dataset, indices) for _, indices in plan]


def test_a_disk_that_hangs_is_seen_in_the_report_and_holds_no_end_up(dataset, monkeypatch):
    """The main thread's line names the wait; leaving does not wait for the disk."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.1)
    answers, lines = threading.Event(), []
    hangs = Recorder(dataset, lambda indices: answers.wait(60))

    def look() -> None:
        wait_until(lambda: "_wait_for_samples" in main_line())
        lines.append(main_line())
        answers.set()

    watcher = threading.Thread(target=look)
    plan = list(PLANS["plain"]())
    with reader(hangs, 2) as samples:
        samples.expect(iter(plan))
        watcher.start()
        as_asked(samples, plan[0][1])
        watcher.join()
        assert lines[0].startswith("data/read_ahead.py:")
        answers.clear()
    answers.set()
    wait_until(lambda: not any(each.name == "read ahead" for each in threading.enumerate()))


SECONDS = 0.02  # that a planted disk takes for a micro-batch


def waits(dataset: Dataset, depth: int, pause: float) -> list[float]:
    """The metric of each step, with a slow disk."""
    plan = list(PLANS["plain"]())
    with reader(Recorder(dataset, lambda indices: time.sleep(SECONDS)), depth) as samples:
        samples.expect(iter(plan))
        found = []
        for _, indices in plan:
            as_asked(samples, indices)
            found.append(samples.figures()["loader_wait_seconds"])
            time.sleep(pause)
    return found


def test_a_slow_disk_shows_in_the_metric_and_is_hidden_behind_a_longer_step(dataset):
    """Each step reads for four times SECONDS, and computes for twelve."""
    shown, hidden = waits(dataset, 0, 0.0), waits(dataset, 2, 12 * SECONDS)
    assert min(shown) >= 4 * SECONDS
    assert sum(hidden[1:]) < 0.5 * sum(shown[1:])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 on forks of a process with threads
def test_a_fork_reads_for_itself(dataset):
    plan = list(PLANS["plain"]())
    with reader(dataset, 2) as samples:
        samples.expect(iter(plan))
        as_asked(samples, plan[0][1])
        pid = os.fork()
        if pid == 0:
            right = as_asked(samples, plan[3][1]) == as_asked(dataset, plan[3][1])
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert through(samples, plan[1:]) == [as_asked(dataset, indices) for _, indices in plan[1:]]


def test_on_a_cpu_the_thread_copies_nothing(dataset):
    """Nor does it make arrays: what it keeps is as narrow as the token file."""
    batch = dataset.read(np.arange(2))
    kept = narrow(batch, torch.device("cpu"))
    assert kept.window_BW.data_ptr() == batch.window_BW.ctypes.data
    assert kept.window_BW.dtype == torch.uint16
    assert not {"tokens_BS", "targets_BS", "_numbers"} & set(vars(batch))


def test_the_config_says_how_far_ahead(config, dataset):
    samples = open_samples(config, dataset, lone_mesh(torch.device("cpu")))
    assert samples.depth == 2
    np.testing.assert_array_equal(samples.share(np.arange(8)), np.arange(8).reshape(4, 2))


@pytest.mark.gpu
def test_on_cuda_no_copy_holds_the_host_and_no_memory_is_reused_too_early(config, dataset):
    """While the GPU is busy all batches are read, copied and let go of; what arrives is what was read."""
    device = torch.device("cuda", 0)
    copies_of_steps(config, dataset, device)  # allocates memory, which may wait, for the next time
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2 * 10**9)  # cycles: a second
    busy.record()
    copied = copies_of_steps(config, dataset, device)
    assert not busy.query()
    torch.cuda.synchronize()
    for part, batch in copied:
        read = dataset.read(part)
        np.testing.assert_array_equal(batch.tokens_BS.cpu().numpy(), read.tokens_BS)
        np.testing.assert_array_equal(batch.targets_BS.cpu().numpy(), read.targets_BS)
        np.testing.assert_array_equal(batch.context.positions_BS.cpu().numpy(), read.positions_BS)
    assert narrow(dataset.read(np.arange(2)), device).window_BW.is_pinned()


def copies_of_steps(config: RunConfig, dataset: Dataset, device: torch.device) -> list[tuple[np.ndarray, MicroBatch]]:
    """The micro-batches of a run's steps, on the device, with their samples' numbers."""
    plan, mesh = list(steps_to_come(config.train, 0, 0, [])), lone_mesh(device)
    with open_samples(config, dataset, mesh) as samples:
        samples.expect(iter(plan))
        found = []
        for _, indices in plan:
            samples.count(indices)
            found += [(part, read_micro_batch(samples, part, mesh)) for part in samples.share(indices)]
    return found


def test_what_is_copied_to_a_device_is_what_was_read(config, dataset):
    for part, batch in copies_of_steps(config, dataset, torch.device("cpu")):
        np.testing.assert_array_equal(batch.tokens_BS.numpy(), dataset.read(part).tokens_BS)


def test_how_far_ahead_samples_are_read_may_change_between_a_runs_starts(config):
    further = dataclasses.replace(config, data=dataclasses.replace(config.data, read_ahead=0))
    check_same_run(config, Path("config.yaml"), further, consumed=8)
    shorter = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=12))
    with pytest.raises(UserError, match=r"data\.seq_len=12 must stay"):
        check_same_run(config, Path("config.yaml"), shorter, consumed=8)
