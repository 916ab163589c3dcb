"""Kernels in C++ for a CPU: which of them a run uses, and what is missing where they cannot be compiled."""

from collections.abc import Callable

import torch

from launcher.config.tree import RunConfig
from modeling.kernels import expert_tiles, row_passes
from modeling.kernels.narrow_attention import has_matrix_units


def in_tiles(config: RunConfig) -> bool:
    """Whether the run's experts, on a CPU, are of the kind and size that modeling.kernels.expert_tiles is for."""
    moe, train = config.model.moe, config.train
    if moe is None or not config.model.has_experts or moe.expert_bias or moe.swiglu_limit is not None:
        return False
    return train.precision == "bf16" and expert_tiles.suits(config.model.d_model, moe.d_ff)


def tell_of_missing_kernels(config: RunConfig, device: torch.device, tell: Callable[[str], None]) -> None:
    """Compiles the kernels that a run on this CPU uses. Where that fails, calls ``tell`` with a line that says why.

    The run then goes on with torch's operations.
    """
    if device.type != "cpu":
        return
    problem = row_passes.why_not()
    if problem is None and in_tiles(config) and has_matrix_units():
        problem = expert_tiles.why_not()
    if problem is not None:
        tell(f"kernels in C++ cannot be compiled, so steps take longer: {problem}; install g++")
