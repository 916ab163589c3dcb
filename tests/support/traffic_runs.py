"""Counts what every rank sends in one real training step, and compares it with launcher.traffic's closed forms."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from launcher.closed_form.budget import modes_of
from launcher.config.tree import RunConfig
from launcher.traffic.axes import step_traffic
from launcher.traffic.step import Step
from parallel.mesh import Degrees
from parallel.sizes import DEFAULT_SIZES
from traffic_counter import Counted, Key, TrafficCounter

PRELOAD = ("launcher.training.loop",)
SIZES = dataclasses.replace(DEFAULT_SIZES, reduced=2000)  # so that there are several buckets
WARM_UP = 2  # steps before the counted one, after which ZeRO 3 knows the order of the modules


@dataclass
class RankSent:
    """One rank's counts in one step."""

    pp_rank: int
    ep_rank: int
    replica_rank: int
    edp_rank: int
    counted: Counted
    routed: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> its pairs for each expert


def count_rank(configs: Sequence[RunConfig], faults: Sequence[str | None]) -> list[RankSent]:
    """Counts one step of each config's run, with its fault planted. All ranks call it; all degrees must be the same."""
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(configs[0].parallel, 240)
    counter = TrafficCounter(mesh)
    seen = [count_step(config, mesh, counter, fault) for config, fault in zip(configs, faults, strict=True)]
    close_mesh()
    return seen


def count_step(config: RunConfig, mesh: Any, counter: TrafficCounter, fault: str | None) -> RankSent:
    """Counts one step, after WARM_UP others, with the fault planted in it."""
    from data.dataset import open_dataset
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState
    from traffic_faults import planted

    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    engine = build_engine(config, mesh, SIZES)
    engine.initialize_weights(config.seed)
    state = TrainState()
    for _ in range(WARM_UP):
        run_step(config, engine, dataset, state)
    routed = watch_routers(engine.model, config)
    with planted(fault, engine):
        counter.start()
        run_step(config, engine, dataset, state)
        counted = counter.stop()
    return RankSent(mesh.pp.rank, mesh.ep.rank, mesh.replicas.rank, mesh.edp.rank, counted, routed)


def watch_routers(model: Any, config: RunConfig) -> dict[int, torch.Tensor]:
    """Layer -> the number of tokens for each expert, summed up from now on whenever a router chooses."""
    from launcher.prove.compare.routing import routers_of

    routed: dict[int, torch.Tensor] = {}

    def watching(layer: int) -> Any:
        def chosen(_: Any, indices_TK: Any) -> Any:
            routed[layer] += torch.bincount(indices_TK.flatten(), minlength=len(routed[layer]))
            return indices_TK

        return chosen

    for layer, router in routers_of(model).items():
        assert config.model.moe is not None
        routed[layer] = torch.zeros(config.model.moe.n_experts, dtype=torch.int64)
        router.revise_choice = watching(layer)
    return routed


def run_counts(
    configs: Sequence[RunConfig], n_ranks: int, faults: Sequence[str | None] | None = None
) -> list[list[RankSent]]:
    """For each config, every rank's counts. All configs must have the same degrees; ``faults`` has one for each."""
    from parallel.processes.start import run_ranks

    faults = faults or [None] * len(configs)
    by_rank = run_ranks(count_rank, n_ranks, configs, faults, timeout_seconds=400, threads=1, preload=PRELOAD)
    return [[seen[number] for seen in by_rank] for number in range(len(configs))]


def expected(config: RunConfig, ranks: Sequence[RankSent], rank: int) -> dict[Key, Fraction]:
    """The bytes that launcher.traffic predicts for one rank, by axis, purpose and collective."""
    line = next(line for line in Degrees.of(config.parallel, len(ranks)).lines("ep") if rank in line)
    step = Step(
        model=config.model,
        optimizer=config.optimizer,
        parallel=config.parallel,
        world_size=len(ranks),
        seq_len=config.data.seq_len,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        precision=config.train.precision,
        recompute=modes_of(config, len(ranks)),
        pp_rank=ranks[rank].pp_rank,
        ep_rank=ranks[rank].ep_rank,
        replica_rank=ranks[rank].replica_rank,
        edp_rank=ranks[rank].edp_rank,
        sizes=SIZES,
        routed={layer: [ranks[other].routed[layer].tolist() for other in line] for layer in ranks[rank].routed},
    )
    return {(term.axis, term.what, term.collective): term.sent_bytes for term in step_traffic(step)}


def problems(config: RunConfig, ranks: Sequence[RankSent]) -> list[str]:
    """A line for each count on any rank that differs from its closed form, and each unexplained or missed one."""
    found = []
    for rank, seen in enumerate(ranks):
        forms, sent = expected(config, ranks, rank), seen.counted.sent
        found += [f"rank {rank}: {stranger}" for stranger in seen.counted.strangers]
        found += [f"rank {rank}: {seen.counted.missed} operations were not seen"] * (seen.counted.missed != 0)
        for key in sorted({*forms, *sent}):
            if forms.get(key) != sent.get(key):
                found.append(f"rank {rank}: {', '.join(key)}: sent {sent.get(key)}, the form says {forms.get(key)}")
    return found
