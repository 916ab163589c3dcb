"""Traces the work of a whole step at each pipeline position over fake tensors, in a process of its own."""

import dataclasses
import logging
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from launcher.config.checked import load_checked
from launcher.config.tree import RunConfig
from launcher.estimate.samples import WholeSequences
from launcher.estimate.serve import serve
from launcher.estimate.values import KnownValues
from launcher.estimate.whole_step import fake_rank
from launcher.processor.ops import Amounts, Ask, StepRecorder
from launcher.profile.run import watched
from launcher.profile.twins import WatchedEngine
from launcher.trace.regions import Regions
from launcher.training.compiling import fuse_of
from launcher.training.loop import build_engine, run_step
from launcher.training.state import TrainState
from parallel.mesh import Degrees


def main() -> None:
    """Reads the request from standard input; the answer is the last line of standard output."""
    serve(answer_to)


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """The work of the first rank's step at each pipeline position, as JSON. Raises UserError for a wrong config."""
    torch._C._set_multithreading_enabled(False)  # the fake tensors' mode is not set in autograd's other threads
    logging.disable(logging.WARNING)
    world_size = request["world_size"]
    config = load_checked(request["config"], request["overrides"], world_size=world_size, data=False)
    first = [ranks[0] for ranks in Degrees.of(config.parallel, world_size).stages()]
    return {"positions": [as_rows(trace_step(config, world_size, rank)) for rank in first]}


def as_rows(found: dict[Ask, Amounts]) -> list[list[Any]]:
    """The work as rows for JSON."""
    return [[*ask, *amounts] for ask, amounts in found.items()]


def from_rows(rows: list[list[Any]]) -> dict[Ask, Amounts]:
    """The inverse of ``as_rows``."""
    return {
        Ask(phase, kind, dtype, tuple(shape), level): Amounts(calls, units)
        for phase, kind, dtype, shape, level, calls, units in rows
    }


class DrawnChoices(KnownValues):
    """A mode within FakeTensorMode in which each router draws its tokens' experts, and other ranks' draw the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        swapped = name == "c10d::alltoall_base_"
        sent = [(each, self.known.get(each)) for each in tree_leaves(args[:2]) if swapped]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if name == "aten::topk":
            self.learn(out[1], drawn(tuple(args[0].shape), args[1]))
        elif swapped and sent[1][1] is not None and sent[0][0].shape == sent[1][0].shape:
            for each, _ in sent:
                self.learn(each, sent[1][1])
        return out


def drawn(shape: tuple[int, ...], top_k: int) -> torch.Tensor:
    """Indices (..., top_k) into the last dim of ``shape``, drawn with equal chances, the same ones for each call.

    So experts' rows are uneven, as a router's are that balances them on the whole: they fill no block of a kernel.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).topk(top_k).indices


def trace_step(config: RunConfig, world_size: int, rank: int) -> dict[Ask, Amounts]:
    """The work of a rank's step. To be called in a process without a process group.

    After a first step, which allocates what stays, two steps with few micro-batches are traced. Their difference is the
    work of further micro-batches, by which the result is extended to the step's full number.
    """
    n = micro_batches_of(config, world_size)
    fewer = min(n, config.parallel.pp)
    more = min(n, 2 * fewer)
    samples, regions, found = WholeSequences(config), Regions(), []
    with fake_rank(config, world_size, rank, torch.device("cpu"), DrawnChoices()) as mesh:
        engine = build_engine(config, mesh, engine_class=WatchedEngine, fuse=fuse_of("off", "cpu"))
        assert isinstance(engine, WatchedEngine)
        engine.publish_weights()
        with watched(engine, regions), regions.within("bookkeeping"):
            for count in (more, *sorted({fewer, more}, reverse=True)):
                shorter = with_micro_batches(config, world_size, count)
                with StepRecorder(regions) as recorder:
                    run_step(shorter, engine, samples, TrainState())  # type: ignore[arg-type]
                found.append(recorder.found())
    found = found[1:]  # what stays was allocated in the first
    return found[0] if more == n else extended(found[1], found[0], (n - fewer) / (more - fewer))


def micro_batches_of(config: RunConfig, world_size: int) -> int:
    """The number of micro-batches that each rank computes in a step of the largest batch."""
    train = config.train
    return train.batches.sizes[-1] // (Degrees.of(config.parallel, world_size).dp * train.micro_batch_size)


def with_micro_batches(config: RunConfig, world_size: int, count: int) -> RunConfig:
    """The config with a batch of ``count`` micro-batches for each rank of dp."""
    size = count * Degrees.of(config.parallel, world_size).dp * config.train.micro_batch_size
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=size, batch_ramp=None))


def extended(less: dict[Ask, Amounts], more: dict[Ask, Amounts], times: float) -> dict[Ask, Amounts]:
    """``less`` plus ``times`` the difference between ``more`` and ``less``, for each kind of work."""
    none = Amounts(0, 0.0)
    found = {}
    for ask in {**less, **more}:
        one, other = less.get(ask, none), more.get(ask, none)
        calls, units = (a + times * (b - a) for a, b in zip(one, other, strict=True))
        found[ask] = Amounts(max(0, round(calls)), max(0.0, units))
    return found
