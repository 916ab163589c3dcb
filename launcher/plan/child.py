"""The process of `roundtable plan`: makes a CUDA device, runs the step over fake tensors, prints the answer as JSON."""

from typing import Any

from launcher.console import tell
from launcher.estimate.serve import open_named_device, serve


def main() -> None:
    """Reads the request from standard input; the answer is the last line of standard output."""
    serve(answer_to)


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """The plan as JSON. Raises UserError where the config or the hardware is wrong, or there is no C++ compiler."""
    open_named_device("--gpu", request["gpu"], "install one, or give CXX")
    from launcher.config.checked import load_checked
    from launcher.estimate.forecast import forecast
    from launcher.plan.report import report_of
    from launcher.trace.hardware import read_hardware

    world_size = request["world_size"]
    config = load_checked(request["config"], request["overrides"], world_size=world_size, data=False)
    hardware = read_hardware(request["gpu"], "--gpu")
    sampled = request.get("sampled", False)
    found = forecast(config, world_size, hardware, request["imbalance"], tell, sampled=sampled)
    return report_of(found, request["price"])
