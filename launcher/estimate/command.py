"""Asks a process of its own to trace, which takes minutes where a model is large."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from launcher.console import tell
from launcher.errors import UserError


def answer_of(module: str, request: Mapping[str, Any], what_it_does: str) -> dict[str, Any] | None:
    """The answer of ``module``'s ``main`` to the request, in a process of its own; None where the process fails.

    A failure is reported in a line, in which ``what_it_does`` describes the process. Raises UserError where the process
    answers with problems of the request.
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
    """The command that runs ``main`` of ``module`` in a process that ends as soon as this one does, even if killed.

    That process shows no warnings, imports nothing from the working folder, and ignores Ctrl-C, which a terminal sends
    to both: this one ends it.
    """
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    tied = f"{deaf}; from parallel.processes.lifeline import end_with_parent; end_with_parent({os.getpid()})"
    return [sys.executable, "-W", "ignore", "-P", "-c", f"{tied}; from {module} import main; main()"]
