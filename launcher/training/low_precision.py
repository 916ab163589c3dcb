"""Whether a device supports train.precision, and whether a CPU is fast enough at it to be useful."""

import torch

from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.processor.narrow import SLOW, narrow_cost
from launcher.watch.watchers import NullWatchers, Watchers
from modeling.dtypes import DTYPES
from modeling.kernels.expert_turns import is_built_by_rows
from modeling.precision_config import Precision
from parallel.mesh import Mesh

HOPPER = (9, 0)  # the first compute capability with torch's grouped products of 8 bits


def check_precision(precision: Precision, device: torch.device, remedy: str = "try train.precision=bf16") -> None:
    """Raises UserError for fp8 on a GPU without torch's 8-bit matrix products (before Hopper, or AMD's).

    A CPU passes: it multiplies the same 8-bit factors in bf16.
    """
    if precision != "fp8" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < HOPPER or torch.version.hip is not None:
        name = torch.cuda.get_device_name(device)
        raise UserError([f"train.precision=fp8 needs an NVIDIA GPU since Hopper, not {name}; {remedy}"])


def report_slow_products(watchers: Watchers | NullWatchers, config: RunConfig, mesh: Mesh, step: int) -> None:
    """Rank 0 writes a "slow_products" event where a CPU's matrix products are far slower in 16 bits than in fp32.

    It measures both first. Other ranks, GPUs and runs in fp32 do nothing.
    """
    stored = config.train.stored
    if mesh.rank != 0 or mesh.device.type != "cpu" or stored == "fp32" or is_built_by_rows(DTYPES[stored]):
        return
    times = narrow_cost(stored, rounds=3)
    if times >= SLOW:
        told = {"precision": config.train.precision, "times_fp32": times, "try": "train.precision=fp32"}
        watchers.event({"step": step, "event": "slow_products", **told})
