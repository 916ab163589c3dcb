"""A CUDA device for fake tensors in a build of torch without CUDA. Import before torch, and in a process of its own.

``shim.cpp`` is compiled once against the installed torch. Fake tensors have shapes, dtypes and devices, but neither
memory nor values, so torch's own rules for CUDA check a program that runs over them, at any size.
"""

import ctypes
import importlib.util
import re
from pathlib import Path

from modeling.kernels.built import NotBuilt, built

SOURCE = Path(__file__).with_name("shim.cpp")


class NoShim(Exception):
    """No device can be made; the message is the reason."""


def torch_folder() -> Path:
    """The folder in which torch is installed, found without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def shim_for(torch: Path) -> Path:
    """The path of the shim compiled for this torch. Raises NoShim where it cannot be compiled."""
    headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    version = (torch / "version.py").read_bytes()
    try:
        return built(SOURCE, ["-O0", "-std=c++20", *headers], also=version)
    except NotBuilt as error:
        raise NoShim(str(error)) from None


def is_cuda_build(torch: Path) -> bool:
    """Whether this torch is built for CUDA, by its version file."""
    return re.search(r"^cuda\b[^=]*= *['\"]", (torch / "version.py").read_text(), re.MULTILINE) is not None


def open_device() -> None:
    """Makes a CUDA device for fake tensors; a build of torch for CUDA uses its real GPU.

    Also runs backward passes in the calling thread. Raises NoShim, with the reason, where there can be no device.
    """
    torch = torch_folder()
    if not is_cuda_build(torch):
        load(shim_for(torch), torch)
    import torch as imported

    if is_cuda_build(torch) and not imported.cuda.is_available():
        raise NoShim("this torch is built for CUDA and sees no GPU; take a node with one, or torch's build for CPUs")
    imported._C._set_multithreading_enabled(False)  # the fake tensors' mode is not set in autograd's other threads


def load(path: Path, torch: Path) -> None:
    """Loads the shim into this process, after the libraries of torch that it needs."""
    for library in ("libgomp.so.1", "libc10.so", "libtorch_cpu.so"):
        if (torch / "lib" / library).exists():
            ctypes.CDLL(str(torch / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
