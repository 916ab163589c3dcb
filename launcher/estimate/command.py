"""The command by which another process traces, which takes minutes where a model is large."""

import os
import sys


def command_of(module: str) -> list[str]:
    """Runs ``main`` of ``module`` in a process that ends as soon as this one does, killed or not.

    It shows no warnings, and imports nothing from the working folder.
    """
    tied = f"from parallel.processes.lifeline import end_with_parent; end_with_parent({os.getpid()})"
    return [sys.executable, "-W", "ignore", "-P", "-c", f"{tied}; from {module} import main; main()"]
