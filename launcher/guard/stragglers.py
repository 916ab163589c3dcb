"""Ranks that are persistently slower than their peers, by the time of their own work.

A rank's own time of a step is the step's wall time less the time its main thread was held in communication (on gloo;
on CUDA communication does not hold the main thread: all ranks take the same time, and none is called slow). Peers are
the ranks of the same pipeline stage, which have the same work to do; where a stage is one rank, all ranks, and it must
be slower than these for its share of the model's products too: the head may take longer than all other stages.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW_STEPS = 20  # a rank's figure is the median of so many steps, so that a hiccup does not count
SLOW_RATIO = 1.5  # of a rank's figure to its peers' median
AGAIN_STEPS = 500  # a rank that stays slow is named again after so many steps


class OwnTimes:
    """One rank's own seconds of its last steps."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=WINDOW_STEPS)

    def add(self, wall: float, held: float) -> None:
        """One step: its wall time, and how much of it communication held the main thread."""
        self.seconds.append(max(0.0, wall - held))

    def figure(self) -> float | None:
        """The median of the window, in seconds; None until it is full."""
        return statistics.median(self.seconds) if len(self.seconds) == WINDOW_STEPS else None


@dataclass(frozen=True)
class Straggler:
    """A slow rank: its own seconds a step, and how many times its peers' median that is, at least."""

    rank: int
    seconds: float
    ratio: float


class Stragglers:
    """Rank 0's judgement over time."""

    def __init__(self, stages: Sequence[Sequence[int]], work: Sequence[float] | None = None) -> None:
        """``work``: what each stage has to do, in any unit; None: all the same."""
        ranks = [rank for stage in stages for rank in stage]
        shares = work or [1.0] * len(stages)
        self.work = {rank: share for members, share in zip(stages, shares, strict=True) for rank in members}
        self.peers = [stage if len(stage) > 1 else ranks for stage in stages]
        self.stage_of = {rank: stage for stage, members in enumerate(stages) for rank in members}
        self.named: dict[int, int] = {}  # rank -> the step at which it was named

    def find(self, figures: Mapping[int, float], step: int) -> list[Straggler]:
        """The ranks to be named now, given every rank's figure; nothing while some rank has none.

        Peers' median is the lower one of two, so that of two ranks the slow one stands out.
        """
        if figures.keys() != self.stage_of.keys():
            return []
        found = []
        rates = {rank: seconds / self.work[rank] for rank, seconds in figures.items()}
        ratios = [self.ratios(each) for each in (figures, rates)]
        for rank, seconds in figures.items():
            ratio = min(each[rank] for each in ratios)
            if ratio < SLOW_RATIO:
                self.named.pop(rank, None)
            elif rank not in self.named or step - self.named[rank] >= AGAIN_STEPS:
                self.named[rank] = step
                found.append(Straggler(rank, seconds, ratio))
        return found

    def ratios(self, figures: Mapping[int, float]) -> dict[int, float]:
        """How many times its peers' median each rank's figure is."""
        medians = [statistics.median_low([figures[peer] for peer in peers]) for peers in self.peers]
        typical = {rank: medians[stage] for rank, stage in self.stage_of.items()}
        return {rank: figure / typical[rank] if typical[rank] > 0 else 1.0 for rank, figure in figures.items()}
