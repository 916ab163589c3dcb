"""Parameter groups: the weights that an optimizer treats alike."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from modeling.dims import Weight
from modeling.optimizers.config import OptimizerConfig


def parameter_groups(
    parameters: Iterable[tuple[nn.Parameter, Weight]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Optimizer groups from parameters and what they are; those on which weight decay falls first.

    A group's learning rate is to be set to the run's times its ``lr_scale``.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for parameter, weight in parameters:
        groups.setdefault(config.group(weight), []).append(parameter)
    return [
        {"params": groups[key], "weight_decay": config.weight_decay if key[0] else 0.0, "lr_scale": key[1]}
        for key in sorted(groups, reverse=True)
    ]
