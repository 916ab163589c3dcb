"""What follows from a config and a number of ranks alone: parameters, FLOPs, the layout, each rank's training state."""

from dataclasses import asdict
from typing import Any

from launcher.closed_form.budget import modes_of, told
from launcher.config.tree import RunConfig
from launcher.plan.memory import rank_memory
from launcher.traffic.step import Step
from modeling.counts import count_parameters, flops_per_token
from parallel.mesh import Degrees


def describe_model(config: RunConfig) -> dict[str, Any]:
    """Numbers of parameters, and the FLOPs of training on one token by the closed form that MFU uses."""
    counts = count_parameters(config.model)
    flops = flops_per_token(config.model, config.data.seq_len)
    return {"parameters": counts.total, "active_parameters": counts.active, "flops_per_token": flops}


def describe_layout(config: RunConfig, n_ranks: int) -> dict[str, Any]:
    """The axes' degrees, the ZeRO stage, a rank's micro-batches in a step, and which layers recompute activations."""
    degrees, train = Degrees.of(config.parallel, n_ranks), config.train
    axes = {axis: getattr(degrees, axis) for axis in ("pp", "dp", "cp", "tp", "ep", "edp")}
    micro_batches = train.global_batch_size // (degrees.dp * train.micro_batch_size)
    recompute = told(modes_of(config, n_ranks))
    sizes = {"zero": config.parallel.zero, "micro_batches_per_rank": micro_batches, "recompute": recompute}
    return {"ranks": n_ranks, **axes, **sizes}


def describe_memory(config: RunConfig, n_ranks: int) -> list[dict[str, Any]]:
    """One row for each pipeline position: its first and last rank, what each holds in words, and its bytes by part."""
    rows = []
    for pp_rank, ranks in enumerate(Degrees.of(config.parallel, n_ranks).stages()):
        step = step_of_rank(config, n_ranks, pp_rank)
        memory = rank_memory(step)
        rows.append(
            {"pp_rank": pp_rank, "ranks": [ranks[0], ranks[-1]], "holds": holdings(step)}
            | {f"{part}_bytes": count for part, count in asdict(memory).items()}
            | {"total_bytes": memory.total}
        )
    return rows


def step_of_rank(config: RunConfig, n_ranks: int, pp_rank: int) -> Step:
    """One training step as the ranks at a pipeline position see it."""
    return Step(
        model=config.model,
        optimizer=config.optimizer,
        parallel=config.parallel,
        world_size=n_ranks,
        seq_len=config.data.seq_len,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        precision=config.train.stored,
        recompute=modes_of(config, n_ranks),
        pp_rank=pp_rank,
        keeps_cut_weights=config.train.fp8_keep_weights and config.train.precision == "fp8",
    )


def holdings(step: Step) -> str:
    """The layers that a rank holds, and which share of experts, heads and vocabulary, in words."""
    model, parallel = step.model, step.parallel
    spans = [f"{part.layers[0]}-{part.layers[-1]}" for part in step.parts]
    words = ["embedding"] if step.has_embedding else []
    words.append(f"layers {' and '.join(spans)} of {model.n_layers}")
    words += ["head"] if step.has_head else []
    if model.moe is not None and step.moe_layers:
        words.append(f"{model.moe.n_experts // parallel.ep} of {model.moe.n_experts} experts")
    if parallel.tp > 1:
        words.append(f"1/{parallel.tp} of heads, d_ff and vocabulary")
    return ", ".join(words)
