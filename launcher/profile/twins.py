"""Twins of what a step is made of, which say what they are about while they do it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from data.batch import Batch
from data.dataset import Dataset
from launcher.trace.regions import Regions
from modeling.decoder import Output
from parallel.batch import MicroBatch
from parallel.zero.engine import Engine, StepResult


class WatchedDataset(Dataset):
    """A dataset whose reading is a region."""

    def __init__(self, dataset: Dataset, regions: Regions) -> None:
        vars(self).update(vars(dataset))
        self.regions = regions

    def read(self, indices: np.ndarray) -> Batch:
        """As Dataset."""
        with self.regions.within("data"):
            return super().read(indices)

    def count(self, indices: np.ndarray) -> tuple[int, int]:
        """As Dataset."""
        with self.regions.within("data"):
            return super().count(indices)


class WatchedEngine(Engine):
    """An engine whose backward passes and updates are regions; what they call may be others."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.regions = Regions()
        super().__init__(*arguments, **options)

    def backward(self, loss: Tensor, weight: float, *, last: bool) -> None:
        """As Engine."""
        with self.regions.within("gradients", "backward"):
            super().backward(loss, weight, last=last)

    def run_pipeline(self, micro_batches: Sequence[MicroBatch], weight: float) -> list[Output]:
        """As Engine."""
        with self.regions.within("gradients", "backward"):
            return super().run_pipeline(micro_batches, weight)

    def run_passes(self, micro_batches: Sequence[MicroBatch], weight: float) -> list[Output]:
        """As Engine."""
        with self.regions.within("pipeline"):
            return super().run_passes(micro_batches, weight)

    def add_over_tp(self) -> None:
        """As Engine."""
        with self.regions.within("gradients", "update"):
            super().add_over_tp()

    def step(self, lr: float) -> StepResult:
        """As Engine."""
        with self.regions.within("optimizer", "update"):
            return super().step(lr)
