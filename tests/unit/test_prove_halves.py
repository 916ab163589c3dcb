"""Sums that are rounded once at their end: elements halfway between two numbers are let go, sums in 16 bits are not."""

import pytest
import torch
from torch import Tensor

from launcher.prove.checks import ACCUMULATION_BOUND
from launcher.prove.compare.errors import tensor_errors
from launcher.prove.compare.halves import with_halves

SHAPE = (4, 32, 24)
ROUNDS = 8


def rounds_of(dtype: torch.dtype, n: int = 4) -> list[Tensor]:
    """One round's gradients of so many micro-batches, in 16 bits; the last is small in one column."""
    generator = torch.Generator().manual_seed(0)
    parts = [(1e-3 * torch.randn(*SHAPE, generator=generator)).to(dtype) for _ in range(n)]
    parts[-1][:, :, 5] *= 2.0**-20
    return parts


def summed(parts: list[Tensor], repeats: int, sum_dtype: torch.dtype) -> Tensor:
    total = torch.zeros(SHAPE, dtype=sum_dtype)
    for _ in range(repeats):
        for part in parts:
            total += part
    return (total.to(parts[0].dtype).float()) / repeats


def error(ours: Tensor, theirs: Tensor) -> float:
    settled = with_halves({"weight": theirs}, {"weight": ours})
    return tensor_errors({"weight": ours}, settled)["weight"]


def test_what_lies_halfway_may_go_either_way() -> None:
    """In fp32 the same small summand is dropped by one sum, and by the other not; both are rounded to bf16."""
    parts = rounds_of(torch.bfloat16)
    once, repeated = (summed(parts, repeats, torch.float32) for repeats in (1, ROUNDS))
    differ = int((once != repeated).sum())
    assert 0 < differ <= once.numel() // 100  # the case is there
    assert tensor_errors({"weight": repeated}, {"weight": once})["weight"] > ACCUMULATION_BOUND
    assert error(repeated, once) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_planted_sums_in_16_bits_are_seen(dtype: torch.dtype) -> None:
    """They are as far above the bound as without what is let go."""
    parts = rounds_of(dtype)
    once, repeated = summed(parts, 1, torch.float32), summed(parts, ROUNDS, dtype)
    plain = tensor_errors({"weight": repeated}, {"weight": once})["weight"]
    assert error(repeated, once) > 0.8 * plain > 10 * ACCUMULATION_BOUND


def test_planted_wrong_elements_are_seen() -> None:
    """One that is off by more than a step, or more than a few that are off by one."""
    once = summed(rounds_of(torch.bfloat16), 1, torch.float32)
    wrong = once.clone()
    wrong[1, 3, 5] += 0.1 * float(once.norm())
    assert error(wrong, once) > 0.05
    many = once.clone()
    many[1] *= 1 + 2.0**-8
    assert error(many, once) > 10 * ACCUMULATION_BOUND
