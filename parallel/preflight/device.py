"""The preflight's check of a rank's device: the speed of its matrix products, and whether its memory is sound."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parallel.processes.device import own_device, why_unseen

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much work each measurement does. A GPU is kept busy for seconds, so that one that throttles shows it."""

    repeats: int
    matmul_n: int  # products of n x n matrices
    matmul_calls: int  # in a repeat
    memory_share: float  # of the free memory, which is filled; 0: one block of memory_bytes
    memory_bytes: int  # of a block
    message_bytes: int  # of each rank's input to a collective
    disk_bytes: int  # the most that a node writes


# 100 products of 8192: 0.11 s at 1 PFLOP/s. Messages of 128 MiB are past the sizes at which latency counts, and 20 of
# them still take no more than seconds over 10 Gbit/s.
GPU_SIZES = Sizes(
    repeats=20,
    matmul_n=8192,
    matmul_calls=100,
    memory_share=0.9,
    memory_bytes=GIB,
    message_bytes=128 * MIB,
    disk_bytes=GIB,
)
# A repeat of a few milliseconds ends within one time slice of a process, even where other processes share the core.
CPU_SIZES = Sizes(
    repeats=20,
    matmul_n=256,
    matmul_calls=1,
    memory_share=0.0,
    memory_bytes=8 * MIB,
    message_bytes=MIB // 4,
    disk_bytes=8 * MIB,
)


def open_device() -> torch.device:
    """This rank's GPU, made CUDA's current device, or the CPU. Raises RuntimeError where the GPU cannot be used."""
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    elif why := why_unseen():
        raise RuntimeError(f"torch sees {why}")
    return device


def sizes_of(device: torch.device) -> Sizes:
    """How much work the measurements do on a device of this kind."""
    return GPU_SIZES if device.type == "cuda" else CPU_SIZES


def seconds_of(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """The mean time in seconds of one of ``calls`` calls; on a GPU, measured by events on its stream."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls
    started = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - started) / calls


def multiply(device: torch.device, sizes: Sizes) -> list[float]:
    """TFLOP/s of a bf16 matrix product in each repeat. Raises RuntimeError where a product is wrong."""
    n = sizes.matmul_n
    left = torch.full((n, n), 0.5, dtype=torch.bfloat16, device=device)
    right = torch.full((n, n), 2.0, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)
    wrong = int((product != n).sum())
    if wrong:  # sums of ones: exact, and n is a bf16 number
        raise RuntimeError(f"{wrong} of the {n * n} elements of a matrix product are wrong")
    work = lambda: torch.mm(left, right, out=product)  # noqa: E731 -- a name for what is timed
    return [2 * n**3 / seconds_of(work, sizes.matmul_calls, device) / 1e12 for _ in range(sizes.repeats)]


def check_memory(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """The GiB of memory that were filled and read back, and the speed in GB/s. Raises RuntimeError on wrong contents.

    Each block gets a pattern and then its complement, so that every bit was once 0 and once 1.
    """
    n_words = sizes.memory_bytes // 8
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randint(-(2**63), 2**63 - 1, (n_words,), dtype=torch.int64, generator=generator).to(device)
    n_blocks = 1
    if sizes.memory_share:
        free, _ = torch.cuda.mem_get_info(device)
        n_blocks = max(1, int(sizes.memory_share * free) // sizes.memory_bytes - 2)  # a comparison needs room too
    blocks = [torch.empty_like(pattern) for _ in range(n_blocks)]
    seconds = []
    for expected in (pattern, ~pattern):
        _fill(blocks, expected)  # the first touch of host memory maps its pages: not timed
        work = lambda expected=expected: _fill(blocks, expected)  # noqa: E731 -- a name for what is timed
        seconds += [seconds_of(work, 1, device) for _ in range(sizes.repeats)]
        wrong = sum(int((block != expected).sum()) for block in blocks)
        if wrong:
            raise RuntimeError(f"{wrong} of {n_blocks * n_words} words of memory came back wrong")
    n_bytes = n_blocks * n_words * 8
    blocks.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what comes next, NCCL, does not ask torch for memory
    return n_bytes / GIB, 2 * n_bytes / min(seconds) / 1e9


def host_free_gib() -> float:
    """The GiB of this node's memory that are available to new processes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable:"))


def _fill(blocks: list[Tensor], expected: Tensor) -> None:
    for block in blocks:
        block.copy_(expected)
