"""The gradients that DeepSpeed is about to apply: reduced, not yet clipped, wherever its ZeRO stage keeps them."""

from typing import Any

import torch
from torch import Tensor

from launcher.prove.compare.pieces import Piece, fragment_pieces
from parallel.zero.engine import Engine


def gradient_pieces(engine: Engine) -> list[Piece]:
    """This rank's part of the gradients, the loss scale divided out. Across ranks each element appears once.

    To be called between the last micro-batch's backward pass and the step. A fragment without a gradient gives zeros.
    """
    flats: dict[int, Tensor] = {}
    pieces = []
    for fragment in engine.fragments:
        key = id(fragment.flat)
        if key not in flats:
            flats[key] = flat_gradient(engine, fragment.flat) / engine.loss_scale
        pieces += fragment_pieces(fragment, fragment.view(flats[key]))
    return pieces


def flat_gradient(engine: Engine, flat: Tensor) -> Tensor:
    """The gradient of ``flat`` (a tensor that the optimizer updates), laid out as it is: one flat fp32 tensor."""
    optimizer = engine.optimizer
    match type(optimizer).__name__:
        case "DeepSpeedZeroOptimizer":  # ZeRO 1 and 2: slices of this rank's partition, padding last
            group = position(optimizer.single_partition_of_fp32_groups, flat)
            gradient = concatenated(optimizer.averaged_gradients[group])
        case "DeepSpeedZeroOptimizer_Stage3":  # partitions of each parameter, padded each
            group = position(optimizer.fp32_partitioned_groups_flat, flat)
            gradient = concatenated(optimizer.averaged_gradients[group])
        case "BF16_Optimizer":  # ZeRO 1 in bf16: this rank's part of the fp32 accumulators
            group = position(optimizer.fp32_groups_flat_partition, flat)
            gradient = optimizer.fp32_groups_gradient_flat_partition[group].float()
        case _:  # ZeRO 0: every rank has the whole gradient of every parameter
            gradient = torch.zeros_like(flat) if flat.grad is None else flat.grad.float()
    assert gradient.numel() == flat.numel(), (gradient.shape, flat.shape)
    return gradient.detach().view(-1)


def position(flats: list[Any], flat: Tensor) -> int:
    """Which of DeepSpeed's flat tensors this is."""
    return next(number for number, other in enumerate(flats) if other is flat or other.data_ptr() == flat.data_ptr())


def concatenated(parts: list[Tensor]) -> Tensor:
    """DeepSpeed's list of gradient slices as one flat fp32 tensor."""
    return torch.cat([part.detach().reshape(-1).float() for part in parts])
