"""What a layout asks of the model and of the number of processes. docs/layouts.md has the table."""

import math
from collections.abc import Iterator

from launcher.config.tree import RunConfig
from launcher.config.words import join_or


def check_layout(config: RunConfig, world_size: int) -> Iterator[str]:
    """One line for each degree that does not fit, with degrees that would."""
    parallel = config.parallel
    if min(parallel.tp, parallel.cp, parallel.ep) < 1:
        return  # the ranges' rule says so
    if parallel.tp > 1:
        yield from _check_tp(config, world_size)
    if parallel.cp > 1:
        yield from _check_cp(config, world_size)
    if parallel.ep > 1:
        yield from _check_ep(config, world_size)


def dp_of(config: RunConfig, world_size: int) -> int:
    """The data-parallel degree that remains, at least 1."""
    return max(1, world_size // max(1, config.parallel.tp * config.parallel.cp))


def _check_tp(config: RunConfig, world_size: int) -> Iterator[str]:
    """tp divides the processes, and all that it cuts."""
    cut = dict(_cut_by_tp(config))
    tp = config.parallel.tp
    legal = _divisors(math.gcd(world_size, *cut.values()))
    if world_size % tp:
        yield f"parallel.tp={tp} must divide the number of processes={world_size}; {_try(legal)}"
    for key, size in cut.items():
        if size % tp:
            yield f"parallel.tp={tp} must divide {key}={size}; {_try(legal)}"


def _cut_by_tp(config: RunConfig) -> Iterator[tuple[str, int]]:
    model = config.model
    yield "model.n_heads", model.n_heads
    yield "model.n_kv_heads", model.n_kv_heads
    yield "model.vocab_size", model.vocab_size
    if config.parallel.cp == 1:
        yield "data.seq_len", config.data.seq_len
    if model.moe is None or model.moe.n_dense_layers > 0:
        yield "model.d_ff", model.d_ff
    if model.moe is not None and model.moe.n_shared_experts > 0:
        yield "model.moe.n_shared_experts x model.moe.d_ff", model.moe.n_shared_experts * model.moe.d_ff


def _check_cp(config: RunConfig, world_size: int) -> Iterator[str]:
    """cp cuts each sequence into 2 cp chunks, which tp may cut again; all-to-all over heads needs heads for all ranks."""
    cp, tp, seq_len = config.parallel.cp, config.parallel.tp, config.data.seq_len
    if world_size % (cp * tp):
        yield (
            f"parallel.cp={cp} x parallel.tp={tp} must divide the number of processes={world_size}; "
            f"{_try(_divisors(max(1, world_size // tp)))} for parallel.cp"
        )
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


def _check_ep(config: RunConfig, world_size: int) -> Iterator[str]:
    """ep divides the experts, and the processes over which it folds."""
    ep, moe = config.parallel.ep, config.model.moe
    if moe is None:
        yield f"parallel.ep={ep} must be 1 where model.moe=null (there are no experts to cut); try parallel.ep=1"
        return
    legal = _divisors(math.gcd(world_size, moe.n_experts))
    if moe.n_experts % ep:
        yield f"parallel.ep={ep} must divide model.moe.n_experts={moe.n_experts}; {_try(legal)}"
    if world_size % ep:
        yield f"parallel.ep={ep} must divide the number of processes={world_size}; {_try(legal)}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _try(legal: list[int]) -> str:
    return f"try {join_or([str(degree) for degree in legal])}"
