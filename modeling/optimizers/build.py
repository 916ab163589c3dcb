"""Parameter groups, and the torch optimizer that a config names."""

from collections.abc import Iterable
from typing import Any, assert_never

import torch
from torch import nn

from modeling.dims import Weight
from modeling.optimizers.config import AdamWConfig, OptimizerConfig, SGDConfig


def decays(weight: Weight, decay_embeddings: bool) -> bool:
    """Whether weight decay falls on a parameter: matrices only, embeddings and the head if asked for."""
    return len(weight.dims) >= 2 and (decay_embeddings or "vocab" not in weight.dims)


def parameter_groups(
    parameters: Iterable[tuple[nn.Parameter, Weight]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Two optimizer groups, with and without weight decay, from parameters and what they are."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter, weight in parameters:
        groups[decays(weight, config.decay_embeddings)].append(parameter)
    decay = {True: config.weight_decay, False: 0.0}
    return [{"params": group, "weight_decay": decay[key]} for key, group in groups.items() if group]


def build_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig, *, fused: bool) -> torch.optim.Optimizer:
    """The torch optimizer over ``groups``; ``fused`` takes torch's fused kernels (CUDA)."""
    match config:
        case AdamWConfig():
            betas = (config.beta1, config.beta2)
            return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)
        case SGDConfig():
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
        case _:
            assert_never(config)


def state_names(config: OptimizerConfig) -> tuple[str, ...]:
    """The per-element state tensors that the optimizer keeps, by torch's names."""
    match config:
        case AdamWConfig():
            return ("exp_avg", "exp_avg_sq")
        case SGDConfig():
            return ("momentum_buffer",) if config.momentum else ()
        case _:
            assert_never(config)
