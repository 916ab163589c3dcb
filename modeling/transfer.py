"""Copies from the host's memory to a device."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The CPU tensor copied to the device; on a CPU the tensor itself.

    The host does not wait for a copy to a CUDA device.

    An asynchronous copy needs page-locked memory, so a tensor that lies elsewhere is first copied into some. That
    memory may be released at once: torch does not reuse it before the copy is over. The copy is made on the current
    stream, where the result is used, so no other stream has to be waited for.
    """
    if device.type == "cpu":
        return tensor
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
