"""A fragment's elements, cut from the rows around it."""

import math
from typing import Any

import pytest
import torch

from modeling.dims import Weight
from parallel.checkpoint.boxes import Box
from parallel.zero.fragments import Fragment


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ((8, 3, 4), Box((2, 0, 0), (4, 3, 4))),
        ((8, 3, 4), Box((0, 1, 0), (8, 2, 4))),
        ((6, 5), Box((0, 2), (6, 3))),
        ((7,), Box((0,), (7,))),
        ((), Box((), ())),
    ],
)
def test_rows_around_a_fragment_hold_its_elements_and_no_row_more(shape, held):
    logical = torch.arange(math.prod(shape)).view(shape)
    flat: Any = None
    weight: Any = Weight
    for start in range(held.numel):
        for numel in range(1, held.numel - start + 1):
            fragment = Fragment("w", weight, shape, held, start, numel, flat, 0, is_owner=True)
            around = fragment.around()
            found = fragment.cut(logical[around.slices])
            assert torch.equal(found, logical[held.slices].reshape(-1)[start : start + numel])
            row = held.numel // held.shape[0] if shape else 1
            assert around.numel < numel + 2 * row
