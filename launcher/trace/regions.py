"""Tracks which region of the program runs now, in forward passes as well as in the backward pass.

Modules are tracked by torch's hooks before and after their forward passes, which are registered only while a profile or
an estimate is made. autograd numbers its nodes in the order in which forward passes make them, so a module's nodes are
a stretch of numbers, and whatever a node does in the backward pass belongs to the module of its number.
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

MARK = "roundtable: "  # the prefix of Roundtable's marks in a profile


@dataclass
class Stretches:
    """The region of each autograd node: ``regions[i]`` is that of the nodes from number ``starts[i]`` on."""

    starts: list[int] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)

    def add(self, region: Region) -> None:
        """Assigns all nodes from the next one on to ``region``."""
        self.starts.append(_get_sequence_nr())
        self.regions.append(region)

    def add_made_within(self, region: Region) -> None:
        """Assigns the node that was just made during a backward pass, and the following ones, to ``region``.

        Such nodes are made by functions that recompute in the backward pass and differentiate the result there
        (modeling.kernels.rerun).
        """
        if self.regions[-1:] != [region]:
            self.starts.append(max([_get_sequence_nr() - 1, *self.starts[-1:]]))
            self.regions.append(region)

    def at(self, number: int) -> Region:
        """The region of a node by its number; "gradients" for numbers out of range, which sums of gradients have."""
        place = bisect_right(self.starts, number) - 1
        if number < 0 or number >= 2**63:
            return "gradients"
        return self.regions[place] if place >= 0 else "other"


class Regions:
    """The stack of entered regions, innermost last; with ``marks`` they also appear in torch's profile."""

    def __init__(self, *, marks: bool = False) -> None:
        self.marks = marks
        self.entered: list[tuple[Region, Phase]] = []
        self.stretches = Stretches()
        self.open_marks: list[Any] = []

    def enter(self, region: Region, phase: Phase = "forward") -> None:
        """Enters the region: operations from now on belong to it, until it is left."""
        self.entered.append((region, phase))
        self.stretches.add(region)
        if self.marks:
            mark = record_function(f"{MARK}{region} {phase}")
            mark.__enter__()
            self.open_marks.append(mark)

    def leave(self) -> None:
        """Leaves the innermost region: operations from now on belong to the one around it."""
        self.entered.pop()
        self.stretches.add(self.entered[-1][0] if self.entered else "other")
        if self.marks:
            self.open_marks.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def within(self, region: Region, phase: Phase = "forward") -> Iterator[None]:
        """A context whose operations belong to the region."""
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
        """A context in which hooks on the model's modules enter and leave their regions."""
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
        after = module.register_forward_hook(leave, always_call=True)  # torch ends recomputation by an exception
        return [before, after]
