"""Values that lie on a kink: where a clamp begins, rounding decides whether a gradient passes or is zero.

A layout sums in another order, so a value within a few units in the last place of a clamp's limit may fall on its other
side; one such value moves a gradient by percents. That is no fault of the layout, as a router's tie is none, but it
cannot be replayed as simply. The limit of the small model is free, however: one is taken that no value comes near to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from modeling.config import ModelConfig

KINK_GAP = 4e-6  # relative to the limit; layouts' values were seen to differ by 5e-7
TRIES = 16
STEP = 1 / 64  # of the limit, from one try to the next

Seen = TypeVar("Seen")


class ClampWatch(TorchFunctionMode):
    """While it is entered: ``gap``, the least distance of a clamped value from the limit, relative to the limit.

    Values are watched that gradients flow through, and limits that are numbers other than zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gap = float("inf")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.clamp, torch.clamp) and args[0].requires_grad:
            limits = [limit for limit in (*args[1:], *kwargs.values()) if isinstance(limit, float | int) and limit]
            for limit in limits:
                distance = (args[0].detach() - limit).abs().min() if args[0].numel() else torch.tensor(float("inf"))
                self.gap = min(self.gap, float(distance) / abs(limit))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Cleared(Generic[Seen]):
    """What was seen at the limit that was taken, the model with it, and its distance to the nearest value."""

    model: ModelConfig
    seen: Seen
    gap: float


def clear_of_kinks(model: ModelConfig, run: Callable[[ModelConfig], Seen]) -> Cleared[Seen]:
    """``run`` of the model at the first limit of its experts' clamps that no value lies within KINK_GAP of.

    Where none of TRIES limits is clear, the one farthest from all values. A model without such a limit runs once.
    """
    best: Cleared[Seen] | None = None
    for number in range(TRIES):
        tried = with_limit(model, 1 + number * STEP)
        with ClampWatch() as watch:
            seen = run(tried)
        if best is None or watch.gap > best.gap:
            best = Cleared(tried, seen, watch.gap)
        if best.gap > KINK_GAP:
            break
    assert best is not None
    return best


def with_limit(model: ModelConfig, factor: float) -> ModelConfig:
    """The model with ``factor`` times the limit of its experts' clamps, where it has one."""
    if model.moe is None or model.moe.swiglu_limit is None:
        return model
    return replace(model, moe=replace(model.moe, swiglu_limit=model.moe.swiglu_limit * factor))
