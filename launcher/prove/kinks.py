"""Values near a kink, such as a clamp's limit or a ReLU's zero, where rounding decides whether a gradient passes.

A layout sums in another order, so a value within a few units in the last place of a kink may fall on its other side,
and one such value moves a gradient by percents. That is no fault of the layout. Unlike a router's tie it cannot simply
be replayed; but the seed of a proof is free, so one is taken with which no value comes near to a kink.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from launcher.config.tree import RunConfig

KINK_GAP = 2e-6  # of a clamp's limit, or of a ReLU's root mean square; layouts' values were seen to differ by 5e-7
TRIES = 16
CLAMPS = (Tensor.clamp, torch.clamp)
RELUS = (F.relu, torch.relu, Tensor.relu)
SQUARES = (torch.square, Tensor.square)

Seen = TypeVar("Seen")


class KinkWatch(TorchFunctionMode):
    """A context manager; ``gap`` is the least distance of a value from a kink while it is entered, as a share.

    Only values that gradients flow through are watched. The distance is relative to a clamp's limit, which has to be a
    number other than zero, or to the root mean square of a ReLU's input. A ReLU that is squared at once has no kink, as
    its gradient does not jump.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gap = float("inf")
        self._rectified: Tensor | None = None  # the value of the last watched function, if that is a ReLU
        self._gap_before = self.gap  # without that function

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SQUARES and args[0] is self._rectified:
            self.gap, self._rectified = self._gap_before, None
        if not ((func in CLAMPS or func in RELUS) and args[0].requires_grad and args[0].numel()):
            return func(*args, **kwargs)
        self._gap_before = self.gap
        values = args[0].detach()
        for kink, size in kinks_of(func, values, [*args[1:], *kwargs.values()]):
            self.gap = min(self.gap, float((values - kink).abs().min()) / size)
        made = func(*args, **kwargs)
        self._rectified = made if func in RELUS else None
        return made


def kinks_of(func: Callable[..., Any], values: Tensor, arguments: Sequence[Any]) -> Iterator[tuple[float, float]]:
    """Each kink of a call of ``func`` on ``values``, with the size that distances from it are relative to."""
    if func in RELUS:
        yield 0.0, float(values.square().mean().sqrt()) or 1.0
        return
    for limit in arguments:
        if isinstance(limit, float | int) and limit:
            yield limit, abs(limit)


@dataclass(frozen=True)
class Cleared(Generic[Seen]):
    """The config whose seed was taken, what was seen with it, and the distance of the nearest value from a kink."""

    config: RunConfig
    seen: Seen
    gap: float


def clear_of_kinks(config: RunConfig, run: Callable[[RunConfig], Seen]) -> Cleared[Seen]:
    """``run`` of the config with the first seed, from its own on, with which no value lies within KINK_GAP of a kink.

    Where none of TRIES seeds is clear, the seed whose values stay farthest from kinks is taken. A model without kinks
    runs once.
    """
    best: Cleared[Seen] | None = None
    for number in range(TRIES):
        tried = replace(config, seed=config.seed + number)
        with KinkWatch() as watch:
            seen = run(tried)
        if best is None or watch.gap > best.gap:
            best = Cleared(tried, seen, watch.gap)
        if best.gap > KINK_GAP:
            break
    assert best is not None
    return best
