"""Which FlashAttention a run takes on GPUs: train.flash_attention."""

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from launcher.errors import UserError

TORCHS_OWN = 2
# What each version comes in, for those that torch can take in its own one's place.
PACKAGES = {3: "flash-attn-3 (for Hopper)", 4: "flash-attn-4 (for Hopper and Blackwell)"}


def choose_flash_attention(version: int, device: torch.device) -> None:
    """Has torch's operators of FlashAttention run that version's kernels in this process, on a GPU.

    Raises UserError where its package is not there or torch cannot take it. On a CPU nothing depends on it.
    """
    name = f"FA{version}"
    if device.type != "cuda" or version == TORCHS_OWN or current_flash_attention_impl() == name:
        return
    try:
        activate_flash_attention_impl(name)
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # a library's, torch's own, a name it has not
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            [
                f"train.flash_attention={version} needs a package that torch {torch.__version__} can take, and there "
                f"is none ({reason}); install {PACKAGES[version]}, or set train.flash_attention={TORCHS_OWN}"
            ]
        ) from None
