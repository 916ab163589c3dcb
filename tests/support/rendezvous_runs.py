"""Records the communications of each rank in real runs, of pipelines alone and of whole trainings."""

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from gather_runs import hash_in_order_of_use
from late_collectives import late_collectives
from launcher.config.tree import RunConfig
from modeling.config import ModelConfig
from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.rules import pipeline_problems
from parallel.processes.start import run_ranks
from pp_runs import Case, batch_of, build_pipeline, micro_batches
from rendezvous import Queue, recording, recording_threads

STEPS = 2  # in the first step torch's stages also exchange shapes


@dataclass(frozen=True)
class Drawn:
    """A schedule and its number of micro-batches."""

    pipeline: PipelineConfig
    n_micro: int

    def is_legal(self, pp: int) -> bool:
        """Whether the config's rules allow it with ``pp`` ranks in the pipeline."""
        sizes = {"n_layers": 99, "zero": 0, "micro_batch_size": 1, "dp": 1, "global_batch_size": self.n_micro}
        return not list(pipeline_problems(self.pipeline, pp=pp, **sizes))


def queues(pp: int, drawn: Sequence[Drawn], fault: str | None = None) -> list[list[Queue]]:
    """For each of ``drawn``, every rank's queue of communications in two training steps and an evaluation."""
    by_rank = run_ranks(begun_in_rank, pp, pp, drawn, fault, timeout_seconds=280, threads=1)
    return [list(each) for each in zip(*by_rank, strict=True)]


def begun_in_rank(pp: int, drawn: Sequence[Drawn], fault: str | None) -> list[Queue]:
    """This rank's queue of communications for each of ``drawn``."""
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(SimpleNamespace(pp=pp), 240)
    found = [begun_in(mesh, each, fault) for each in drawn]
    close_mesh()
    return found


def begun_in(mesh: Any, drawn: Drawn, fault: str | None) -> Queue:
    """This rank's queue of communications in one pipeline, of a model with one layer in each stage."""
    n_layers = len(stage_ranks(drawn.pipeline, mesh.pp.degree))
    model = ModelConfig(vocab_size=32, d_model=8, n_layers=n_layers, n_heads=1, n_kv_heads=1, d_head=8, d_ff=8)
    case = Case(model, drawn.pipeline, pp=mesh.pp.degree, n_micro=drawn.n_micro, micro_batch_size=1)
    _, pipeline, _ = build_pipeline(case, mesh)
    if fault == "one by one":
        pipeline.exchange = lambda *arguments: one_by_one(pipeline, *arguments)
    with recording() as queue:
        for step in range(STEPS):
            pipeline.train(micro_batches(batch_of(case, step))[0], 1.0)
        pipeline.evaluate(micro_batches(batch_of(case, STEPS))[0])
    return queue


def one_by_one(pipeline: Any, made: Any, due: Any, time: int, ranks: Sequence[int]) -> Any:
    """A fault: an exchange whose transfers are started one after another, which completes on gloo."""
    batch = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda all_: [each.op(each.tensor, each.peer, group=each.group) for each in all_]
    try:
        return type(pipeline).exchange(pipeline, made, due, time, ranks)
    finally:
        dist.batch_isend_irecv = batch


def queues_of_run(config: RunConfig, n_ranks: int, fault: str | None = None) -> dict[str, list[Queue]]:
    """Trains a whole run; thread's name -> every rank's queue of communications in that thread."""
    by_rank = in_ranks_of_run(begun_in_run, config, n_ranks, fault)
    threads = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
    return {name: [of_rank.get(name, []) for of_rank in by_rank] for name in threads}


def in_ranks_of_run(work: Callable[..., Any], config: RunConfig, n_ranks: int, fault: str | None = None) -> list[Any]:
    """The results of ``work(config, fault)`` in each rank of a run whose directory is made here."""
    from launcher.training.run_dir import claim

    with claim(config):
        preload = ["launcher.training.loop"]
        return run_ranks(work, n_ranks, config, fault, timeout_seconds=280, threads=1, preload=preload)


def begun_in_run(config: RunConfig, fault: str | None) -> dict[str, Queue]:
    """This rank's queues of communications in the run, by thread."""
    import launcher.training.loop as loop

    if fault is not None:
        run_step = loop.run_step

        def faulty(config: RunConfig, engine: Any, *arguments: Any) -> Any:
            begin_out_of_order(engine.mesh)
            return run_step(config, engine, *arguments)

        loop.run_step = faulty
    with recording_threads() as queues:
        assert loop.train(config, []) == 0
    return dict(queues)


def late_in_run(config: RunConfig, fault: str | None) -> tuple[dict[str, Queue], list[str]]:
    """This rank's queues in a run whose communications end when they are waited for, and the faults that this shows.

    Sets of weights have another order on every second rank. ``fault`` is one of ``FORGETFUL``.
    """
    hash_in_order_of_use(ascending=int(os.environ["RANK"]) % 2 == 0)
    if fault is not None:
        forget(*FORGETFUL[fault])
    with late_collectives() as found:
        queues = begun_in_run(config, None)
    return queues, list(dict.fromkeys(found))


# What waits for a communication -> the module and the class whose ``wait`` that is.
FORGETFUL = {"rows": ("parallel.collectives", "RowExchange"), "gradients": ("parallel.collectives", "SequenceGather")}


def forget(module: str, name: str) -> None:
    """A fault: a class's ``wait`` returns at once. The wait itself comes at the next call, and the last one never."""
    waiting = getattr(importlib.import_module(module), name)
    wait, owed = waiting.wait, list[Any]()

    def late(self: Any) -> Any:
        for work in owed:
            work.wait()
        owed[:] = [self.under_way[0]]
        self.under_way = None, *self.under_way[1:]
        return wait(self)

    waiting.wait = late


def begin_out_of_order(mesh: Any) -> None:
    """A fault: all-reduces over two axes, started in an order that deadlocks four ranks on one NCCL stream.

    gloo runs each group's all-reduces independently, so they complete there.
    """
    axes = [mesh.tp, mesh.replicas]
    for axis in axes if (mesh.tp.rank + mesh.replicas.rank) % 2 else reversed(axes):
        dist.all_reduce(torch.zeros(1), group=axis.group, async_op=True)
