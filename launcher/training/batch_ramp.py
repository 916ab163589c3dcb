"""The number of sequences in each update: the whole global batch, or a batch that grows to it. No torch."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from annotated_types import Interval

MAX_SIZES = 1000  # different sizes of one ramp


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """A global batch that grows to ``train.global_batch_size`` in equal parts (Megatron-LM's --rampup-batch-size)."""

    start: Annotated[int, Interval(ge=1, le=2**24)] = 1  # sequences of the first updates
    increment: Annotated[int, Interval(ge=1, le=2**24)] = 1  # by so many sequences at a time
    # sequences over which it grows; each size gets an equal part of them, to a whole update
    samples: Annotated[int, Interval(ge=1, le=10**15)] = 10_000

    def n_sizes(self, full: int) -> int:
        """The number of sizes before ``full``; 0 where the start is not below it."""
        return max(0, (full - self.start) // self.increment)


@dataclass(frozen=True)
class Batches:
    """The sizes of a run's batches: updates after the first ``steps[i]``, up to ``steps[i+1]``, have ``sizes[i]``.

    A size depends on the update's number alone: samples that are left out after a rollback do not change it.
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...]  # number of updates before the first of each size
    samples: tuple[int, ...]  # number of sequences in those updates

    def size_at(self, step: int) -> int:
        """The number of sequences in update ``step`` (from 1)."""
        return self.sizes[bisect_right(self.steps, step - 1) - 1]

    def samples_in(self, steps: int) -> int:
        """The number of sequences in the first ``steps`` updates."""
        number = bisect_right(self.steps, steps) - 1
        return self.samples[number] + (steps - self.steps[number]) * self.sizes[number]

    def steps_for(self, samples: float) -> float:
        """The number of updates that take so many sequences from the first one on, with a part of the last."""
        number = bisect_right(self.samples, samples) - 1
        return self.steps[number] + (samples - self.samples[number]) / self.sizes[number]


OF_ONE_SIZE = Batches((1,), (0,), (0,))


@lru_cache(maxsize=64)
def batches_of(full: int, ramp: BatchRamp | None) -> Batches:
    """The sizes under ``train.global_batch_size`` and ``train.batch_ramp``.

    After n sequences an update has start + increment x floor(n / (samples / number of increments)) of them, as in
    Megatron-LM; a size whose part is over before an update begins is left out.
    """
    sizes, steps, samples = [], [0], [0]
    n_sizes = ramp.n_sizes(full) if ramp is not None else 0
    for number in range(n_sizes):
        assert ramp is not None
        size = ramp.start + number * ramp.increment
        left = ramp.samples * (number + 1) - samples[-1] * n_sizes  # of this size's part, times n_sizes
        count = max(0, -(-left // (size * n_sizes)))
        if count:
            sizes.append(size)
            steps.append(steps[-1] + count)
            samples.append(samples[-1] + count * size)
    return Batches((*sizes, full), tuple(steps), tuple(samples))
