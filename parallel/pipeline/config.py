"""The configuration of pipeline schedules: plain values, no torch.

In all of them ``layers`` is the number of layers of each stage, in the model's order; None spreads the layers evenly,
with the embedding and the head counted as shares of a layer.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from annotated_types import Interval

Layers = tuple[Annotated[int, Interval(ge=1, le=10_000)], ...]


@dataclass(frozen=True, kw_only=True)
class OneFOneB:
    """One stage a rank; forward and backward passes alternate (PipeDream-Flush, arXiv:2006.09503)."""

    name: Literal["1f1b"] = "1f1b"  # the order of the stages' forward and backward passes
    # layers of each stage, in order; None: even by cost
    layers: Layers | None = field(default=None, metadata={"usual": 1})


@dataclass(frozen=True, kw_only=True)
class Interleaved:
    """``n_chunks`` stages a rank, dealt out in turn: a smaller bubble (Narayanan et al. 2021, arXiv:2104.04473)."""

    name: Literal["interleaved"] = "interleaved"
    n_chunks: Annotated[int, Interval(ge=1, le=1024)] = 2  # stages of each rank
    layers: Layers | None = field(default=None, metadata={"usual": 1})


@dataclass(frozen=True, kw_only=True)
class ZBV:
    """Two stages a rank in a V; weights' gradients fill the bubble (Qi et al. 2024, arXiv:2405.15362)."""

    name: Literal["zbv"] = "zbv"
    layers: Layers | None = field(default=None, metadata={"usual": 1})


@dataclass(frozen=True, kw_only=True)
class DualPipeV:
    """Two stages a rank in a V, forward and backward passes of two micro-batches in pairs (arXiv:2412.19437).

    torch runs the two of a pair one after the other, so what is gained is the smaller bubble, no hidden communication.
    """

    name: Literal["dualpipev"] = "dualpipev"
    layers: Layers | None = field(default=None, metadata={"usual": 1})


PipelineConfig = OneFOneB | Interleaved | ZBV | DualPipeV
SCHEDULES: tuple[PipelineConfig, ...] = tuple(schedule() for schedule in get_args(PipelineConfig))


def chunks(config: PipelineConfig) -> int:
    """The number of stages that each pp rank holds."""
    match config:
        case OneFOneB():
            return 1
        case Interleaved(n_chunks=n_chunks):
            return n_chunks
        case ZBV() | DualPipeV():
            return 2


def splits_backward(config: PipelineConfig) -> bool:
    """Whether the schedule computes gradients of inputs and of weights at different times."""
    return isinstance(config, ZBV | DualPipeV)


def stage_ranks(config: PipelineConfig, pp: int) -> list[int]:
    """The pp rank that holds each stage, by stage: 0, 1, ..., pp - 1, again from 0 with ``n_chunks``, or back in a V.

    In a V (zbv, dualpipev) rank 0 holds the first and the last stage. Without a pipeline there is one stage, whatever
    the schedule.
    """
    if pp == 1:
        return [0]
    if splits_backward(config):
        return [*range(pp), *reversed(range(pp))]
    return [stage % pp for stage in range(pp * chunks(config))]
