"""Parameter groups of an optimizer: weights that it updates with the same numbers."""

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
    """Optimizer groups from (parameter, its stated ``Weight``, its whole shape); groups with weight decay come first.

    ``widths`` are the whole model's (modeling.mup.widths_of). The caller sets a group's learning rate to the run's
    times the group's ``lr_scale``. The rule keeps its ``states`` for each of the group's weights. Where a group
    ``takes_whole`` matrices, its update gets them from ``matrices``, here those of one device.
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
