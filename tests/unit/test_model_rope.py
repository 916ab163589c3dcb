"""Rotary tables where a pass's length decides: what is told of it changes nothing that its positions say."""

import pytest
import torch

from modeling.rope import Rotary
from modeling.rope_scaling import DynamicScaling, LongRopeScaling

SCALINGS = {
    "dynamic": DynamicScaling(factor=2.0, original_seq_len=16),
    "longrope": LongRopeScaling(
        original_seq_len=16, longest_seq_len=64, short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(2.0, 4.0, 6.0, 8.0)
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("length", [1, 16, 17, 40])
@pytest.mark.parametrize("bound", [16, 17, 64])
def test_a_bound_changes_no_table(scaling, length, bound):
    """Positions that stay within the original length keep its frequencies, however long the row could have been."""
    rotary, positions_BS = Rotary(8, 10000.0, SCALINGS[scaling]), torch.arange(min(length, bound))[None]
    found, expected = rotary.tables(positions_BS, bound), rotary.tables(positions_BS)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_planted_bound_that_is_taken_for_the_length_is_seen(scaling):
    rotary, positions_BS = Rotary(8, 10000.0, SCALINGS[scaling]), torch.arange(10)[None]
    plain = rotary.frequencies(positions_BS.device, length=10)
    assert not torch.equal(plain, rotary.frequencies(positions_BS.device, length=64))
