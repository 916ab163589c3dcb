"""From the host's memory to a device's."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The CPU tensor on the device; on a CPU the tensor itself. A CUDA device's host does not wait for the copy.

    That needs page-locked memory: what does not lie there is first copied into some. It may be let go of at once, for
    torch gives it to nobody else before the copy is over. The copy is made in order on the current stream, on which the
    result is used, so no other stream has to be waited for.
    """
    if device.type == "cpu":
        return tensor
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
