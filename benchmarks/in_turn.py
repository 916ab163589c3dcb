"""Times several ways of computing one thing, alternately within the same gloo processes."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor

WARM_UP = 3


def time_in_turn(
    ways: Mapping[str, Callable[[Tensor], Tensor]], draw: Callable[[], Tensor], steps: int
) -> dict[str, float]:
    """The median milliseconds of a forward and a backward pass of each way over ``steps`` inputs, after WARM_UP others.

    ``NAME`` is wall time, ``NAME, processor`` processor time of this process. All processes call it with the same ways.
    Which way comes first changes from input to input, since the first one pays for new memory.
    """
    times: dict[str, list[float]] = {name + of: [] for name in ways for of in ("", ", processor")}
    for step in range(WARM_UP + steps):
        hidden = draw().requires_grad_()
        first = step % len(ways)
        for name, way in [*ways.items()][first:] + [*ways.items()][:first]:
            torch.distributed.barrier()
            started, busy = time.perf_counter(), time.process_time()
            way(hidden).backward(hidden.detach())
            times[name].append(1e3 * (time.perf_counter() - started))
            times[f"{name}, processor"].append(1e3 * (time.process_time() - busy))
    return {name: round(median(each[WARM_UP:]), 1) for name, each in times.items()}
