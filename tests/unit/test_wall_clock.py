"""The wall clock may be set back while a run trains, so durations and order never come from it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL_CLOCK = re.compile(r"\btime\.time\(|\bdatetime\.(now|utcnow)\(|\bst_[mc]time\b")
SHOWN_ONLY = {
    "launcher/slurm/follow.py",  # how long ago a step was, and which log is the newest
    "launcher/commands/runs.py",  # when runs were changed last
    "launcher/commands/clean.py",  # what was not changed for a day, and is asked about
    "launcher/commands/replay.py",  # when a token file was changed, where its step came out otherwise
}


def test_no_duration_comes_from_the_wall_clock():
    files = [path for folder in ("launcher", "parallel", "data", "modeling") for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files if WALL_CLOCK.search(path.read_text())}
    assert len(files) > 100
    assert found == SHOWN_ONLY


def test_planted_wall_clock_is_seen():
    assert WALL_CLOCK.search("started = time.time()") and WALL_CLOCK.search("datetime.now(UTC)")
    assert not WALL_CLOCK.search("time.monotonic()")
