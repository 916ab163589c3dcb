"""Counts the bytes of a step's tensors at each moment, by purpose (weights, activations, ...), and their peak.

A tensor's storage counts from the operation that made it until nothing refers to it, as in launcher.trace.recorder.
What was made before the step is sorted afterwards, when the engine is built and knows which tensors are its weights.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.trace.parts import NAMES, Region
from launcher.trace.regions import Regions

LASTING = ("weights", "masters", "optimizer state")  # what stays between steps
BUFFERS = "gradients, ZeRO's buffers"
BACKWARD = "backward: gradients of activations and weights"
SHORT: dict[Region, str] = {
    "attention": "activations: attention",
    "linear_attention": "activations: linear attention",
    "feed_forward": "activations: feed-forward",
    "router": "activations: router",
    "experts": "activations: experts",
    "norms": "activations: norms, residual sums",
    "embedding": "activations: embedding",
    "head": "logits, head's gradients",
    "further": "activations: further tokens",
    "pipeline": "pipeline: buffers",
    "gradients": BUFFERS,
    "optimizer": BUFFERS,
    "data": "batches",
    "bookkeeping": "batches",
    "other": "other",
}
HOLDERS = (*LASTING, BUFFERS, *dict.fromkeys(SHORT[each] for each in NAMES if SHORT[each] != BUFFERS), BACKWARD)


def copied_bytes(func: Any, args: Any) -> int:
    """The bytes of what gloo copies while it computes a collective; 0 for all else.

    It sums a copy of what is to be reduced and scattered over all ranks, and hands out this rank's part of that
    (torch's ProcessGroupGloo.cpp).
    """
    if func._schema.name != "c10d::_reduce_scatter_base_":
        return 0
    given: torch.Tensor = args[1]
    return given.nbytes


class Ledger(TorchDispatchMode):
    """A context manager that counts tensors' bytes, to be entered from before the engine is built until its step ends.

    ``device`` is the type of device whose memory is counted: tensors on the host count only where that is "cpu".
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.regions: Regions | None = None  # None: while the engine is built
        self.holders: dict[int, str] = {}  # storage -> what it is for
        self.live: Counter[str] = Counter()  # bytes
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.peak_phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        holder = self.holder()
        for each in tree_leaves((args, kwargs, out)):
            if isinstance(each, torch.Tensor):
                self.see(each, holder)
        copied = copied_bytes(func, args) if self.device == "cpu" else 0
        if self.total + copied > self.peak:
            self.peak, self.at_peak = self.total + copied, dict(self.live)
            self.at_peak[holder] = self.at_peak.get(holder, 0) + copied
            self.peak_phase = self.regions.now()[1] if self.regions is not None else ""
        return out

    def holder(self) -> str:
        """The purpose of tensors that are made at this moment, by the part of the step that runs."""
        if self.regions is None:
            return BUFFERS
        region, phase = self.regions.now()
        if phase == "backward" and region != "gradients":
            return BACKWARD
        return SHORT[region]

    def see(self, tensor: torch.Tensor, holder: str) -> None:
        """Counts a tensor's storage for ``holder``, unless it is counted already. Tensors on meta have no memory."""
        if tensor.device.type == "meta" or tensor.device.type == "cpu" != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.holders:
            n_bytes = storage.nbytes()
            self.holders[key] = holder
            self.live[holder] += n_bytes
            self.total += n_bytes
            weakref.finalize(storage, self.release, key, n_bytes)

    def release(self, key: int, n_bytes: int) -> None:
        """Subtracts a storage's bytes, once nothing refers to it any more."""
        self.live[self.holders.pop(key)] -= n_bytes
        self.total -= n_bytes

    def sort(self, held: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Assigns existing storages to purposes (holder -> tensors); of several for one storage the first counts."""
        sorted_already: set[int] = set()
        for holder, tensors in held.items():
            for tensor in tensors:
                self.see(tensor, "other")
                storage = tensor.untyped_storage()
                if storage._cdata in self.holders and storage._cdata not in sorted_already:
                    sorted_already.add(storage._cdata)
                    self.live[self.holders[storage._cdata]] -= storage.nbytes()
                    self.live[holder] += storage.nbytes()
                    self.holders[storage._cdata] = holder

    def begin(self) -> None:
        """Resets the peak to what is held now."""
        self.peak, self.at_peak = self.total, dict(self.live)
