"""Parameter groups: the weights that an optimizer treats alike."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from modeling.dims import Weight
from modeling.mup import BASE, Widths
from modeling.optimizers.config import OptimizerConfig
from modeling.optimizers.matrices import Matrices
from modeling.optimizers.rule import Group

ON_ONE_DEVICE = Matrices()


def parameter_groups(
    parameters: Iterable[tuple[nn.Parameter, Weight, tuple[int, ...]]], config: OptimizerConfig, widths: Widths = BASE
) -> list[dict[str, Any]]:
    """Optimizer groups from parameters, what they are and their whole shapes; those on which weight decay falls first.

    ``widths`` are the whole model's (modeling.mup.widths_of). A group's learning rate is to be set to the run's times
    its ``lr_scale``. Beside each of its weights the rule keeps its ``states``; where the group ``takes_whole``
    matrices, its update gets them from ``matrices``: here those of one device.
    """
    groups: dict[Group, list[nn.Parameter]] = {}
    for parameter, weight, shape in parameters:
        groups.setdefault(config.group(weight, shape, widths), []).append(parameter)
    return [
        {
            "params": groups[group],
            "weight_decay": config.weight_decay * group.decay_scale if group.decays else 0.0,
            "lr_scale": group.lr_scale,
            "states": group.states,
            "takes_whole": group.takes_whole,
            "matrices": ON_ONE_DEVICE,
        }
        for group in sorted(groups, reverse=True)
    ]
