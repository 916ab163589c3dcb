"""The process of `roundtable profile --as GPU`: makes a CUDA device, traces, writes OUT, prints the report as JSON."""

from pathlib import Path
from typing import Any

from launcher.console import tell
from launcher.estimate.serve import open_named_device, serve


def main() -> None:
    """Reads the request from standard input; the answer is the last line of standard output."""
    serve(answer_to)


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Writes OUT's trace and picture, and returns the report. Raises UserError where the step cannot be estimated."""
    remedy = "install one, or give CXX; or measure on a machine with a GPU, without --as"
    open_named_device("--as", request["gpu"], remedy)
    from launcher.config.checked import load_checked
    from launcher.estimate.report import write_estimate
    from launcher.estimate.step import estimate_step
    from launcher.trace.hardware import read_hardware

    config = load_checked(request["config"], request["overrides"], world_size=request["world_size"], data=False)
    estimate = estimate_step(config, request["world_size"], read_hardware(request["gpu"]), tell)
    return write_estimate(estimate, Path(request["out"]))
