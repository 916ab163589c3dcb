"""A pipeline whose stages only sleep, equally long in each pass of a kind, to measure a schedule's own idle time."""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.stages import Part

SHAPE = (1, 2, 4)  # of the hidden states


@dataclass
class Waited:
    """The seconds that a step took on one rank, from the common start to its end, and the seconds of its passes."""

    whole: float
    forward: float  # the sum of its sleeps
    backward: float
    n_passes: int  # forward passes


class Log:
    """The seconds that the sleeps of one step really took, since a busy machine wakes processes late."""

    def __init__(self) -> None:
        self.forward = self.backward = 0.0
        self.n_passes = 0

    def wait(self, seconds: float, *, forward: bool) -> None:
        """Sleeps and adds the time that it really took."""
        began = time.perf_counter()
        time.sleep(seconds)
        taken = time.perf_counter() - began
        if forward:
            self.forward, self.n_passes = self.forward + taken, self.n_passes + 1
        else:
            self.backward += taken


class InputWait(torch.autograd.Function):
    """The identity, whose backward pass sleeps for ``seconds``."""

    @staticmethod
    def forward(ctx: Any, hidden_BSD: Tensor, seconds: float, log: Log) -> Tensor:
        ctx.seconds, ctx.log = seconds, log
        return hidden_BSD.clone()

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> Any:
        ctx.log.wait(ctx.seconds, forward=False)
        return grad_BSD, None, None


class WaitingStage(nn.Module):
    """A stage whose forward pass takes ``seconds`` and whose backward pass takes twice that, half for its weight."""

    def __init__(self, part: Part, seconds: float, log: Log) -> None:
        super().__init__()
        self.part, self.seconds, self.log = part, seconds, log
        self.weight = nn.Parameter(torch.eye(SHAPE[-1]))

    def forward(self, values: Tensor, **_: Any) -> Tensor:
        """The hidden states, or their sum on the last stage."""
        self.log.wait(self.seconds, forward=True)
        if self.part.has_embedding:  # nothing is before it: all of its backward pass is its weight's
            weight = InputWait.apply(self.weight, 2 * self.seconds, self.log)
            return torch.ones(SHAPE) @ weight
        hidden = InputWait.apply(values, self.seconds, self.log)
        out = hidden @ InputWait.apply(self.weight, self.seconds, self.log)
        return out.double().sum() if self.part.has_head else out


def run_waits(pipeline: PipelineConfig, pp: int, n_micro_batches: int, seconds: float) -> Waited:
    """One timed step over real processes, after one without sleeps that opens connections. All ranks call it."""
    import torch.distributed as dist

    from parallel.mesh import close_mesh, open_mesh
    from parallel.pipeline.run import ScheduledStage, ignore
    from parallel.pipeline.schedule import build_schedule
    from parallel.pipeline.stages import meta_example

    mesh = open_mesh(SimpleNamespace(pp=pp), 120)  # type: ignore[arg-type]
    log, ranks = Log(), stage_ranks(pipeline, pp)
    parts = [Part(stage, len(ranks), range(stage, stage + 1)) for stage, rank in enumerate(ranks) if rank == mesh.rank]
    modules = [WaitingStage(part, 0.0, log) for part in parts]
    hidden = meta_example(SHAPE, torch.float32)
    stages = [ScheduledStage(each, mesh.pp, hidden, mesh.device, ignore) for each in modules]  # type: ignore[arg-type]
    schedule = build_schedule(pipeline, stages, n_micro_batches, lambda loss, _: loss)
    numbers = torch.arange(n_micro_batches)
    first = (numbers,) if parts[0].has_embedding else ()
    found = Waited(0.0, 0.0, 0.0, 0)
    for wait in (0.0, seconds):
        for each in modules:
            each.seconds = wait
        log.__init__()
        dist.barrier()
        began = time.perf_counter()
        schedule.step(*first, target=numbers, return_outputs=False, number=numbers)
        found = Waited(time.perf_counter() - began, log.forward, log.backward, log.n_passes)
    close_mesh()
    return found
