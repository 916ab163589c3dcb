"""Times the host's cost of a call of a compiled chain, which a GPU waits for with short kernels. Prints one JSON line.

    python benchmarks/chain_calls.py [--starts 3] [--turns 3]

The chain is the gate of a SwiGLU over 16 rows of 32, small enough that only the call takes time. It is called by
``torch.compile``'s own wrapper and by ``modeling.kernels.fuse.compiled``, after compilation: with rows that vary and
rows that do not, without autograd and with it. Figures are microseconds of processor time on one thread. Each side is a
process of its own; the sides take turns, and are started anew after some turns. Figures are medians over all turns.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from modeling.kernels.direct import sizes_alone, view_of
from modeling.kernels.fuse import compiled
from sides import in_turn, takes_turns

CALLS, WARM_UP = 3000, 200
KINDS = ("torch.compile", "chain", "torch.compile, rows vary", "chain, rows vary", "chain with its gradient")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--side", nargs=1, choices=KINDS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        torch.set_num_threads(1)
        takes_turns(calls_of(*arguments.side))
        return
    times = in_turn(__file__, [(kind,) for kind in KINDS], [], arguments.starts, arguments.turns)
    line: dict[str, object] = {"benchmark": "chain_calls", "torch": torch.__version__}
    print(json.dumps(line | {kind: round(median(times[kind,]), 1) for kind in KINDS}))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """The chain that is timed: the gate of a SwiGLU."""
    return torch.nn.functional.silu(gate) * up


def calls_of(kind: str) -> Callable[[], float]:
    """A function that calls the chain CALLS times and returns the microseconds of processor time of one call."""
    gate, up = (torch.randn(16, 32, dtype=torch.bfloat16) for _ in range(2))
    rows_vary = kind.endswith("rows vary")
    once: Callable[[], object] = functools.partial(compiled, gated, gate, up, rows_vary=rows_vary)
    if kind.startswith("torch.compile"):
        made = torch.compile(gated, fullgraph=True, dynamic=False, options={"guard_filter_fn": sizes_alone})

        @torch.no_grad()
        def once() -> object:
            return made(*([view_of(each, rows_vary=True) for each in (gate, up)] if rows_vary else (gate, up)))

    if kind.endswith("gradient"):
        gate.requires_grad_()
        grad = torch.randn_like(up)

        def once() -> object:
            return torch.autograd.grad(compiled(gated, gate, up), gate, grad)

    for _ in range(WARM_UP):
        once()

    def many() -> float:
        begin = time.process_time()
        for _ in range(CALLS):
            once()
        return (time.process_time() - begin) / CALLS * 1e6

    return many


if __name__ == "__main__":
    main()
