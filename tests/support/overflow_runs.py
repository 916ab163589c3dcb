"""fp16 runs in which one rank after another has an infinite gradient that no other rank has."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from launcher.config.tree import RunConfig
from layout_runs import RankResult, rank_result

FIRST_OVERFLOW = 2  # the step in which rank 0's gradient overflows; rank r's does r steps later
KINDS = (".experts.", "norm", "embed.weight", "router")  # the kind of weight whose gradient overflows, by rank


@dataclass
class OverflowResult:
    """One rank's result, and hashes of the 16-bit weights that it holds at the end."""

    result: RankResult
    held: dict[tuple[str, tuple[int, ...]], str]  # weight, start of the box -> hash of the 16-bit elements held


def overflow_rank(config: RunConfig, fault: str | None) -> OverflowResult:
    """One rank: trains train.steps steps, in one of which this rank's own gradient is infinite."""
    from data.dataset import open_dataset
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(config.parallel, 120)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    engine = build_engine(config, mesh)
    engine.initialize_weights(config.seed)
    state = TrainState()
    break_gradients(engine, state)
    if fault is not None:
        plant(fault, engine)
    rows = [run_step(config, engine, dataset, state).row for _ in range(config.train.steps)]
    result = OverflowResult(rank_result(engine, rows), held_weights(engine))
    close_mesh()
    return result


def break_gradients(engine: Any, state: Any) -> None:
    """Makes one weight's gradient infinite on this rank in its step, before any rank has reduced it."""
    rank = engine.mesh.rank
    named = list(engine.model.named_parameters())
    kind = KINDS[rank % len(KINDS)]
    weight = next((weight for name, weight in named if kind in name), named[-1][1])

    def is_due() -> bool:
        return state.step + 1 == FIRST_OVERFLOW + rank

    if engine.pipeline is None:
        weight.register_hook(lambda gradient: gradient * float("inf") if is_due() else gradient)
        return
    after_backward = engine.sharding.after_backward

    def broken(stage: Any) -> None:  # zero-bubble schedules call no autograd hooks
        if is_due() and weight.grad is not None:
            weight.grad.mul_(float("inf"))
        after_backward(stage)

    engine.sharding.after_backward = broken


def plant(fault: str, engine: Any) -> None:
    """Breaks the agreement of the ranks on an overflow in the named way."""
    import parallel.zero.norm as norm

    match fault:
        case "overflow seen by one rank only":
            optimizer = engine.sharding.optimizer
            serial = optimizer.has_overflow_partitioned_grads_serial
            optimizer.has_overflow = lambda partition_gradients=True: bool(serial())
            original = norm.dist.all_reduce

            def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
                if tensor.dtype == torch.float64 and not tensor.ndim:
                    return None  # the norm's sum of squares: each rank keeps its own
                return original(tensor, *arguments, **options)

            norm.dist.all_reduce = all_reduce
        case "one rank's scale is not lowered":
            if engine.mesh.rank == 1:
                engine.sharding.loss_scale.after_step = lambda overflowed: None
        case _:
            raise AssertionError(fault)


def held_weights(engine: Any) -> dict[tuple[str, tuple[int, ...]], str]:
    """(name, start of the box) -> the hash of each weight as this rank computes with it. All ranks call it."""
    import deepspeed

    named = list(engine.model.named_parameters())
    with deepspeed.zero.GatheredParameters([weight for _, weight in named], enabled=engine.zero == 3):
        return {(name, tuple(engine.layout[name].held_box(engine.mesh).start)): _hash(weight) for name, weight in named}


def _hash(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
