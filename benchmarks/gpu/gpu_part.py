"""What a part is made of: checks, each by itself, and what each of them is handed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_report import Report

if TYPE_CHECKING:
    import torch

DRY_PATIENCE = 4  # times as long as on a machine with a GPU may everything take


@dataclass(frozen=True)
class Place:
    """Where a check runs. ``dry``: on a CPU, with small sizes, and no figure counts."""

    device: "torch.device"
    dry: bool
    folder: Path  # the check's own, empty
    n_devices: int = 1
    report: Report | None = None
    check: str = ""

    def figure(self, name: str, value: Any, unit: str) -> None:
        """Writes down something measured."""
        if self.report is not None:
            self.report.figure(self.check, name, value, unit)

    def seconds(self, most: float) -> float:
        """A limit: a dry run has more time, for its machine may be busy."""
        return most * (DRY_PATIENCE if self.dry else 1)

    def small(self, full: Any, small: Any) -> Any:
        """A size: the full one, or in a dry run the small one."""
        return small if self.dry else full


class Check(NamedTuple):
    """Something that holds or does not. ``run`` raises what says that it does not, or ``gpu_report.Skipped``."""

    name: str
    run: Callable[[Place], None]
    limit_seconds: int = 60


class Part(NamedTuple):
    """One part of the hour."""

    number: int
    title: str
    minutes: float
    module: str  # whose `checks(n_devices)` are the part's


PARTS: Sequence[Part] = (
    Part(1, "correctness", 8, "gpu_correctness"),
    Part(2, "whole runs", 8, "gpu_whole"),
    Part(3, "baselines", 9, "gpu_baselines"),
    Part(4, "one change at a time", 9, "gpu_changes"),
    Part(5, "several GPUs", 9, "gpu_several"),
)
