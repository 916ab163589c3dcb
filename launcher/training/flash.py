"""The version of FlashAttention that a run uses on GPUs: train.flash_attention."""

import importlib.util
from importlib.metadata import version as installed

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from launcher.errors import UserError
from parallel.torch_version import in_words, is_at_least

TORCHS_OWN = 2
# For each version that can replace torch's own: the module that torch imports, and (PACKAGES) the package it comes in.
MODULES = {3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
# What finding or activating a version may raise: the package's import errors, a missing library or name, torch's own.
BROKEN = (ImportError, OSError, RuntimeError, ValueError, AttributeError)
PACKAGES = {3: "flash-attn-3 (for Hopper)", 4: "flash-attn-4 (for Hopper and Blackwell)"}
GENERATIONS = {3: (9,), 4: (9, 10)}  # the major compute capabilities that a version has kernels for
# The first torch that can train with a version: earlier ones' backward pass lacks windows, which varlen_attn passes.
FIRST_TORCH = {3: (2, 11), 4: (2, 12)}


def check_flash_attention(version: int) -> None:
    """Raises UserError on a machine with a GPU where the version's package is not installed, or torch is too old.

    It is called before a run creates anything, and only looks for the module: failures of its import are found by
    ``choose_flash_attention``.
    """
    if version == TORCHS_OWN or not torch.cuda.is_available():
        return
    check_torch(version)
    try:
        is_there = importlib.util.find_spec(MODULES[version]) is not None  # imports the package that it lies in
    except ModuleNotFoundError:
        is_there = False
    except BROKEN as error:
        raise refusal(version, told(error)) from None
    if not is_there:
        raise refusal(version, f"no module {MODULES[version]}")


def choose_flash_attention(version: int, device: torch.device) -> None:
    """Makes torch's FlashAttention operators run that version's kernels in this process. On a CPU it does nothing.

    Raises UserError where the package is missing, torch cannot activate it, or the GPU has no kernels for it: torch
    itself would report the last only in the first forward pass.
    """
    name = f"FA{version}"
    if device.type != "cuda" or version == TORCHS_OWN or current_flash_attention_impl() == name:
        return
    check_torch(version)
    try:
        activate_flash_attention_impl(name)
    except BROKEN as error:
        raise refusal(version, told(error)) from None
    major, _ = torch.cuda.get_device_capability(device)
    if major not in GENERATIONS[version]:
        gpu = torch.cuda.get_device_name(device)
        raise UserError(
            [
                f"train.flash_attention={version} needs a GPU of compute capability "
                f"{' or '.join(f'{each}.x' for each in GENERATIONS[version])}, not {gpu} ({major}.x); "
                f"try train.flash_attention={TORCHS_OWN}"
            ]
        )


def check_torch(version: int) -> None:
    """Raises UserError where the installed torch is too old to train with the version."""
    first, found = FIRST_TORCH[version], installed("torch")
    if not is_at_least(found, first):
        raise UserError(
            [
                f"train.flash_attention={version} needs torch {in_words(first)} or newer, not {found}, which "
                f"has no backward pass for it; try train.flash_attention={TORCHS_OWN}"
            ]
        )


def told(error: Exception) -> str:
    """The error's class name and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def refusal(version: int, reason: str) -> UserError:
    """The one-line error, with a remedy, for a version that cannot be used."""
    return UserError(
        [
            f"train.flash_attention={version} needs a package that torch {torch.__version__} can take, and there is "
            f"none ({reason}); install {PACKAGES[version]}, or set train.flash_attention={TORCHS_OWN}"
        ]
    )
