"""Speed and memory of a step: tokens per second, model FLOP/s utilization (MFU), peak memory.

MFU is the FLOP/s that the model's own arithmetic needs (closed form, recomputation not counted; Chowdhery et al. 2022,
"PaLM", appendix B) over the peak of the devices. The peaks are the dense figures of the vendor's datasheets, at fp32
accumulation and without structured sparsity; fp32 is the plain rate, with TF32 off. A device that is not listed by its
exact name has no known peak: a guess from a similar name would be wrong for MIG slices, laptop parts and custom parts.
"""

import re
import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

from modeling.precision_config import Stored

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Dense peak of one device in TFLOP/s; None where the hardware lacks the format."""

    bf16: float | None
    fp16: float | None
    fp32: float


# Patterns match the whole of torch.cuda.get_device_name(), without its leading "NVIDIA ", "Tesla " or "GeForce ".
PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"V100-SXM[23]-\d+GB(-LS)?", Peak(bf16=None, fp16=125.0, fp32=15.7)),
    (r"V100-PCIE-\d+GB", Peak(bf16=None, fp16=112.0, fp32=14.0)),
    (r"V100S-PCIE-32GB", Peak(bf16=None, fp16=130.0, fp32=16.4)),
    (r"T4", Peak(bf16=None, fp16=65.0, fp32=8.1)),
    (r"A100-(SXM4|PCIE|PCIe)-(40|80)GB|A100 80GB PCIe", Peak(bf16=312.0, fp16=312.0, fp32=19.5)),
    (r"A30", Peak(bf16=165.0, fp16=165.0, fp32=10.3)),
    (r"A10", Peak(bf16=125.0, fp16=125.0, fp32=31.2)),
    (r"A40", Peak(bf16=149.7, fp16=149.7, fp32=37.4)),
    (r"L4", Peak(bf16=121.0, fp16=121.0, fp32=30.3)),
    (r"L40", Peak(bf16=181.05, fp16=181.05, fp32=90.5)),
    (r"L40S", Peak(bf16=362.05, fp16=362.05, fp32=91.6)),
    (r"H100 80GB HBM3", Peak(bf16=989.5, fp16=989.5, fp32=67.0)),  # SXM
    (r"H100 PCIe", Peak(bf16=756.5, fp16=756.5, fp32=51.0)),
    (r"H100 NVL", Peak(bf16=835.5, fp16=835.5, fp32=60.0)),
    (r"H200", Peak(bf16=989.5, fp16=989.5, fp32=67.0)),  # SXM
    (r"H200 NVL", Peak(bf16=835.5, fp16=835.5, fp32=60.0)),
    (r"GH200 (480|120|144)GB?( HBM3e?)?", Peak(bf16=989.5, fp16=989.5, fp32=67.0)),
    (r"H800", Peak(bf16=989.5, fp16=989.5, fp32=67.0)),  # SXM
    (r"AMD Instinct MI300X", Peak(bf16=1307.4, fp16=1307.4, fp32=163.4)),
    (r"B200", Peak(bf16=2250.0, fp16=2250.0, fp32=75.0)),
    (r"GB200", Peak(bf16=2500.0, fp16=2500.0, fp32=80.0)),
    (r"B300", Peak(bf16=2250.0, fp16=2250.0, fp32=75.0)),
    (r"GB300", Peak(bf16=2500.0, fp16=2500.0, fp32=80.0)),
    (r"RTX 3090", Peak(bf16=71.0, fp16=71.0, fp32=35.6)),
    (r"RTX 4090", Peak(bf16=165.2, fp16=165.2, fp32=82.6)),
    (r"RTX 5090", Peak(bf16=209.5, fp16=209.5, fp32=104.8)),
)


def peak_flops_per_second(device: torch.device, precision: Stored) -> float | None:
    """The device's dense peak in FLOP/s, or None where it is not known (a CPU, a part that is not listed)."""
    if device.type != "cuda":
        return None
    return listed_peak(torch.cuda.get_device_name(device), precision)


def listed_peak(device_name: str, precision: Stored) -> float | None:
    """The dense peak in FLOP/s of a device as torch.cuda names it, or None where the table lacks it."""
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", device_name)
    for pattern, peak in PEAKS:
        if re.fullmatch(pattern, name):
            tflops: float | None = getattr(peak, precision)
            return tflops * 1e12 if tflops is not None else None
    return None


def peak_memory_gib(device: torch.device) -> float:
    """GiB held at the highest moment so far: torch's allocations on CUDA, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / GIB


def speed_metrics(
    *,
    tokens: int,
    step_seconds: float,
    flops_per_token: float,
    peak_flops: float | None,
    n_devices: int,
    device: torch.device,
) -> dict[str, Any]:
    """The speed keys of an update's row: tokens_per_second, mfu, peak_gib, step_seconds.

    ``tokens`` are those of the whole global batch, ``flops_per_token`` the model's forward and backward for one of
    them, ``peak_flops`` the peak of one of ``n_devices`` in FLOP/s (None: mfu is null).
    """
    tokens_per_second = tokens / step_seconds
    mfu = None if peak_flops is None else tokens_per_second * flops_per_token / (peak_flops * n_devices)
    return {
        "tokens_per_second": tokens_per_second,
        "mfu": mfu,
        "peak_gib": peak_memory_gib(device),
        "step_seconds": step_seconds,
    }
