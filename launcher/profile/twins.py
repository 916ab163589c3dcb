"""The dataset and the engine of a step in versions that mark their work as regions, for profiling."""

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
    """A dataset whose reads are marked as a region; it shares the state of ``dataset``."""

    def __init__(self, dataset: Dataset, regions: Regions) -> None:
        vars(self).update(vars(dataset))
        self.regions = regions

    def read(self, indices: np.ndarray) -> Batch:
        """The batch of these samples, as ``Dataset.read`` gives it."""
        with self.regions.within("data"):
            return super().read(indices)

    def count(self, indices: np.ndarray) -> tuple[int, int]:
        """The numbers of targets and tokens in these samples, as ``Dataset.count`` gives them."""
        with self.regions.within("data"):
            return super().count(indices)


class WatchedEngine(Engine):
    """An engine whose backward passes and updates are marked as regions, in which others may be nested.

    Each method below does what Engine's does, within its region.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.regions = Regions()
        super().__init__(*arguments, **options)

    def backward(self, loss: Tensor, weight: float, *, last: bool) -> None:
        """Runs ``Engine.backward`` in the region of gradients."""
        with self.regions.within("gradients", "backward"):
            super().backward(loss, weight, last=last)

    def run_pipeline(self, micro_batches: Sequence[MicroBatch], weight: float) -> list[Output]:
        """Runs ``Engine.run_pipeline`` in the region of gradients."""
        with self.regions.within("gradients", "backward"):
            return super().run_pipeline(micro_batches, weight)

    def run_passes(self, micro_batches: Sequence[MicroBatch], weight: float) -> list[Output]:
        """Runs ``Engine.run_passes`` in the region of the pipeline."""
        with self.regions.within("pipeline"):
            return super().run_passes(micro_batches, weight)

    def add_over_tp(self) -> None:
        """Runs ``Engine.add_over_tp`` in the region of gradients."""
        with self.regions.within("gradients", "update"):
            super().add_over_tp()

    def step(self, lr: float) -> StepResult:
        """Runs ``Engine.step`` in the region of the optimizer."""
        with self.regions.within("optimizer", "update"):
            return super().step(lr)
