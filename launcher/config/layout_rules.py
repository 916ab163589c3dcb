"""The rules that a layout sets for the model and the number of processes. docs/layouts.md has the table."""

import math
from collections.abc import Iterator
from dataclasses import replace

from launcher.config.tree import RunConfig
from launcher.config.words import join_or
from modeling.dims import units_of
from modeling.moe_config import MoEConfig
from parallel.config import ParallelConfig
from parallel.layout import AXIS_OF
from parallel.pipeline.config import splits_backward
from parallel.pipeline.rules import pipeline_problems

LARGEST_DEGREE = 1024  # that a remedy names


def check_layout(config: RunConfig, world_size: int) -> Iterator[str]:
    """One line for each rule on the layout's degrees and options that ``config`` breaks, with values that would fit."""
    parallel = config.parallel
    if min(parallel.tp, parallel.cp, parallel.pp, parallel.ep) < 1:
        return  # reported by the check of ranges
    yield from _check_processes(config, world_size)
    if parallel.tp > 1:
        yield from _check_tp(config)
    if parallel.cp > 1:
        yield from _check_cp(config)
    if parallel.ep > 1:
        yield from _check_ep(config, world_size)
    yield from _check_ep_chunks(config)
    yield from _check_split_backward(config)
    yield from _check_offload(config)
    yield from _check_tp_overlap(parallel)
    yield from _check_kept_weights(config)
    yield from pipeline_problems(
        parallel.pipeline,
        pp=parallel.pp,
        n_layers=config.model.n_layers,
        zero=parallel.zero,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=max(1, config.train.micro_batch_size),
        dp=dp_of(config, world_size),
    )


def with_switches(layout: ParallelConfig, asked: ParallelConfig, moe: MoEConfig | None) -> ParallelConfig:
    """``layout`` with the switches of ``asked`` that its degrees, ZeRO stage and pipeline schedule allow, others off.

    The switches are the gradient reduction, the optimizer's offload, the overlaps of tp and ep, and ``ep_chunks``,
    which is at most the number of experts of a rank. ``moe``: the model's experts.
    """
    of_stage_1 = {name: getattr(asked, name) for name in ("grad_reduce", "grad_reduce_dtype")}
    held = moe.n_experts // layout.ep if moe is not None and layout.ep > 1 else 1
    return replace(
        layout,
        **(of_stage_1 if layout.zero == 1 else {"grad_reduce": "step", "grad_reduce_dtype": "fp32"}),
        offload_optimizer=asked.offload_optimizer and layout.zero == 2,
        tp_overlap=asked.tp_overlap and layout.zero != 3 and not _splits(layout),
        ep_overlap=asked.ep_overlap,
        ep_chunks=max(1, min(asked.ep_chunks, held)),
    )


def _splits(layout: ParallelConfig) -> bool:
    return layout.pp > 1 and splits_backward(layout.pipeline)


def _check_tp_overlap(parallel: ParallelConfig) -> Iterator[str]:
    """A line where ``tp_overlap`` meets ZeRO 3 or a split backward pass, which fix when weights get their gradients."""
    if not parallel.tp_overlap:
        return
    if parallel.zero == 3:
        yield (
            "parallel.tp_overlap=true does not work with parallel.zero=3, whose weights are there during the passes of "
            "their modules alone; try parallel.tp_overlap=false, or parallel.zero=2"
        )
    if _splits(parallel):
        yield (
            f"parallel.tp_overlap=true does not work with parallel.pipeline.name={parallel.pipeline.name}, which "
            "computes weights' gradients in a part of its own of the backward pass; try parallel.tp_overlap=false, or "
            "parallel.pipeline.name=interleaved"
        )


def _check_kept_weights(config: RunConfig) -> Iterator[str]:
    """A line where 8-bit weights are to be kept under ZeRO 3, whose weights do not stay in memory."""
    if config.train.fp8_keep_weights and config.parallel.zero == 3:
        yield (
            "train.fp8_keep_weights=true does not work with parallel.zero=3, whose weights are there during the passes "
            "of their modules alone; try train.fp8_keep_weights=false, or parallel.zero=2"
        )


