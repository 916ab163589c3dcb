"""The warning at a run's start that the package with linear attention's GPU kernels is missing."""

from collections.abc import Callable

import torch

from launcher.config.tree import RunConfig
from modeling.kernels.fused_delta import PACKAGE, fused_rule


def tell_of_missing_package(config: RunConfig, device: torch.device, tell: Callable[[str], None]) -> None:
    """Calls ``tell`` with a line where the run would use the package's kernels on this GPU and they are not usable.

    The run then goes on without them.
    """
    train = config.train
    wants = config.model.linear_attention is not None and train.stored != "fp32" and not train.deterministic
    if wants and device.type == "cuda" and fused_rule() is None:
        tell(
            f"model.linear_attention: package {PACKAGE} is not installed, or does not work: steps take longer, and "
            "more memory than plans made elsewhere count; pip install 'roundtable[linear]'"
        )
