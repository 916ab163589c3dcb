"""The main part of a process that traces for a command: it reads a request as JSON and prints the answer as JSON."""

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from launcher.console import say
from launcher.errors import UserError
from launcher.estimate.device import NoShim, open_device


def serve(answer_to: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Reads the request from standard input; the answer, or its problems, is the last line of standard output."""
    request = json.loads(sys.stdin.read())
    try:
        answer = answer_to(request)
    except UserError as error:
        answer = {"problems": error.problems}
    say(json.dumps(answer))


def open_named_device(option: str, gpu: str, remedy: str) -> None:
    """Makes the CUDA device that the process traces on, and silences what libraries then log about it.

    Raises UserError, which names ``option`` and ``gpu`` and ends in ``remedy``, where no device can be made.
    """
    try:
        open_device()
    except NoShim as error:
        raise UserError([f"{option}={gpu} needs a device to trace on: {error}; {remedy}"]) from None
    logging.disable(logging.WARNING)
