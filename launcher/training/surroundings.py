"""The environment of a start: versions of Python and libraries, system, device and cores. Recorded with each start."""

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("torch", "deepspeed", "transformers")
FIELDS = ("python", *LIBRARIES, "cuda", "system", "device", "cores")


def surroundings(device: torch.device) -> dict[str, Any]:
    """This process's environment, with the keys FIELDS.

    ``device`` is the GPU as torch names it, or the processor's model; ``cores`` are those that the process may use.
    ``cuda`` is null for a build of torch without CUDA, and a library that is not installed is null too.
    """
    found: dict[str, Any] = {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}
    found |= {"cuda": torch.version.cuda, "system": f"{platform.system()} {platform.release()}"}
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


@cache
def processor() -> str:
    """The processor's model name as Linux gives it; elsewhere its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.machine()
