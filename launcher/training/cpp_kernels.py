"""Kernels in C++ for a CPU: which of them a run uses, and what is missing where they cannot be compiled."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from launcher.config.tree import RunConfig
from modeling.dtypes import DTYPES
from modeling.kernels import attention_passes, expert_passes, row_passes, tiles
from modeling.kernels.built import leave_out


class Kernel(NamedTuple):
    """A kernel that a run uses: its source, whether it needs units for bf16, and why this process does not use it."""

    source: Path
    needs_units: bool
    why_not: Callable[[], str | None]


def kernels_of(config: RunConfig) -> list[Kernel]:
    """The kernels in C++ that a run on a CPU uses."""
    found = [Kernel(row_passes.SOURCE, False, row_passes.why_not)]
    if config.train.stored == "bf16":
        found.append(Kernel(attention_passes.TILES, True, attention_passes.why_not_tiles))
    if config.train.stored != "fp16":
        found.append(Kernel(attention_passes.VECTORS, False, attention_passes.why_not))
    if experts_suit(config):
        dtype = DTYPES[config.train.precision]
        why_not = partial(expert_passes.why_not, dtype)
        found.append(Kernel(expert_passes.source(dtype), dtype == torch.bfloat16, why_not))
    return found


def experts_suit(config: RunConfig) -> bool:
    """Whether the run's experts, on a CPU, are of the kind and size that modeling.kernels.expert_passes is for."""
    moe, train = config.model.moe, config.train
    if moe is None or not config.model.has_experts or moe.expert_bias or moe.swiglu_limit is not None:
        return False
    dtype = DTYPES.get(train.precision)  # in 8 bits products are others
    if dtype is None or dtype not in expert_passes.DTYPES:
        return False
    return expert_passes.suits(config.model.d_model, moe.d_ff, dtype.itemsize)


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
    told = list[str]()
    for kernel in kernels_of(config):
        problem = share(kernel.why_not())
        if problem is None:
            continue
        leave_out(kernel.source, problem)
        if not kernel.needs_units or tiles.options():  # else nothing is missing that this processor could use
            told.append(problem)
    for problem in dict.fromkeys(told):
        tell(f"kernels in C++ are not used, so steps take longer: {problem}")
