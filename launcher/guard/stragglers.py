"""Detects ranks that are persistently slower than their peers, by the time of their own work.

A rank's own time of a step is the step's wall time less the time for which communication held its main thread (on
gloo; on CUDA communication does not hold the main thread, so all ranks take the same time and none is called slow).
A rank's peers are the ranks of its pipeline stage, which have the same work to do. Where a stage is a single rank, its
peers are all ranks, and it must also be slower than they are relative to its share of the model's work, since the stage
with the head may take longer than all others.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW_STEPS = 20  # a rank's figure is the median of so many steps, so that a single slow step does not count
SLOW_RATIO = 1.5  # a rank is slow where its figure is so many times its peers' median
AGAIN_STEPS = 500  # a rank that stays slow is named again after so many steps


class OwnTimes:
    """One rank's own seconds in each of its last WINDOW_STEPS steps."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=WINDOW_STEPS)

    def add(self, wall: float, held: float) -> None:
        """Adds one step, by its wall time and the time for which communication held the main thread, in seconds."""
        self.seconds.append(max(0.0, wall - held))

    def figure(self) -> float | None:
        """The median of the window, in seconds; None until it is full."""
        return statistics.median(self.seconds) if len(self.seconds) == WINDOW_STEPS else None


@dataclass(frozen=True)
class Straggler:
    """A slow rank: its own seconds for a step, and a lower bound on how many times its peers' median that is."""

    rank: int
    seconds: float
    ratio: float


class Stragglers:
    """Rank 0's judge of which ranks are slow; it remembers when it named each."""

    def __init__(self, stages: Sequence[Sequence[int]], work: Sequence[float] | None = None) -> None:
        """``stages``: the ranks of each pipeline stage. ``work``: each stage's work in any unit; None: all the same."""
        ranks = [rank for stage in stages for rank in stage]
        shares = work or [1.0] * len(stages)
        self.work = {rank: share for members, share in zip(stages, shares, strict=True) for rank in members}
        self.peers = [stage if len(stage) > 1 else ranks for stage in stages]
        self.stage_of = {rank: stage for stage, members in enumerate(stages) for rank in members}
        self.named: dict[int, int] = {}  # rank -> the step at which it was named

    def find(self, figures: Mapping[int, float], step: int) -> list[Straggler]:
        """The slow ranks to be named now, given every rank's figure; none while some rank has no figure.

        Of an even number of peers the lower median is taken, so that of two ranks the slow one stands out.
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
        """Rank -> its figure, divided by its peers' median."""
        medians = [statistics.median_low([figures[peer] for peer in peers]) for peers in self.peers]
        typical = {rank: medians[stage] for rank, stage in self.stage_of.items()}
        return {rank: figure / typical[rank] if typical[rank] > 0 else 1.0 for rank, figure in figures.items()}
