"""Faults that show only on a GPU, planted to see that the dry run detects them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import modeling.kernels.experts as experts
import modeling.moe as moe
import parallel.context_parallel.context as held
from launcher.training.step import Sums
from modeling.feed_forward import FeedForward
from modeling.norm import RMSNorm
from parallel.offload import OnStreams


def _host_tensor(original: Any) -> Any:
    """A norm multiplies by a factor that lies on the host."""

    def forward(self: Any, hidden: Any) -> Any:
        return original(self, hidden) * torch.ones(hidden.shape[-1], device="cpu")

    return forward


def _number(original: Any) -> Any:
    """A layer copies a number to the device, for which the host waits."""
    return lambda self, hidden: original(self, hidden) * torch.tensor(1.0, dtype=hidden.dtype, device=hidden.device)


def _item(original: Any) -> Any:
    """A layer reads a value back from the device."""

    def forward(self: Any, hidden: Any) -> Any:
        out = original(self, hidden)
        return out if float(out.detach().abs().max()) < 1e30 else out.clamp(max=1e30)

    return forward


def _copy(original: Any) -> Any:
    """A layer copies its input, which costs time but is no mistake."""
    return lambda self, hidden: original(self, hidden.clone())


def _bincount(_: Any) -> Any:
    """Experts' counts are made by an operation whose result's size depends on values."""
    return lambda indices_TK, n_experts: torch.bincount(indices_TK.flatten(), minlength=n_experts)


def _on_host(original: Any) -> Any:
    """The step's sums are fetched to the host before they are summed over the ranks."""
    return lambda self, *given: original(self, *given).cpu()


def _bounds_of_device(original: Any) -> Any:
    """Ring attention reads the bounds of documents from the device."""

    def pieces(self: Any, window: int | None, axis: Any) -> Any:
        self.whole.bounds = self.whole.cu_seqlens[0].tolist()
        return original(self, window, axis)

    return pieces


def _pieces_on_host(original: Any) -> Any:
    """The bounds of ring attention's pieces stay on the host."""
    return lambda *arguments: original(*arguments[:-1], torch.device("cpu"))


def _host_waits(_: Any) -> Any:
    """The host waits for a copy, instead of the computing stream."""
    return lambda self, mark: mark.synchronize()


def _waits_for_nothing(_: Any) -> Any:
    """Nothing waits for copies."""
    return lambda self, mark: None


class Fault(NamedTuple):
    """One fault: the attribute of ``owners`` that is replaced, its replacement, and the case that shows it."""

    owners: tuple[Any, ...]
    attribute: str
    replaced: Callable[[Any], Any]
    case: str
    is_slower: bool = False  # it costs time, but is no mistake


RING = "qwen3_moe cp2 ring rank 1 recompute=none"
FAULTS = {
    "device mix": Fault((RMSNorm,), "forward", _host_tensor, "llama bf16"),
    "copied number": Fault((FeedForward,), "forward", _number, "llama bf16"),
    "item": Fault((FeedForward,), "forward", _item, "llama bf16"),
    "bincount": Fault((experts, moe), "count_pairs", _bincount, "mixtral bf16"),
    "sums on the host": Fault((Sums,), "packed", _on_host, "mixtral bf16"),
    "ring waits": Fault((held.HeldContext,), "pieces", _bounds_of_device, RING),
    "pieces on the host": Fault((held,), "plan_pieces", _pieces_on_host, RING),
    "host waits for a copy": Fault((OnStreams,), "wait", _host_waits, "qwen3 offloads recompute=none"),
    "nobody waits for copies": Fault((OnStreams,), "wait", _waits_for_nothing, "qwen3 offloads recompute=full"),
    "extra copy": Fault((FeedForward,), "forward", _copy, "llama bf16", is_slower=True),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """A context in which the fault is planted."""
    fault = FAULTS[name]
    originals = [getattr(owner, fault.attribute) for owner in fault.owners]
    for owner, original in zip(fault.owners, originals, strict=True):
        setattr(owner, fault.attribute, fault.replaced(original))
    try:
        yield
    finally:
        for owner, original in zip(fault.owners, originals, strict=True):
            setattr(owner, fault.attribute, original)
