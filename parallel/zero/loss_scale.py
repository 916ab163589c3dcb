"""fp16's loss scale: a factor on the loss, so that small gradients are not rounded to zero."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # of DeepSpeed's scaler, in a checkpoint


class LossScale:
    """DeepSpeed's dynamic loss scale in fp16: it halves after an overflow and doubles after many steps without one.

    Gradients are averaged over the replicas, so they then include a share of it, and losses are multiplied by no more
    than one process would multiply them by: an overflow, which ends a step, does not depend on the layout.
    """

    def __init__(self, scaler: Any | None, replicas: int) -> None:
        """``scaler``: DeepSpeed's loss scaler; None in other precisions than fp16, where the scale is 1.

        ``replicas``: the number of ranks over which gradients are averaged.
        """
        self.scaler, self.replicas = scaler, replicas
        self.first = self.state()

    @property
    def value(self) -> float:
        """The scale: 1 in other precisions."""
        return float(self.scaler.cur_scale) if self.scaler is not None else 1.0

    @property
    def on_losses(self) -> float:
        """The factor on each loss before its backward pass; in other precisions it undoes the gradients' averaging."""
        return self.value if self.scaler is not None else float(self.replicas)

    @property
    def in_gradients(self) -> float:
        """The factor that averaged gradients include: 1 in other precisions than fp16."""
        return self.value / self.replicas if self.scaler is not None else 1.0

    @property
    def can_fall(self) -> bool:
        """Whether the scale is above its minimum (fp16 only), so that a lower one may avoid an overflow next time."""
        return self.scaler is not None and self.value > self.scaler.min_scale

    def after_step(self, overflowed: bool) -> None:
        """Halves or doubles the scale where that is due, after the step in which it was used."""
        if self.scaler is not None:
            self.scaler.update_scale(overflowed)

    @contextmanager
    def times(self, factor: float) -> Iterator[None]:
        """While entered, the scale is multiplied by ``factor``; afterwards it is as before. Only fp16 is affected."""
        before = self.state()
        if self.scaler is not None:
            self.scaler.cur_scale = self.value * factor
        try:
            yield
        finally:
            self.restore(before)

    def state(self) -> dict[str, float]:
        """The scaler's numbers, for a checkpoint; empty in other precisions than fp16."""
        return {name: getattr(self.scaler, name) for name in FIELDS} if self.scaler is not None else {}

    def restore(self, state: dict[str, float]) -> None:
        """Sets the scaler's numbers to those that ``state`` returned; ones that are missing, to those before step 1."""
        if self.scaler is not None:
            for name, value in (self.first | state).items():
                setattr(self.scaler, name, value)
