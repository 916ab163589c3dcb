"""Parameter groups: the weights that an optimizer treats alike."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from modeling.dims import Weight
from modeling.optimizers.config import OptimizerConfig
from modeling.optimizers.matrices import Matrices

ON_ONE_DEVICE = Matrices()


def parameter_groups(
    parameters: Iterable[tuple[nn.Parameter, Weight]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Optimizer groups from parameters and what they are; those on which weight decay falls first.

    A group's learning rate is to be set to the run's times its ``lr_scale``. Beside each of its weights the rule keeps
    its ``states``; where its update needs whole matrices, it gets them from ``matrices``: here those of one device.
    """
    groups: dict[tuple[bool, float, tuple[str, ...]], list[nn.Parameter]] = {}
    for parameter, weight in parameters:
        groups.setdefault(config.group(weight), []).append(parameter)
    return [
        {
            "params": groups[decays, lr_scale, states],
            "weight_decay": config.weight_decay if decays else 0.0,
            "lr_scale": lr_scale,
            "states": states,
            "matrices": ON_ONE_DEVICE,
        }
        for decays, lr_scale, states in sorted(groups, reverse=True)
    ]
