"""Whether a device computes what train.precision asks for."""

import torch

from launcher.errors import UserError
from modeling.precision_config import Precision

HOPPER = (9, 0)  # the first compute capability with torch's grouped products of 8 bits


def check_precision(precision: Precision, device: torch.device, remedy: str = "try train.precision=bf16") -> None:
    """Raises UserError where the GPU is too old for products of 8 bits. A CPU multiplies the same factors in bf16."""
    if precision != "fp8" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < HOPPER or torch.version.hip is not None:
        name = torch.cuda.get_device_name(device)
        raise UserError([f"train.precision=fp8 needs an NVIDIA GPU since Hopper, not {name}; {remedy}"])
