"""Asks for a plan, which is computed in a process of its own, because its torch has a fake CUDA device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.estimate.command import answer_of

CHILD = "launcher.plan.child"


def ask(
    path: Path, overrides: Sequence[str], gpu: str, gpus: int, imbalance: float, price: float | None = None
) -> dict[str, Any] | None:
    """The plan by traced operations, as JSON, computed in a process of its own; None where that fails, with a line why.

    ``timeline`` in it lists each pipeline position's passes (``launcher.plan.report.Bar``). ``imbalance`` is how uneven
    the routing of tokens is taken to be, and ``price`` that of a GPU-hour. Raises UserError where the config, the
    hardware or the machine do not allow a plan.
    """
    request = {"config": str(path), "overrides": list(overrides), "gpu": gpu, "imbalance": imbalance, "price": price}
    return answer_of(CHILD, {**request, "world_size": gpus}, "computes the plan")
