"""A disk that is full during a save: training goes on, the last good checkpoint stays whole, the event is logged."""

import functools
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launcher.training.loop
from kill_drill import STEPS, judge_end, start, updates, write_config
from launcher.config.load import load_config
from launcher.training.state import TrainState
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens
from parallel.checkpoint.verify import problems_of
from small_disk import small_disk

LAYOUT = "dp2 zero1"
FULL_AT, ROOM_AT = 4, 6  # the disk is full while these steps and the save after the first of them are under way
BLOCK = bytes(1 << 16)


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small file system of its own."""
    with small_disk(tmp_path / "disk", mib=16) as folder:
        yield folder


def fill_for_a_while(disk: Path, told: Path) -> None:
    """Rank 0 fills the disk to its last byte before one step, and frees it before a later one."""
    if os.environ["RANK"] != "0":
        return
    real, filler = launcher.training.loop.run_step, disk / "filler"

    def run_step(config: Any, engine: Any, dataset: Any, state: TrainState, *others: Any, **named: Any) -> Any:
        if state.step + 1 == FULL_AT:
            fill(filler)
        if state.step + 1 == ROOM_AT:
            wait_for_the_end_of_the_save(disk)
            good = disk / "run" / "checkpoints" / "step-00000002"
            told.write_text("\n".join([*problems_of(good), f"{shutil.disk_usage(filler).free} bytes free"]))
            filler.unlink()
        return real(config, engine, dataset, state, *others, **named)

    launcher.training.loop.run_step = run_step


def fill(path: Path) -> None:
    """Writes until nothing more goes in."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    for block in (BLOCK, b"0"):
        try:
            while True:
                os.write(handle, block)
        except OSError:
            continue
    os.close(handle)


def wait_for_the_end_of_the_save(disk: Path) -> None:
    """Until what the save tried to write has been gone for a while."""
    gone_since, deadline = time.monotonic(), time.monotonic() + 120
    while time.monotonic() < min(gone_since + 3, deadline):
        if list((disk / "run" / "checkpoints").glob(f".step-{FULL_AT:08d}*")):
            gone_since = time.monotonic()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_goes_on_while_the_disk_is_full(tmp_path, disk, asynchronous):
    tokens = write_tokens(tmp_path)
    plain, full = (write_config(tmp_path, name, tokens, LAYOUT) for name in ("plain", "full"))
    text = re.sub("(?m)^run_dir: .*$", f"run_dir: {disk}/run", full.read_text())
    full.write_text(re.sub("(?m)^  asynchronous: .*$", f"  asynchronous: {str(asynchronous).lower()}", text))
    assert load_config(full).checkpoint.asynchronous == asynchronous
    assert start(plain, 2, None) == (0, "")
    assert start(full, 2, None, functools.partial(fill_for_a_while, disk, tmp_path / "told")) == (0, "")
    assert (tmp_path / "told").read_text() == "0 bytes free"
    run = disk / "run"
    ledger = read_metrics(plain.with_suffix("") / "ledger.jsonl")
    assert judge_end(run, updates(plain.with_suffix("")), ledger) == []
    events = [row for row in read_metrics(run / "metrics.jsonl") if "event" in row]
    assert [row["step"] for row in events if row["event"] == "checkpoint"] == [2, ROOM_AT, STEPS]
    (failed,) = [row for row in events if row["event"] == "checkpoint_failed"]
    assert failed["step"] == FULL_AT
    assert "No space left" in failed["message"]
