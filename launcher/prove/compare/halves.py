"""Allowance for sums that are rounded to 16 bits at the end: one halfway between two numbers may round either way."""

from collections.abc import Mapping

import torch
from torch import Tensor

# A sum of bf16 numbers often lies halfway between two bf16 numbers, since it has only a few bits more than they; then a
# summand so small that fp32 drops it, or a bit of it, decides. Seen: 3 elements of 3072, for an expert whose inner
# value was 2^-20 of the others' in one micro-batch (AMD EPYC with AVX-512, 2026-11-24). A layout that wrongly sums in
# 16 bits differs in most elements.
SHARE, FEW = 0.01, 2  # the most elements of a tensor that are allowed to differ: this share of them, or this number
STEP = 2.0**-7  # the largest step from a bf16 number to the next, as a share of the number; fp16's steps are smaller


def with_halves(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``theirs``, with the few elements that differ most taken from ``ours`` where one bf16 step may explain that.

    The step is measured against the tensor's norm: it arises in one rank's sum, which may be larger than the sum over
    ranks, but hardly larger than the norm.
    """
    found = {}
    for name, reference in theirs.items():
        value = reference.flatten().clone()
        difference = (ours[name].flatten() - value).abs()
        most = min(max(FEW, int(SHARE * value.numel())), value.numel())
        places = difference.topk(most).indices
        is_step = difference[places] <= STEP * torch.linalg.vector_norm(value)
        value[places[is_step]] = ours[name].flatten()[places[is_step]]
        found[name] = value.view_as(reference)
    return found
