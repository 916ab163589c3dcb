"""What the watchdog costs a rank: turns at its own pace, whatever the others say, and a share of a core below 1%."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.config.tree import RunConfig, TrainConfig
from launcher.guard.stragglers import SLOW_RATIO, Stragglers
from launcher.guard.watchdog import Watchdog
from parallel.mesh import Degrees, close_mesh, open_mesh
from parallel.processes.heartbeat import Heart
from parallel.processes.start import run_ranks

RANKS = 3
LARGEST_SHARE = 0.01  # of a core


def watched(config: RunConfig, seconds: float, echoes: bool) -> dict[str, Any]:
    """This rank's turns, the seconds that passed, and those of the watchdog's thread on a core."""
    mesh = open_mesh(config.parallel, 60)
    turns = []
    speak, poll = Heart.send, Heart.poll

    def send(heart: Heart, message: dict[str, Any]) -> None:
        turns.append(message)
        speak(heart, message)

    def answering(heart: Heart, seconds: float) -> list[Any]:
        arrived = poll(heart, seconds)
        if arrived and turns and echoes:
            speak(heart, turns[-1])
        return arrived

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Heart, "send", send)
        patch.setattr(Heart, "poll", answering)
        with Watchdog(config, mesh) as watchdog:
            watchdog.beat(1, "step")
            clock = time.pthread_getcpuclockid(watchdog.thread.ident or 0)
            began, cpu = time.monotonic(), time.clock_gettime(clock)
            threading.Event().wait(seconds)
            figures = {
                "turns": len(turns),
                "seconds": time.monotonic() - began,
                "cpu": time.clock_gettime(clock) - cpu,
                "interval": watchdog.interval,
            }
    close_mesh()
    return figures


def test_a_beat_that_arrives_is_not_answered(tmp_path: Path) -> None:
    """Each rank has a turn every interval and no more, though every turn sends and every message wakes its receiver."""
    config = RunConfig(run_dir=str(tmp_path), train=TrainConfig(timeout_seconds=10))
    for figures in run_ranks(watched, RANKS, config, 2.0, False, timeout_seconds=120, threads=1):
        assert figures["turns"] <= figures["seconds"] / figures["interval"] + 3, figures
        assert figures["turns"] >= 2


@pytest.mark.slow  # ten seconds of waiting
def test_planted_echo_costs_more_than_the_bound(tmp_path: Path) -> None:
    """The share of a core is below 1% as it is, and above where messages are answered at once."""
    config = RunConfig(run_dir=str(tmp_path), train=TrainConfig(timeout_seconds=600))
    for echoes in (False, True):
        for figures in run_ranks(watched, RANKS, config, 5.0, echoes, timeout_seconds=120, threads=1):
            share = figures["cpu"] / figures["seconds"]
            assert (share > LARGEST_SHARE) == echoes, figures


def test_thousands_of_ranks_speak_less_often(tmp_path: Path) -> None:
    """Rank 0 hears some hundred words a second, not thousands."""
    for ranks, interval in ((8, 2.0), (2048, 5.12), (16384, 30.0)):
        mesh = type("Size", (), {"rank": 1, "world_size": ranks})()
        assert Watchdog(RunConfig(run_dir=str(tmp_path)), mesh).interval == interval


def test_stragglers_among_thousands() -> None:
    """One median a stage; a rank beyond the ratio is named at any size."""
    stages = Degrees(4096, pp=2).stages()
    slow = 3000
    figures = {rank: 1.0 if rank < 2048 else 2.0 for rank in range(4096)} | {slow: 2.0 * SLOW_RATIO}
    (found,) = Stragglers(stages).find(figures, step=20)
    assert (found.rank, found.ratio) == (slow, SLOW_RATIO)
