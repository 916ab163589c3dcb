"""Faults that add or remove collectives in every rank, to see that the count of bytes detects them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import grad_reduce_runs
import parallel.collectives as collectives
from parallel.zero.engine import Engine

FAULTS = {  # fault -> what the comparison must report
    "a barrier in every step": "barrier by tests/support/traffic_faults.py",
    "an all-reduce of one number in every step": "allreduce by tests/support/traffic_faults.py",
    "router's gradient not summed over tp": "tp, gradients of what tp does not cut, all-reduce",
    "positions gathered once more": "tp, positions, all-gather",
    "gradients reduced twice": "edp, gradients, all-reduce",
}
TWICE = "a bucket reduced twice"


@contextmanager
def planted(fault: str | None, engine: Any) -> Iterator[None]:
    """A context in which the code, or this engine, is broken in the named way; None breaks nothing."""
    match fault:
        case None:
            yield
        case "a barrier in every step":
            with before_step(lambda _: dist.barrier()):
                yield
        case "an all-reduce of one number in every step":
            with before_step(lambda _: dist.all_reduce(torch.zeros(1))):
                yield
        case "router's gradient not summed over tp":
            name, parameter = next((name, each) for name, each in engine.model.named_parameters() if "router" in name)
            alone = replace(engine.weights[parameter], place=replace(engine.layout[name], axis="tp"))
            with patch.dict(engine.weights, {parameter: alone}):
                yield
        case "positions gathered once more":
            with before_step(lambda engine: collectives._all_gather(torch.zeros(1, 1, 1), engine.mesh.tp)):
                yield
        case "gradients reduced twice":
            with before_step(lambda engine: engine.sharding.deepspeed.allreduce_gradients()):
                yield
        case "a bucket reduced twice":
            with grad_reduce_runs.planted(fault):
                yield
        case _:
            raise AssertionError(f"no fault named {fault!r}")


def before_step(action: Any) -> Any:
    """A context in which ``action`` is called with the engine before every update."""
    step = Engine.step

    def changed(self: Any, lr: float) -> Any:
        action(self)
        return step(self, lr)

    return patch.object(Engine, "step", changed)
