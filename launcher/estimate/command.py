"""Asking another process, which traces: that takes minutes where a model is large."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from launcher.console import tell
from launcher.errors import UserError


def answer_of(module: str, request: Mapping[str, Any], what_it_does: str) -> dict[str, Any] | None:
    """What ``main`` of ``module`` answers (``launcher.estimate.serve``); None, told in a line, where the process fails.

    Raises UserError where the request has problems.
    """
    text = json.dumps(request)
    done = subprocess.run(command_of(module), input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        tell(f"the process that {what_it_does} ended with exit code {done.returncode}")
        return None
    answer = json.loads(done.stdout.splitlines()[-1])
    if "problems" in answer:
        raise UserError(answer["problems"])
    return answer


def command_of(module: str) -> list[str]:
    """Runs ``main`` of ``module`` in a process that ends as soon as this one does, killed or not.

    It shows no warnings, and imports nothing from the working folder.
    """
    tied = f"from parallel.processes.lifeline import end_with_parent; end_with_parent({os.getpid()})"
    return [sys.executable, "-W", "ignore", "-P", "-c", f"{tied}; from {module} import main; main()"]
