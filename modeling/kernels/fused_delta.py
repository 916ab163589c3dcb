"""The gated delta rule by flash-linear-attention's kernels (package fla-core), on CUDA, where it is installed.

Shape letters as in ``gated_delta``; T all tokens.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from modeling.context import Context
from modeling.kernels.direct import REAL

PACKAGE = "fla-core"
BROKEN = (ImportError, OSError, RuntimeError, AttributeError)  # what importing it raises, where a part of it is missing


@functools.cache
def fused_rule() -> Callable[..., Any] | None:
    """``fla.ops.gated_delta_rule.chunk_gated_delta_rule``; None where the package is not installed, or is broken."""
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        return None
    try:
        return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except BROKEN as error:
        warnings.warn(f"linear attention goes by torch's operations: {error} (package {PACKAGE})", stacklevel=2)
        return None


def takes_fused(v_BSHW: Tensor) -> bool:
    """Whether the kernels compute it: in 16 bits on CUDA, and where results may differ from run to run.

    They multiply fp32 in TF32, and are tuned anew at each start. Tensors without values, of which a plan is made on any
    machine, go by torch's operations.
    """
    is_half = v_BSHW.dtype in (torch.bfloat16, torch.float16)
    is_there = v_BSHW.device.type == "cuda" and type(v_BSHW) in REAL
    if not is_there or not is_half or torch.are_deterministic_algorithms_enabled():
        return False
    return fused_rule() is not None


def fused_delta(
    q_BSGC: Tensor, k_BSGC: Tensor, v_BSHW: Tensor, fading_BSH: Tensor, writing_BSH: Tensor, context: Context
) -> Tensor:
    """``modeling.kernels.gated_delta.gated_delta`` by the package's kernels, over the documents' boundaries."""
    rule = fused_rule()
    assert rule is not None
    boundaries, _ = context.cu_seqlens
    rows = [each.flatten(0, 1)[None] for each in (q_BSGC, k_BSGC, v_BSHW, fading_BSH, writing_BSH)]
    out_1THW, _ = rule(*rows, use_qk_l2norm_in_kernel=True, cu_seqlens=boundaries.long())
    return out_1THW[0].view(v_BSHW.shape)
