"""The process of `roundtable plan`: makes a CUDA device, runs the step over fake tensors, prints the answer as JSON."""

import json
import sys
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
    """The plan, as JSON. Raises UserError where there can be none."""
    try:
        open_device()
    except NoShim as error:
        remedy = "install one, or give CXX"
        raise UserError([f"--gpu={request['gpu']} needs a device to trace on: {error}; {remedy}"]) from None
    import logging

    logging.disable(logging.WARNING)
    from launcher.config.checked import load_checked
    from launcher.estimate.forecast import forecast
    from launcher.plan.report import report_of
    from launcher.trace.hardware import read_hardware

    world_size = request["world_size"]
    config = load_checked(request["config"], request["overrides"], world_size=world_size, data=False)
    hardware = read_hardware(request["gpu"], "--gpu")
    return report_of(forecast(config, world_size, hardware, request["imbalance"], tell))
