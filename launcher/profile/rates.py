"""Measures this machine's rates: matrix products, copies, small operations, and messages between the ranks."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from launcher.trace.parts import AXES
from launcher.trace.roofline import DTYPES, Rates
from launcher.watch.speed import peak_flops_per_second
from modeling.kernels.cuts import E4M3
from modeling.kernels.fp8 import scaled_product
from parallel.mesh import Mesh, wait_for_all
from parallel.preflight.device import seconds_of

MIB = 2**20
SECONDS = 0.1  # the least time for which each measurement is repeated
LEAST_CALLS, MOST_CALLS = 3, 1000


def measure_rates(mesh: Mesh, dtypes: set[torch.dtype]) -> Rates:
    """The machine's rates, the best of several tries each, while all ranks measure the same.

    All ranks call it; it takes about a second.
    """
    device = mesh.device
    large = device.type == "cuda"
    n, copied, message = (8192, 512 * MIB, 64 * MIB) if large else (768, 32 * MIB, 4 * MIB)
    products = {
        DTYPES[dtype]: product_rate(device, dtype, n if dtype != torch.bfloat16 or large else n // 2)
        for dtype in sorted(dtypes, key=str)
    }
    wire = wire_rate(mesh, message) if mesh.world_size > 1 else 0.0
    peak = {name: peak_flops_per_second(device, name) for name in ("fp32", "bf16", "fp16")}
    return Rates(
        name=torch.cuda.get_device_name(device) if large else "this machine's CPU",
        products=products,
        grouped_products=products,
        attention_forward=products,
        attention_backward=products,
        bandwidth=copy_rate(device, copied),
        launch_seconds=launch_seconds(device),
        wires={f"communication: {axis}": wire for axis in AXES} if wire else {},
        peak={name: flops for name, flops in peak.items() if flops is not None},
    )


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The least seconds of a call, over repeats after a first one that warms up."""
    seconds_of(work, 1, device)
    best, began, calls = float("inf"), time.perf_counter(), 0
    while calls < LEAST_CALLS or (time.perf_counter() - began < SECONDS and calls < MOST_CALLS):
        best = min(best, seconds_of(work, 1, device))
        calls += 1
    return best


def product_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """The FLOP/s of a product of n x n matrices."""
    left, right = (torch.ones(n, n, device=device).to(dtype) for _ in range(2))
    if dtype == E4M3:
        ones_N1 = torch.ones(n, 1, device=device)
        return (
            2
            * n**3
            / best_seconds(lambda: scaled_product(left, ones_N1, right, ones_N1, torch.bfloat16, fast=True), device)
        )
    out = torch.empty_like(left)
    return 2 * n**3 / best_seconds(lambda: torch.mm(left, right, out=out), device)


def copy_rate(device: torch.device, n_bytes: int) -> float:
    """The bytes that a copy of ``n_bytes`` reads and writes in a second."""
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / best_seconds(lambda: target.copy_(source), device)


def launch_seconds(device: torch.device) -> float:
    """The seconds of an operation on a single number, as the mean of 100 in a row."""
    number = torch.zeros((), device=device)
    return best_seconds(lambda: [number.add_(1) for _ in range(100)], device) / 100


def wire_rate(mesh: Mesh, n_bytes: int) -> float:
    """The bytes that a rank sends in a second of an all-reduce over all ranks. All ranks call it."""
    message = torch.zeros(n_bytes // 4, device=mesh.device)
    wait_for_all(mesh)
    best = float("inf")
    for _ in range(LEAST_CALLS + 1):
        best = min(best, seconds_of(lambda: dist.all_reduce(message), 1, mesh.device))
    return 2 * (mesh.world_size - 1) / mesh.world_size * n_bytes / best
