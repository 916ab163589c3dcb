"""Which part of the program runs now, and which part of it a step of the backward pass belongs to.

Modules are told apart by torch's own hooks before and after their forward passes, which are there only while a profile
or an estimate is made. autograd numbers its nodes in the order in which forward passes make them, so a module's are a
stretch of numbers, and whatever a node does in the backward pass belongs to the module of its number.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import _get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from launcher.trace.ops import Phase
from launcher.trace.parts import Region, regions_of
from modeling.decoder import Decoder

MARK = "roundtable: "  # how the marks in a profile begin


@dataclass
class Stretches:
    """By autograd's numbers: the region of the nodes from each number on."""

    starts: list[int] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)

    def add(self, region: Region) -> None:
        """The region of all nodes from the next one on."""
        self.starts.append(_get_sequence_nr())
        self.regions.append(region)

    def add_made_within(self, region: Region) -> None:
        """The region of the node that an operation has just made within the backward pass of another, and of the next.

        A function that computes again there and differentiates what it made (modeling.kernels.rerun) makes such nodes.
        """
        if self.regions[-1:] != [region]:
            self.starts.append(max([_get_sequence_nr() - 1, *self.starts[-1:]]))
            self.regions.append(region)

    def at(self, number: int) -> Region:
        """The region of a node; "gradients" for those without a number of their own, which sum weights' gradients."""
        place = bisect_right(self.starts, number) - 1
        if number < 0 or number >= 2**63:
            return "gradients"
        return self.regions[place] if place >= 0 else "other"


class Regions:
    """The regions that have been entered, innermost last; with ``marks``, they are in torch's profile, too."""

    def __init__(self, *, marks: bool = False) -> None:
        self.marks = marks
        self.entered: list[tuple[Region, Phase]] = []
        self.stretches = Stretches()
        self.open_marks: list[Any] = []

    def enter(self, region: Region, phase: Phase = "forward") -> None:
        """What follows belongs to the region."""
        self.entered.append((region, phase))
        self.stretches.add(region)
        if self.marks:
            mark = record_function(f"{MARK}{region} {phase}")
            mark.__enter__()
            self.open_marks.append(mark)

    def leave(self) -> None:
        """What follows belongs to the region around."""
        self.entered.pop()
        self.stretches.add(self.entered[-1][0] if self.entered else "other")
        if self.marks:
            self.open_marks.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def within(self, region: Region, phase: Phase = "forward") -> Iterator[None]:
        """The region, while the context lasts."""
        self.enter(region, phase)
        try:
            yield
        finally:
            self.leave()

    def now(self) -> tuple[Region, Phase]:
        """The region and phase of an operation that is called at this moment."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self.entered[-1] if self.entered else ("other", "forward")
        if self.entered and self.entered[-1][1] == "recompute":
            return self.entered[-1]
        region = self.stretches.at(node._sequence_nr())  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            self.stretches.add_made_within(region)
        return region, "backward"

    @contextlib.contextmanager
    def of(self, model: Decoder) -> Iterator["Regions"]:
        """While it lasts, hooks on the model's modules enter and leave their regions."""
        handles: list[RemovableHandle] = []
        for module, region in regions_of(model):
            handles += self._hook(module, region)
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, module: nn.Module, region: Region) -> list[RemovableHandle]:
        def enter(*_: Any) -> None:
            is_again = torch._C._current_autograd_node() is not None
            self.enter(region, "recompute" if is_again else "forward")

        def leave(*_: Any) -> None:
            self.leave()

        before = module.register_forward_pre_hook(enter, prepend=True)
        after = module.register_forward_hook(leave, always_call=True)  # recomputation ends by an exception
        return [before, after]
