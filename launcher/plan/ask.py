"""Asking for a plan: it is computed by a process of its own, whose torch has a CUDA device that is none."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.console import tell
from launcher.errors import UserError
from launcher.estimate.command import command_of

CHILD = "launcher.plan.child"


def ask(
    path: Path, overrides: Sequence[str], gpu: str, gpus: int, imbalance: float, price: float | None = None
) -> dict[str, Any] | None:
    """The plan as JSON, from a process of its own; None, told in a line, where that fails. Raises UserError.

    Its ``timeline`` has each pipeline position's passes (``launcher.plan.timeline.Bar``). ``price``: of a GPU-hour.
    """
    request = {"config": str(path), "overrides": list(overrides), "gpu": gpu, "imbalance": imbalance, "price": price}
    command = command_of(CHILD)
    text = json.dumps({**request, "world_size": gpus})
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        tell(f"the process that computes the plan ended with exit code {done.returncode}")
        return None
    answer = json.loads(done.stdout.splitlines()[-1])
    if "problems" in answer:
        raise UserError(answer["problems"])
    return answer
