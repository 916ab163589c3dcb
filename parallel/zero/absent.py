"""A DeepSpeed accelerator for an absent GPU: tensors are made on a fake CUDA device, and no driver is called."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator, set_accelerator

from parallel.zero.patches import SlowFp16


class AbsentGpu(SlowFp16):
    """A CPU whose tensors are made on a fake CUDA device."""

    def device_name(self, device_index: int | None = None) -> Any:
        """The device's name for torch."""
        return "cuda:0"

    def current_device_name(self) -> Any:
        """The device on which DeepSpeed makes its buffers."""
        return "cuda:0"

    def current_device(self) -> Any:
        """The device's number."""
        return 0

    def on_accelerator(self, tensor: Any) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == "cuda"

    def pin_memory(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """The tensor as it is: there is no driver to lock its pages for."""
        return tensor


@contextmanager
def absent_gpu() -> Iterator[None]:
    """While entered, DeepSpeed's accelerator is the absent GPU."""
    before = get_accelerator()
    set_accelerator(AbsentGpu())
    try:
        yield
    finally:
        set_accelerator(before)
