"""The gradient norm over all logical parameters, each counted once: one collective, whatever the ZeRO stage.

DeepSpeed's own norms run a collective for each parameter group and sum squares in fp32, which loses a quarter of a
percent on a flat vector of 45 million (CPU, 2026-11-20). Here squares are summed in fp64.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Gradient = tuple[nn.Parameter, Tensor, float]  # a parameter, what this rank holds of its gradient, and its share
Counted = Callable[
    [Any], bool
]  # whether this rank counts a parameter: of several tp ranks that hold it whole, one does


def install_norm(optimizer: Any, norm: Callable[[], Tensor]) -> None:
    """Makes a DeepSpeed ZeRO optimizer (stage 1, 2 or 3) take its norm from ``norm``: fp32 scalar, loss scale included.

    One that is not finite makes its step drop the gradients: weights and states stay as they are.
    """
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer":
            optimizer.scaled_global_norm = lambda norm_type=2: norm()
        case "DeepSpeedZeroOptimizer_Stage3":
            optimizer._get_norm_groups = lambda: [norm()]
        case "BF16_Optimizer":
            import deepspeed.runtime.bf16_optimizer as module

            module.get_global_norm_of_tensors = lambda **_: norm()
            module.get_norm_with_moe_layers = lambda norm, **_: norm
        case name:
            raise AssertionError(f"no norm for {name}")


def global_norm(parts: Iterable[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """The root of the sum, over ranks, of each gradient's squares times its share: fp32 scalar. All ranks call it.

    The share is the reciprocal of how many ranks hold the gradient, and 0 on ranks that do not count it. One number
    that is not finite, on any rank and counted or not, makes the norm NaN or infinite on all: 0 times it is NaN.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, share in parts:
        total += torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64).square() * share
    dist.all_reduce(total)
    return total.sqrt().float()


def zero_gradients(optimizer: Any, counted: Counted) -> list[Gradient]:
    """What this rank holds of the reduced gradients under ZeRO 1, 2 or 3, before the step."""
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer":
            return _of_partitions(optimizer, counted)
        case "DeepSpeedZeroOptimizer_Stage3":
            return _of_stage3(optimizer, counted)
        case _:
            return _of_bf16(optimizer, counted)


def _of_partitions(optimizer: Any, counted: Counted) -> list[Gradient]:
    found = []
    for group, parameters in enumerate(optimizer.params_in_partition):
        *gradients, last = optimizer.averaged_gradients[group]
        if len(gradients) < len(parameters):
            gradients.append(last)  # else it is the padding at the partition's end, of which DeepSpeed marks only some
        found += [(p, gradient, float(counted(p))) for gradient, p in zip(gradients, parameters, strict=True)]
    return found


def _of_stage3(optimizer: Any, counted: Counted) -> list[Gradient]:
    found = []
    for group, parameters in enumerate(optimizer.fp16_groups):
        gradients = optimizer.averaged_gradients[group]
        found += [(p, gradient, float(counted(p))) for gradient, p in zip(gradients, parameters, strict=True)]
    return found


def _of_bf16(optimizer: Any, counted: Counted) -> list[Gradient]:
    found = []
    for group, parameters in enumerate(optimizer.bf16_groups):
        holders = dist.get_world_size(optimizer.real_dp_process_group[group])  # each holds the whole summed gradient
        for number, parameter in enumerate(parameters):
            if optimizer.fp32_groups_has_gradients[group][number]:
                gradient = optimizer.fp32_groups_gradients[group][number]
                found.append((parameter, gradient, counted(parameter) / holders))
    return found
