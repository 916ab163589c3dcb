"""The rules that a layout sets for the global batch size and for every size of a batch ramp. See docs/layouts.md."""

import math
from collections.abc import Iterator

from launcher.config.layout_rules import dp_of
from launcher.config.tree import RunConfig
from launcher.config.words import join_or
from launcher.training.batch_ramp import MAX_SIZES, BatchRamp
from parallel.pipeline.rules import nearest, runs_micro_batches


def check_batch(config: RunConfig, world_size: int) -> Iterator[str]:
    """A line where the global batch, at some size that it has, does not split evenly into the ranks' micro-batches."""
    train, dp = config.train, dp_of(config, world_size)
    share = dp * train.micro_batch_size
    if share < 1:
        return
    rule = f"must be a multiple of dp={dp} x train.micro_batch_size={train.micro_batch_size} = {share}"
    if train.global_batch_size < 1 or train.global_batch_size % share:
        below = train.global_batch_size // share * share
        near = f"{below} or {below + share}" if below > 0 else str(share)
        yield f"train.global_batch_size={train.global_batch_size} {rule}; try {near}"
    elif train.batch_ramp is not None and min(train.batch_ramp.start, train.batch_ramp.increment) >= 1:
        yield from _check_ramp(config, train.batch_ramp, share, rule)


def _check_ramp(config: RunConfig, ramp: BatchRamp, share: int, rule: str) -> Iterator[str]:
    """The first broken rule on the ramp's start, its increment, and the pipeline schedule at its sizes, if any."""
    full, start, increment = config.train.global_batch_size, ramp.start, ramp.increment
    given, above = f"train.batch_ramp.start={start}", f"train.global_batch_size={full}"
    if start >= full:
        yield f"{given} must be less than {above}; {_try_starts(ramp, full, share)}"
        return
    if start % share:
        yield f"{given} {rule}; {_try_starts(ramp, full, share)}"
        return
    gap = full - start
    legal = [size * share for size in _divisors(gap // share) if gap // (size * share) <= MAX_SIZES]
    if increment % share or gap % increment:
        tries = join_or([str(size) for size in nearest(increment, legal)])
        yield (f"train.batch_ramp.increment={increment} {rule} and divide {above} - {given} = {gap}; try {tries}")
    elif gap // increment > MAX_SIZES:
        yield (
            f"train.batch_ramp.increment={increment} makes {gap // increment} sizes from {given} to {above}, and must "
            f"make at most {MAX_SIZES}; try {legal[0]}"
        )
    elif config.parallel.pp > 1:
        yield from _check_schedule(config, ramp, share)


def _try_starts(ramp: BatchRamp, full: int, share: int) -> str:
    """The remedy for a ramp's start: the nearest legal ones (for its increment, where that is legal), else no ramp."""
    unit = ramp.increment if ramp.increment % share == 0 else share
    below = full - max(1, -(-(full - ramp.start) // unit)) * unit
    starts = [start for start in (below, below + unit) if 0 < start < full]
    return "try " + join_or([str(start) for start in starts]) if starts else "try train.batch_ramp=null"


def _check_schedule(config: RunConfig, ramp: BatchRamp, share: int) -> Iterator[str]:
    """A line where the pipeline schedule cannot run the micro-batches of a size below the full one."""
    pipeline, pp, full = config.parallel.pipeline, config.parallel.pp, config.train.global_batch_size
    illegal = [
        size for size in range(ramp.start, full, ramp.increment) if not runs_micro_batches(pipeline, pp, size // share)
    ]
    if not illegal:
        return
    first = illegal[-1] + ramp.increment
    remedy = f"train.batch_ramp.start={first}" if first < full else "train.batch_ramp=null"
    yield (
        f"train.batch_ramp.start={ramp.start} and train.batch_ramp.increment={ramp.increment} make a batch of "
        f"{illegal[0]}, whose {illegal[0] // share} micro-batches a rank parallel.pipeline.name={pipeline.name} cannot "
        f"run with parallel.pp={pp}; try {remedy}"
    )


def _divisors(number: int) -> list[int]:
    """The divisors of ``number``, in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
