"""The process of `roundtable profile --as GPU`: makes a CUDA device, traces, writes OUT, prints the report as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from launcher.console import say, tell
from launcher.errors import UserError
from launcher.estimate.device import NoShim, open_device


def main() -> None:
    """Reads the request from standard input; the answer is the last line of standard output."""
    request = json.loads(sys.stdin.read())
    try:
        answer = answer_to(request)
    except UserError as error:
        answer = {"problems": error.problems}
    say(json.dumps(answer))


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """The report. Raises UserError where there can be none."""
    try:
        open_device()
    except NoShim as error:
        remedy = "install one, or give CXX; or measure on a machine with a GPU, without --as"
        raise UserError([f"--as={request['gpu']} needs a device to trace on: {error}; {remedy}"]) from None
    import logging

    logging.disable(logging.WARNING)
    from launcher.config.checked import load_checked
    from launcher.estimate.report import write_estimate
    from launcher.estimate.step import estimate_step
    from launcher.trace.hardware import read_hardware

    config = load_checked(request["config"], request["overrides"], world_size=request["world_size"], data=False)
    estimate = estimate_step(config, request["world_size"], read_hardware(request["gpu"]), tell)
    return write_estimate(estimate, Path(request["out"]))
