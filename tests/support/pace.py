"""Bounds of time that hold on a machine which runs at a fraction of its speed, as shared ones do."""

import time

ADDITIONS = 1_000_000
USUAL_SECONDS = 0.06  # of processor time for them (2 cores, 2026-11-22)


def slowness() -> float:
    """How many times as long as usual this machine takes now; at least 1."""
    begun, total = time.process_time(), 0
    for number in range(ADDITIONS):
        total += number
    return max(1.0, (time.process_time() - begun) / USUAL_SECONDS)


def is_within(taken: float, seconds: float) -> bool:
    """Whether ``taken`` is below ``seconds`` of a machine at its usual speed, of which only a slow one is asked."""
    return taken < seconds or taken < seconds * slowness()
