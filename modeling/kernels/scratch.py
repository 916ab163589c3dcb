"""Scratch memory for CPU kernels, kept from call to call.

A new large tensor may cost more than the computation into it: above a threshold glibc maps its memory afresh each time,
and each page is a fault (docs/measurements.md).
"""

import math
import threading

import torch
from torch import Tensor, nn

ROOM = 16  # a tensor is made larger than asked for by 1 / ROOM, since sizes change from step to step


class Scratch(threading.local):
    """Scratch tensors by name and dtype, separate for each thread. Taking a name again overwrites its old contents.

    So no scratch tensor may be returned, or saved for a backward pass. Fake tensors are not kept: they have no memory.

        rows_RD = SCRATCH.take("rows", (n_rows, d_model), hidden_TD)
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of ``like``'s dtype on the CPU, with arbitrary contents."""
        if not is_real(like):
            return like.new_empty(shape)
        numel = math.prod(shape)
        flat = self.kept.get((name, like.dtype))
        if flat is None or flat.numel() < numel:
            self.kept.pop((name, like.dtype), None)  # first, so that both never exist together
            flat = torch.empty(numel + numel // ROOM, dtype=like.dtype)
            self.kept[name, like.dtype] = flat
        return flat[:numel].view(shape)


SCRATCH = Scratch()


def is_real(tensor: Tensor) -> bool:
    """Whether it is a plain tensor or parameter, rather than a fake tensor or another subclass."""
    return type(tensor) in (Tensor, nn.Parameter)
