"""Time limits that allow for a machine that runs at a fraction of its usual speed, as shared ones do."""

import time

ADDITIONS = 1_000_000
USUAL_SECONDS = 0.12  # processor time of the additions: the least seen on 2 cores of an AMD EPYC (2026-11-22)


def slowness() -> float:
    """The factor by which this machine is slower now than usual, measured by additions; at least 1."""
    begun, total = time.process_time(), 0
    for number in range(ADDITIONS):
        total += number
    return max(1.0, (time.process_time() - begun) / USUAL_SECONDS)


def is_within(taken: float, seconds: float) -> bool:
    """Whether ``taken`` processor seconds are below ``seconds``, or below that times this machine's slowness."""
    return taken < seconds or taken < seconds * slowness()
