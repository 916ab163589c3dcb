"""Sums that are rounded to few bits at their end: one that lies halfway between two numbers may go either way."""

from collections.abc import Mapping

import torch
from torch import Tensor

# A sum of bf16 numbers lies halfway between two others rather often, since it has few bits more than they; a summand so
# small that fp32 drops it, or a bit of it, then decides. Seen: 3 elements of 3072, for an expert whose inner value was
# 2^-20 of the others' in one micro-batch (AMD EPYC with AVX-512, 2026-11-24). Sums in 16 bits differ in most elements.
SHARE, FEW = 0.01, 2  # of a tensor's elements, at most, or so many
STEP = 2.0**-7  # from a bf16 number to the next, as a share of it at most: fp16's steps are smaller


def with_halves(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``theirs``, but the few elements that differ most are ``ours``, where a step of bf16 may be all that parts them.

    Such a step is of one rank's sum, which may be larger than the sum over ranks, but hardly than the tensor's norm.
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