def _check_offload(config: RunConfig) -> Iterator[str]:
    """A line for a ZeRO stage, and one for an optimizer, that cannot have its master weights on the host."""
    parallel = config.parallel
    if not parallel.offload_optimizer:
        return
    if parallel.zero != 2:
        yield (
            f"parallel.offload_optimizer=true works with parallel.zero=2 only, not parallel.zero={parallel.zero}; "
            "try parallel.zero=2, or parallel.offload_optimizer=false"
        )
    if config.optimizer.takes_whole_matrices:
        rule = f"does not work with optimizer.name={config.optimizer.name}, whose matrices are made whole on"
        yield (
            f"parallel.offload_optimizer=true {rule} the device; try optimizer.name=adamw, or "
            "parallel.offload_optimizer=false"
        )


def least_ranks(parallel: ParallelConfig) -> int:
    """The fewest processes that can hold the layout: one replica, or as many as ep folds over."""
    degrees = (parallel.tp, parallel.pp, parallel.cp, parallel.ep)
    return parallel.pp * math.lcm(parallel.tp * parallel.cp, parallel.ep) if min(degrees) > 0 else 1


def dp_of(config: RunConfig, world_size: int) -> int:
    """The data-parallel degree that remains, at least 1."""
    parallel = config.parallel
    return max(1, world_size // max(1, parallel.pp * parallel.cp * parallel.tp))


def _check_processes(config: RunConfig, world_size: int) -> Iterator[str]:
    """The product pp x cp x tp divides the processes; dp is what remains."""
    degrees = {name: getattr(config.parallel, name) for name in ("pp", "cp", "tp")}
    product = math.prod(degrees.values())
    if world_size % product:
        given = " x ".join(f"parallel.{name}={degree}" for name, degree in degrees.items() if degree > 1)
        name = max(degrees, key=lambda name: degrees[name])
        others = product // degrees[name]
        room = world_size // others if world_size % others == 0 else 1
        fitting = max(n for n in _divisors(room) if n <= degrees[name])
        yield f"{given} must divide the number of processes={world_size}; try parallel.{name}={fitting}"


def _check_tp(config: RunConfig) -> Iterator[str]:
    """Degree tp divides every size that it shards."""
    cut = dict(_cut_by_tp(config))
    tp = config.parallel.tp
    legal = _divisors(math.gcd(*cut.values()))
    for key, size in cut.items():
        if size % tp:
            more_rows = (
                f", or {key}={-(-size // tp) * tp} (rows that no token has)" if key == "model.vocab_size" else ""
            )
            yield f"parallel.tp={tp} must divide {key}={size}; {_try(legal)}{more_rows}"


def _cut_by_tp(config: RunConfig) -> Iterator[tuple[str, int]]:
    for dim, unit in units_of(config.model).items():
        if AXIS_OF[dim] == "tp":
            yield unit.key, unit.count
    if config.parallel.cp == 1:
        yield "data.seq_len", config.data.seq_len


def _check_cp(config: RunConfig) -> Iterator[str]:
    """Degree cp cuts sequences into 2 cp chunks, which tp may cut again; all-to-all needs heads for all ranks."""
    cp, tp, seq_len = config.parallel.cp, config.parallel.tp, config.data.seq_len
    step = math.lcm(2 * cp, cp * tp)
    if seq_len % step:
        near = max(step, seq_len // step * step)
        yield (
            f"data.seq_len={seq_len} must be a multiple of {step} where parallel.cp={cp} (2 cp chunks a sequence) and "
            f"parallel.tp={tp}; try {near}"
        )
    heads, kv_heads = config.model.n_heads // tp, config.model.n_kv_heads // tp
    uneven = heads % cp or (kv_heads % cp and cp % max(1, kv_heads))
    if config.parallel.cp_attention == "ulysses" and uneven:
        yield (
            f"parallel.cp={cp} with parallel.cp_attention=ulysses must divide model.n_heads={config.model.n_heads} / "
            f"parallel.tp={tp} = {heads}, and divide or be a multiple of model.n_kv_heads={config.model.n_kv_heads} / "
            f"parallel.tp={tp} = {kv_heads}; try parallel.cp_attention=ring"
        )
    linear = config.model.linear_attention
    if linear is None or min(linear.n_v_heads, linear.n_k_heads) < tp:
        return
    values, keys = linear.n_v_heads // tp, linear.n_k_heads // tp
    if values % cp or (keys % cp and cp % keys):
        told = f"model.linear_attention.n_v_heads={linear.n_v_heads} / parallel.tp={tp} = {values}"
        fitting = [n for n in _divisors(values) if keys % n == 0 or n % keys == 0]
        yield (
            f"parallel.cp={cp} must divide {told}, and divide or be a multiple of "
            f"model.linear_attention.n_k_heads={linear.n_k_heads} / parallel.tp={tp} = {keys} (linear attention goes "
            f"by all-to-all over heads); {_try(fitting)}"
        )


def _check_ep(config: RunConfig, world_size: int) -> Iterator[str]:
    """Degree ep divides the experts, and the processes over which it folds."""
    ep, moe = config.parallel.ep, config.model.moe
    if moe is None:
        yield f"parallel.ep={ep} must be 1 where model.moe=null (there are no experts to cut); try parallel.ep=1"
        return
    stage = world_size // config.parallel.pp
    legal = _divisors(math.gcd(stage, moe.n_experts))
    if moe.n_experts % ep:
        yield f"parallel.ep={ep} must divide model.moe.n_experts={moe.n_experts}; {_try(legal)}"
    if stage % ep:
        yield (
            f"parallel.ep={ep} must divide the number of processes={world_size} / parallel.pp={config.parallel.pp} = "
            f"{stage}; {_try(legal)}"
        )


def _check_ep_chunks(config: RunConfig) -> Iterator[str]:
    """Chunks of experts need ep above 1, an expert for each chunk, and ``ep_overlap``, whose messages they hide."""
    parallel, moe = config.parallel, config.model.moe
    chunks, told = parallel.ep_chunks, f"parallel.ep_chunks={parallel.ep_chunks}"
    if chunks <= 1:
        return
    if parallel.ep == 1 or moe is None:
        yield f"{told} must be 1 where parallel.ep=1 (no tokens travel to experts); try parallel.ep_chunks=1"
        return
    held = moe.n_experts // parallel.ep
    if chunks > held >= 1:
        yield (
            f"{told} must be at most model.moe.n_experts={moe.n_experts} / parallel.ep={parallel.ep} = {held}, the "
            f"experts of a rank; try parallel.ep_chunks={held}"
        )
    if not parallel.ep_overlap:
        yield (
            f"{told} needs parallel.ep_overlap=true, without which each message is waited for at once; "
            "try parallel.ep_overlap=true, or parallel.ep_chunks=1"
        )


def _check_split_backward(config: RunConfig) -> Iterator[str]:
    """A split backward pass needs a model that uses the embedding once, since torch walks each part of a graph once."""
    model, parallel = config.model, config.parallel
    if model.mtp is None or parallel.pp == 1 or not splits_backward(parallel.pipeline):
        return
    told, remedy = f"with parallel.pipeline.name={parallel.pipeline.name}", "or parallel.pipeline.name=interleaved"
    rule = f"{told}, whose backward pass in two parts takes the embedding's gradient once; try"
    if model.mtp.depth > 1:
        yield f"model.mtp.depth={model.mtp.depth} must be 1 {rule} 1, {remedy}"
    if model.tie_embeddings:
        yield f"model.tie_embeddings=true must be false where model.mtp is given {rule} false, {remedy}"


def _divisors(number: int) -> list[int]:
    """The divisors of ``number`` up to LARGEST_DEGREE, in ascending order."""
    return [n for n in range(1, min(number, LARGEST_DEGREE) + 1) if number % n == 0]


def _try(legal: list[int]) -> str:
    return f"try {join_or([str(degree) for degree in legal])}"
