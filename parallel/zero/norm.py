"""The gradient norm over all logical parameters, each counted once, by one collective at every ZeRO stage.

DeepSpeed's own norms run a collective for each parameter group and sum squares in fp32, which loses a quarter of a
percent on a flat vector of 45 million (CPU, 2026-11-20). Here squares are summed in fp64.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.kernels.fuse import Fuse, compiled, plainly
from modeling.kernels.scratch import SCRATCH

CPU_PIECE = 1 << 16  # elements whose fp64 values stay in a core's cache
ROW = 1 << 12  # elements that a GPU's compiled kernel sums at once: thousands of sums for each of its multiprocessors
WORTH_IT = 1 << 20  # elements: with fewer, calling a compiled kernel takes longer than a GPU's work on them
MOST = 1 << 30  # elements that a kernel is given at once: it counts in 32 bits
ALIGNED = 16  # bytes, the alignment of vectors: torch copies other tensors before it calls a compiled kernel


def global_norm(parts: Iterable[tuple[Tensor, float]], device: torch.device, fuse: Fuse = plainly) -> Tensor:
    """The norm of all gradients over all ranks, as an fp32 scalar on ``device``, the same on all. All ranks call it.

    It is the root of the sum over ranks of each gradient's squares times its share. ``parts``: this rank's gradients
    with their shares: 1 / the number of ranks that hold the gradient, or 0 on ranks that do not count it. One number
    that is not finite, on any rank, even with share 0 (0 times infinity is NaN), makes the norm NaN or infinite on all.
    ``fuse``: how chains of elementwise work are computed on the device. Sends one fp64 number by an all-reduce.
    """
    by_share: dict[float, tuple[list[Tensor], list[Tensor]]] = {}  # sums of squares; and gradients that have none
    for gradient, share in parts:
        sums, small = by_share.setdefault(share, ([], []))
        if is_summed_alone(gradient):
            sums.append(sum_of_squares(gradient.detach(), fuse))
        elif gradient.numel():
            small.append(gradient.detach())
    total = torch.zeros((), dtype=torch.float64, device=device)
    for share, (sums, small) in by_share.items():
        if small:  # a few kernel launches for all of them together
            norms = torch._foreach_norm(small, 2, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]
            sums.append(torch.stack(norms).square().sum())
        if sums:
            total += torch.stack(sums).sum() * share
    dist.all_reduce(total)
    return total.sqrt().float()


def is_summed_alone(gradient: Tensor) -> bool:
    """Whether the gradient's squares are summed by calls of their own: on a CPU always, on a GPU if it is large."""
    return gradient.is_cpu or gradient.numel() >= WORTH_IT


def sum_of_squares(gradient: Tensor, fuse: Fuse = plainly) -> Tensor:
    """The sum of a gradient's squares, as an fp64 scalar.

    On a CPU it is computed piece by piece, since widening the whole would take new memory. There a dot product of
    widened numbers takes 21 ms for 31.5 million, and torch's norm in fp64, which widens them in memory of its own, 48
    (one thread, Intel with AMX, 2026-11-29).

    On a GPU a compiled kernel reads each number of a large gradient once, where torch's norm in fp64 first makes a copy
    of twice the bytes: an H200 took 30 ms for Llama 3 8B's 4.5 billion (16 layers), and reads them in 4.
    """
    if gradient.is_cpu:
        wide_P = SCRATCH.take("norm: squares", (CPU_PIECE,), gradient.new_empty((), dtype=torch.float64))
        pieces = gradient.reshape(-1).split(CPU_PIECE)
        widened = (wide_P[: len(each)].copy_(each) for each in pieces)
        return torch.stack([wide.dot(wide) for wide in widened]).sum()
    if fuse is compiled and gradient.numel() >= WORTH_IT and gradient.is_contiguous():
        flat = gradient.view(-1)
        if flat.data_ptr() % ALIGNED == 0:
            return sum_by_rows(flat, fuse)
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()


def sum_by_rows(flat: Tensor, fuse: Fuse) -> Tensor:
    """The sum of a flat tensor's squares in fp64: rows of ROW elements are summed by ``fuse``, then the rows' sums."""
    n_rows = len(flat) // ROW
    rest = flat[n_rows * ROW :]
    sums = [torch.linalg.vector_norm(rest, dtype=torch.float64).square()] if len(rest) else []
    for rows_NR in flat[: n_rows * ROW].view(n_rows, ROW).split(MOST // ROW):
        sums.append(fuse(squares_of_rows, rows_NR, rows_vary=True).sum())
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def squares_of_rows(rows_NR: Tensor) -> Tensor:
    """The sum of each row's squares (N,), in fp64."""
    return rows_NR.double().square().sum(1)
