"""Runs that reduce gradients in several buckets (`parallel.grad_reduce`), and faults to plant in them."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from data.dataset import open_dataset
from launcher.config.tree import RunConfig
from layout_runs import LayoutResult, RankResult, merge, rank_result
from parallel.sizes import DEFAULT_SIZES

SIZES = dataclasses.replace(DEFAULT_SIZES, reduced=2000)  # the embedding and the experts have buckets of their own

# Faults for runs and for proofs, each with the check of the proof that must fail.
FAULTS = {
    "a bucket reduced twice": "gradients",
    "parts of a bucket shifted": "gradients",
    "a micro-batch left out": "gradients",
    "the wire's division missing": "gradients",
}
OVERWRITTEN = "a pass's gradients written over those of the pass before"  # for runs that reduce after the last pass
ROUNDED = "what is received is summed in bf16"


def train_each(configs: Sequence[RunConfig], faults: Sequence[str | None]) -> list[RankResult]:
    """Trains each config for train.steps updates from step 0, with its fault; one rank's results.

    All ranks call it, and all configs must have the same degrees.
    """
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(configs[0].parallel, 120)
    results = []
    for config, fault in zip(configs, faults, strict=True):
        dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
        engine = build_engine(config, mesh, SIZES)
        engine.initialize_weights(config.seed)
        assert not engine.sharding.sums_here or len(engine.base.param_groups) > 4
        state = TrainState()
        with planted(fault):
            rows = [run_step(config, engine, dataset, state).row for _ in range(config.train.steps)]
        results.append(rank_result(engine, rows))
    close_mesh()
    return results


def run_each(
    configs: Sequence[RunConfig], n_ranks: int, faults: Sequence[str | None] | None = None
) -> list[LayoutResult]:
    """The result of each config's run, all on the same ``n_ranks`` processes; ``faults`` has one (or None) for each."""
    from parallel.processes.start import run_ranks

    faults = faults or [None] * len(configs)
    by_rank = run_ranks(train_each, n_ranks, configs, faults, timeout_seconds=240, threads=1)
    return [merge([seen[number] for seen in by_rank]) for number in range(len(configs))]


@contextmanager
def in_ranks(fault: str) -> Iterator[None]:
    """A context in which the fault is planted in the ranks of a proof, but not in its plain process."""
    with planted(fault if "RANK" in os.environ else None):
        yield


def planted(fault: str | None) -> Any:
    """A context in which the reduction of gradients is broken in the named way; None breaks nothing."""
    from parallel.zero.buckets import Bucket, Flight, WholeBucket
    from parallel.zero.scattered import Zero1Scattered

    add, reduce = Bucket.add, Zero1Scattered.reduce
    match fault:
        case None:
            return patch.object(Bucket, "add", add)
        case "a bucket reduced twice":

            def twice(self: Any, bucket: Any) -> None:
                made = dict(bucket.made)
                reduce(self, bucket)
                if bucket is self.buckets[0]:
                    bucket.made.update(made)
                    reduce(self, bucket)

            return patch.object(Zero1Scattered, "reduce", twice)
        case "parts of a bucket shifted":
            return patch.object(Bucket, "add", lambda self, part: add(self, part.roll(1)))
        case "a micro-batch left out":
            return patch.object(Bucket, "add", lambda self, part: add(self, part if self.is_begun else 0 * part))
        case "the wire's division missing":
            end = Bucket.end
            return patch.object(Bucket, "end", lambda self, factor: end(self, 1.0))
        case "a pass's gradients written over those of the pass before":
            take = WholeBucket.take

            def over(self: Any, weight: Any) -> None:
                self.begun.discard(weight)
                take(self, weight)

            return patch.object(WholeBucket, "take", over)
        case "what is received is summed in bf16":

            def rounding(self: Any) -> None:
                self.work.wait()
                part: Tensor = self.received.view(self.bucket.axis.degree, -1).to(torch.bfloat16).sum(0)
                self.bucket.add(part)

            return patch.object(Flight, "land", rounding)
        case _:
            raise AssertionError(f"no fault named {fault!r}")
