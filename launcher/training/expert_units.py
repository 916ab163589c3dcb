"""Whether experts on this CPU use the processor's matrix units in the fastest way, and what is missing if not."""

from collections.abc import Callable

import torch

from launcher.config.tree import RunConfig
from modeling.kernels import expert_tiles
from modeling.kernels.narrow_attention import has_matrix_units


def in_tiles(config: RunConfig) -> bool:
    """Whether the run's experts, on a CPU, are of the kind and size that modeling.kernels.expert_tiles is for."""
    moe, train = config.model.moe, config.train
    if moe is None or not config.model.has_experts or moe.expert_bias or moe.swiglu_limit is not None:
        return False
    return train.precision == "bf16" and expert_tiles.suits(config.model.d_model, moe.d_ff)


def tell_of_missing_compiler(config: RunConfig, device: torch.device, tell: Callable[[str], None]) -> None:
    """Compiles the experts' passes where this CPU can use them. Where it cannot, calls ``tell`` with a line.

    The run then goes on with products of oneDNN.
    """
    if device.type != "cpu" or not in_tiles(config) or not has_matrix_units():
        return
    problem = expert_tiles.why_not()
    if problem is not None:
        tell(f"model.moe: experts take up to twice as long as on this processor they could: {problem}; install g++")
