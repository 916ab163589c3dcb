"""Whether a device computes what train.precision asks for, and whether a CPU does in a time that anybody waits for."""

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
    """Raises UserError where the GPU is too old for products of 8 bits. A CPU multiplies the same factors in bf16."""
    if precision != "fp8" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < HOPPER or torch.version.hip is not None:
        name = torch.cuda.get_device_name(device)
        raise UserError([f"train.precision=fp8 needs an NVIDIA GPU since Hopper, not {name}; {remedy}"])


def report_slow_products(watchers: Watchers | NullWatchers, config: RunConfig, mesh: Mesh, step: int) -> None:
    """The event of a CPU that takes far longer for products in the run's 16 bits than in fp32; rank 0 measures it."""
    stored = config.train.stored
    if mesh.rank != 0 or mesh.device.type != "cpu" or stored == "fp32" or is_built_by_rows(DTYPES[stored]):
        return
    times = narrow_cost(stored, rounds=3)
    if times >= SLOW:
        told = {"precision": config.train.precision, "times_fp32": times, "try": "train.precision=fp32"}
        watchers.event({"step": step, "event": "slow_products", **told})
