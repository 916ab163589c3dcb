"""Measures gradient errors and memory of each `parallel.grad_reduce`, ZeRO 1 on four processes. Prints one JSON line.

    python benchmarks/grad_reduce.py [--steps 20]

A MoE model of 0.76 million weights in bf16, four micro-batches a rank, the same tokens for each way of
`parallel.grad_reduce`. For each way: relative L2 errors of the first step's gradients, and of the worst tensor, against
sums in fp64 of the micro-batches' own gradients, which are bf16 numbers; the largest relative difference of a loss in
--steps updates by AdamW from that of `step`; bytes of sums that a rank holds. Also computed from the same gradients are
the errors of other reductions: each rank's sums rounded to bf16 once, then added up in fp32 (``sums_in_bf16``) or in
bf16, as a ring of bf16 does (``ring_in_bf16``); and the latter for each micro-batch (``each_ring_in_bf16``).
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

RANKS, MICRO_BATCHES, BATCH, SEQ_LEN, VOCAB = 4, 4, 2, 128, 1024
BUCKET = 50_000
WAYS: dict[str, dict[str, Any]] = {
    "step": {},
    "last_micro_batch": {"grad_reduce": "last_micro_batch"},
    "micro_batch": {"grad_reduce": "micro_batch"},
    "micro_batch, bf16": {"grad_reduce": "micro_batch", "grad_reduce_dtype": "bf16"},
}
LR = 1e-3


def main() -> None:
    from parallel.processes.start import run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    seen = run_ranks(measure, RANKS, steps, timeout_seconds=1500, threads=1)
    exact, others = exact_and_others([each["passes"] for each in seen])
    found: dict[str, Any] = {name: errors(gradients, exact) for name, gradients in others.items()}
    for name in WAYS:
        found[name] = errors(whole(each[name]["gradients"] for each in seen), exact)
        losses = zip(seen[0][name]["losses"], seen[0]["step"]["losses"], strict=True)
        found[name]["loss"] = max(abs(ours - wanted) / wanted for ours, wanted in losses)
        found[name]["sums_mb"] = max(each[name]["sums"] for each in seen) / 1e6
    print(
        json.dumps(
            {"benchmark": "grad_reduce", "steps": steps, "weights": sum(e.numel() for e in exact.values()), **found}
        )
    )


def measure(steps: int) -> dict[str, Any]:
    """This rank's results for each way (gradients of the first step, bytes of sums, losses), and each pass's gradients.

    All ranks call it.
    """
    from parallel.config import ParallelConfig
    from parallel.mesh import open_mesh

    mesh = open_mesh(ParallelConfig(), 900)
    found: dict[str, Any] = {"passes": passes(mesh)}
    for name, how in WAYS.items():
        found[name] = train(mesh, ParallelConfig(**how), steps)
    return found


def build(mesh: Any, parallel: Any) -> Any:
    from modeling.config import ModelConfig
    from modeling.moe_config import MoEConfig, SequenceAuxBalance
    from modeling.optimizers.adamw import AdamWConfig
    from parallel.sizes import DEFAULT_SIZES
    from parallel.zero.engine import Engine

    moe = MoEConfig(n_experts=8, top_k=2, d_ff=64, balance=SequenceAuxBalance(coefficient=1e-3))
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": 128,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "d_ff": 256,
    }
    model = ModelConfig(family="qwen3_moe", qk_norm=True, moe=moe, **sizes)
    how: dict[str, Any] = {"parallel": parallel, "precision": "bf16", "micro_batch_size": BATCH}
    engine = Engine(mesh, model, AdamWConfig(lr=LR), **how, sizes=dataclasses.replace(DEFAULT_SIZES, reduced=BUCKET))
    engine.initialize_weights(0)
    return engine


def forward(engine: Any, step: int, micro_batch: int) -> tuple[Tensor, float]:
    """The summed loss of random tokens, of which lower ids are more frequent, and its weight in the step's mean."""
    from modeling.context import Context

    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + engine.mesh.rank)
    drawn = torch.rand(BATCH, SEQ_LEN + 1, generator=generator) ** 4 * VOCAB
    tokens_BS, targets_BS = drawn.long()[:, :-1], drawn.long()[:, 1:]
    positions_BS = torch.arange(SEQ_LEN).expand(BATCH, SEQ_LEN)
    scale = engine.loss_factor / (RANKS * MICRO_BATCHES * BATCH)
    context = Context(positions_BS, torch.zeros_like(tokens_BS), balance_scale=scale)
    return engine.model(tokens_BS, context, targets_BS).loss, 1 / (RANKS * MICRO_BATCHES * BATCH * SEQ_LEN)


