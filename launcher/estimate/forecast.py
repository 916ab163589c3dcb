"""Forecast of a run by tracing: the memory of a rank at each pipeline position, and the time of a step.

Memory is measured in a whole step of `train` over fake tensors (launcher.estimate.whole_step). Time is that of one
micro-batch's traced operations at the hardware's rates (launcher.estimate.step), for each position; a pipeline's
positions wait for each other in the schedule's own order (launcher.estimate.order).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from launcher.closed_form.own import ours_of
from launcher.config.tree import RunConfig
from launcher.estimate.order import Passes, Simulated, simulate
from launcher.estimate.step import ACCUMULATE, Estimate, check_known, estimate_position
from launcher.estimate.whole_step import ON_GPU, StepMemory, measure_memory
from launcher.trace.hardware import Hardware
from launcher.trace.roofline import least_seconds
from parallel.mesh import Degrees
from parallel.pipeline.config import chunks

TRACED = 3  # micro-batches traced without a pipeline: from the second one on, each finds memory in the same state


@dataclass
class Position:
    """The forecast of one pipeline position, made for its first rank."""

    rank: int
    memory: StepMemory
    time: Estimate
    passes: Passes
    update_seconds: float  # work done once a step: sums over the replicas, the optimizer


@dataclass
class Forecast:
    """The forecast of one step on ``world_size`` GPUs."""

    config: RunConfig
    hardware: Hardware
    world_size: int
    imbalance: float
    positions: list[Position]
    order: Simulated  # of the passes

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, until the last position has updated its weights."""
        return max(end + each.update_seconds for end, each in zip(self.order.ends, self.positions, strict=True))

    @property
    def fullest(self) -> Position:
        """The position whose rank holds most."""
        return max(self.positions, key=lambda each: each.memory.peak)


def forecast(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    imbalance: float = 1.0,
    tell: Callable[[str], None] = lambda line: None,
    *,
    sampled: bool = False,
) -> Forecast:
    """The forecast of a step. The device must be open (launcher.estimate.device), and this process in no process group.

    ``imbalance`` is how many times the mean number of rows arrives at a rank over ep. With ``sampled``, of all pipeline
    positions with equal numbers of layers of each kind, and neither embedding nor head, only the one that holds the
    most by closed forms is traced, and stands for the others. Raises UserError where the config cannot be traced.
    """
    check_known(config)
    gpu, traced = torch.device("cuda", 0), dict[int, Position]()
    stages = Degrees.of(config.parallel, world_size).stages()
    stand_ins = ours_of(config, world_size).stand_ins() if sampled else range(len(stages))
    for pp_rank in sorted(set(stand_ins)):
        ranks = stages[pp_rank]
        where = f"pipeline position {pp_rank} of {config.parallel.pp}" if config.parallel.pp > 1 else "the model"
        tell(f"{where}: a whole step without memory")
        memory = measure_memory(shortened(config, world_size), world_size, ranks[0], gpu, ON_GPU, imbalance)
        tell(f"{where}: the time of one micro-batch")
        time = estimate_position(config, world_size, pp_rank, ranks[0], hardware)
        traced[pp_rank] = Position(ranks[0], memory, time, passes_of(time), update_seconds(time))
    found = [traced[each] for each in stand_ins]
    n_micro_batches = found[0].time.n_micro_batches
    order = simulate(config.parallel.pipeline, [each.passes for each in found], n_micro_batches)
    return Forecast(config, hardware, world_size, imbalance, found, order)


def shortened(config: RunConfig, world_size: int) -> RunConfig:
    """The config with only as many micro-batches as its memory depends on.

    Without a pipeline these are a few, since all later ones find the same. With one they are all, since torch keeps a
    buffer for each.
    """
    train, dp = config.train, Degrees.of(config.parallel, world_size).dp
    one = dp * train.micro_batch_size
    largest = train.batches.sizes[-1]
    n_samples = largest if config.parallel.pp > 1 else min(largest, TRACED * one)
    return dataclasses.replace(
        config, train=dataclasses.replace(train, global_batch_size=n_samples, batch_ramp=None, steps=2)
    )


def passes_of(estimate: Estimate) -> Passes:
    """The times of one micro-batch's forward and backward pass through one stage of a position, and of a hop."""
    n_stages = chunks(estimate.config.parallel.pipeline) if estimate.config.parallel.pp > 1 else 1
    ops = [*estimate.traced.ops, *(op for op in estimate.update if op.work.name == ACCUMULATE)]
    forward = sum(least_seconds(op, estimate.rates)[0] for op in ops if op.phase == "forward")
    whole = sum(least_seconds(op, estimate.rates)[0] for op in ops)
    return Passes(forward / n_stages, (whole - forward) / n_stages, hop_seconds(estimate))


def hop_seconds(estimate: Estimate) -> float:
    """Seconds in which one micro-batch's hidden states are sent to the next position; 0 without a pipeline."""
    config, rates = estimate.config, estimate.rates
    if config.parallel.pp == 1:
        return 0.0
    positions = config.data.seq_len // (config.parallel.cp * config.parallel.tp)
    size = 4 if config.train.precision == "fp32" else 2
    n_bytes = config.train.micro_batch_size * positions * config.model.d_model * size
    return n_bytes / rates.wire_rate("communication: pp")


def update_seconds(estimate: Estimate) -> float:
    """Seconds of the work done once a step. A pipeline's messages are left out: they count between its passes."""
    ops = [op for op in estimate.update if op.work.name != ACCUMULATE and op.part != "communication: pp"]
    return sum(least_seconds(op, estimate.rates)[0] for op in ops)
