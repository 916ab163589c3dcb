"""Kernels in C++ for a CPU: which of them a run uses, and what is missing where they cannot be compiled."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from launcher.config.tree import RunConfig
from modeling.dtypes import DTYPES
from modeling.kernels import attention_passes, expert_passes, row_passes
from modeling.kernels.built import leave_out
from modeling.kernels.tiles import has_matrix_units

Kernel = tuple[Path, Callable[[], str | None]]  # its source, and why this process does not use it


def experts_suit(config: RunConfig) -> bool:
    """Whether the run's experts, on a CPU, are of the kind and size that modeling.kernels.expert_passes is for."""
    moe, train = config.model.moe, config.train
    if moe is None or not config.model.has_experts or moe.expert_bias or moe.swiglu_limit is not None:
        return False
    dtype = DTYPES.get(train.precision)
    is_for = dtype in expert_passes.DTYPES
    return dtype is not None and is_for and expert_passes.suits(config.model.d_model, moe.d_ff, dtype.itemsize)


def tell_of_missing_kernels(
    config: RunConfig,
    device: torch.device,
    tell: Callable[[str], None],
    share: Callable[[str | None], str | None] = lambda problem: problem,
) -> None:
    """Compiles the kernels that a run on this CPU uses. Where that fails, calls ``tell`` with a line that says why.

    The run then goes on with torch's operations. ``share`` turns this rank's problem into that of the first rank that
    has one. Then no rank uses that kernel: what is the same on several ranks, such as hidden states under tp, must be
    the same to the last bit, or two of them could choose other experts for a token. All ranks call it.
    """
    if device.type != "cpu":
        return
    used: list[Kernel] = [(row_passes.SOURCE, row_passes.why_not), (attention_passes.VECTORS, attention_passes.why_not)]
    on_units: list[Kernel] = []
    if config.train.stored == "bf16":
        on_units.append((attention_passes.TILES, attention_passes.why_not_tiles))
    if experts_suit(config):
        dtype = DTYPES[config.train.precision]
        kernel = expert_passes.source(dtype), partial(expert_passes.why_not, dtype)
        (on_units if dtype == torch.bfloat16 else used).append(kernel)
    told = list[str]()
    for source, why_not in used + on_units:
        problem = share(why_not())
        if problem is None:
            continue
        leave_out(source, problem)
        if (source, why_not) in used or has_matrix_units():  # else nothing is missing that this processor could use
            told.append(problem)
    for problem in dict.fromkeys(told):
        tell(f"kernels in C++ are not used, so steps take longer: {problem}")
