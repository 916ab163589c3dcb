"""Asking for a plan: it is computed by a process of its own, whose torch has a CUDA device that is none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.estimate.command import answer_of

CHILD = "launcher.plan.child"


def ask(
    path: Path, overrides: Sequence[str], gpu: str, gpus: int, imbalance: float, price: float | None = None
) -> dict[str, Any] | None:
    """The plan as JSON, from a process of its own; None, told in a line, where that fails. Raises UserError.

    Its ``timeline`` has each pipeline position's passes (``launcher.plan.timeline.Bar``). ``price``: of a GPU-hour.
    """
    request = {"config": str(path), "overrides": list(overrides), "gpu": gpu, "imbalance": imbalance, "price": price}
    return answer_of(CHILD, {**request, "world_size": gpus}, "computes the plan")