def train(mesh: Any, parallel: Any, steps: int) -> dict[str, Any]:
    """Trains ``steps`` updates; returns the first one's gradients, all losses, and the bytes of sums held."""
    from launcher.prove.compare.gradients import gradient_boxes

    engine, losses = build(mesh, parallel), []
    first: list[Any] = []
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(MICRO_BATCHES):
            loss, weight = forward(engine, step, number)
            engine.backward(loss, weight, last=number == MICRO_BATCHES - 1)
            total += loss.detach() * weight
        first = first or gradient_boxes(engine)
        engine.step(LR)
        torch.distributed.all_reduce(total)
        losses.append(float(total))
    return {"gradients": first, "losses": losses, "sums": held(engine, parallel)}


def held(engine: Any, parallel: Any) -> int:
    """Bytes of fp32 sums that a rank holds between passes, by a closed form that tests check against real engines."""
    from launcher.plan.memory import rank_memory
    from launcher.traffic.step import Step
    from parallel.sizes import DEFAULT_SIZES

    step = Step(
        model=engine.model_config,
        optimizer=engine.rule,
        parallel=parallel,
        world_size=RANKS,
        seq_len=SEQ_LEN,
        global_batch_size=RANKS * MICRO_BATCHES * BATCH,
        micro_batch_size=BATCH,
        precision="bf16",
        recompute="none",
        sizes=dataclasses.replace(DEFAULT_SIZES, reduced=BUCKET),
    )
    return rank_memory(step).gradients


def passes(mesh: Any) -> list[dict[str, Tensor]]:
    """The gradients of each of this rank's micro-batches in the first step, as autograd computes them."""
    from parallel.config import ParallelConfig

    engine, made = build(mesh, ParallelConfig()), []
    for number in range(MICRO_BATCHES):
        loss, weight = forward(engine, 0, number)
        weights = dict(engine.model.named_parameters())
        found = torch.autograd.grad(loss * (weight * engine.loss_factor), list(weights.values()))
        made.append({name: each / RANKS for name, each in zip(weights, found, strict=True)})
    return made


def exact_and_others(by_rank: list[list[dict[str, Tensor]]]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The gradients summed over ranks and micro-batches in fp64, and as other reductions would sum them."""

    def added(parts: Iterable[Tensor]) -> Tensor:
        return reduce(torch.add, list(parts))

    exact: dict[str, Tensor] = {}
    others: dict[str, dict[str, Tensor]] = {name: {} for name in ("sums_in_bf16", "ring_in_bf16", "each_ring_in_bf16")}
    for name in by_rank[0][0]:
        sums = [added(made[name].float() for made in passes) for passes in by_rank]
        exact[name] = added(made[name].double() for passes in by_rank for made in passes)
        others["sums_in_bf16"][name] = added(each.bfloat16().float() for each in sums)
        others["ring_in_bf16"][name] = added(each.bfloat16() for each in sums)
        rings = [added(passes[number][name] for passes in by_rank) for number in range(MICRO_BATCHES)]
        others["each_ring_in_bf16"][name] = added(each.float() for each in rings)
    return exact, others


def whole(by_rank: Iterable[list[Any]]) -> dict[str, Tensor]:
    """The whole gradients, put together from all ranks' parts."""
    boxes = [box for boxes in by_rank for box in boxes]
    found: dict[str, Tensor] = {}
    for name in {box.name for box in boxes}:
        mine = [box for box in boxes if box.name == name]
        ends = [max(box.box.start[dim] + box.box.shape[dim] for box in mine) for dim in range(mine[0].value.ndim)]
        found[name] = torch.empty(ends)
        for box in mine:
            found[name][box.box.slices] = box.value
    return found


def errors(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 errors: of all gradients together, and of the tensor that is farthest off."""
    off = {name: float((gradients[name].double() - each).norm()) for name, each in exact.items()}
    norms = {name: float(each.norm()) for name, each in exact.items()}
    all_off, all_norm = (sum(each**2 for each in values.values()) ** 0.5 for values in (off, norms))
    return {"gradients": all_off / all_norm, "worst_tensor": max(off[name] / norms[name] for name in exact)}


if __name__ == "__main__":
    main()
