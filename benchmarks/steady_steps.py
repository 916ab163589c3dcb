"""Measures how much a run's steps vary in time, and how much memory grows over them. Prints one JSON line.

    python benchmarks/steady_steps.py [--steps 60] [--precision fp32|bf16|auto]

The model, the batches and the engine are those of Roundtable's side of zero_step_speed.py: ZeRO 1, one process, one
thread. Over steps 10 to 30 (from 0): ``spread``, the standard deviation of their processor time over its mean, and
``farthest``, the largest distance of one from the median, over the median. ``growth_mb``: by how much the resident
memory after the last step exceeds the largest after steps 10 to 30; ``later_growth_mb``: by how much it exceeds the
largest of the first half of the steps, so that what settles is told from what grows on.
"""

import argparse
import json
import os
import statistics
import time

import torch

from cpu_precision import add_precision, choose_precision
from zero_step_speed import free_port, open_ours

WATCHED = slice(10, 31)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    add_precision(parser)
    arguments = parser.parse_args()
    if arguments.steps < WATCHED.stop:
        parser.error(f"--steps={arguments.steps} must be at least {WATCHED.stop}, for steps 10 to 30 are looked at")
    chosen = choose_precision(arguments.precision)
    seconds, resident = measure(str(chosen["precision"]), arguments.steps)
    watched = seconds[WATCHED]
    middle = statistics.median(watched)
    figures = {
        "median_seconds": round(middle, 4),
        "spread": round(statistics.stdev(watched) / statistics.mean(watched), 4),
        "farthest": round(max(abs(each - middle) for each in watched) / middle, 4),
        "growth_mb": round((resident[-1] - max(resident[WATCHED])) / 1e6, 1),
        "later_growth_mb": round((resident[-1] - max(resident[: len(resident) // 2])) / 1e6, 1),
        "resident_mb": round(resident[-1] / 1e6, 1),
    }
    print(
        json.dumps({"benchmark": "steady_steps", "torch": torch.__version__, "steps": len(seconds)} | chosen | figures)
    )


def measure(precision: str, steps: int) -> tuple[list[float], list[int]]:
    """The processor seconds of each step, and the resident bytes after each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    step = open_ours(precision)
    seconds, resident = [], []
    for number in range(steps):
        started = time.process_time()
        step(number)
        seconds.append(time.process_time() - started)
        resident.append(resident_bytes())
    return seconds, resident


def resident_bytes() -> int:
    """The resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
