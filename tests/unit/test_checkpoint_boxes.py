"""Flat ranges as boxes, and the coverage certificate."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.checkpoint.boxes import Box, boxes_of_range, coverage_error

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_hold_the_range_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = torch.arange(numel).view(shape)
    boxes = boxes_of_range(shape, start, stop)
    parts = [tensor[box.slices].reshape(-1) for box in boxes]
    assert torch.equal(torch.cat(parts) if parts else torch.arange(0), torch.arange(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


@given(shapes, st.data())
def test_partitions_are_covered_exactly_once(shape, data):
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=5))})
    boxes = [box for start, stop in itertools.pairwise(cuts) for box in boxes_of_range(shape, start, stop)]
    assert coverage_error(shape, data.draw(st.permutations(boxes))) is None


@given(shapes, st.data())
def test_planted_gap_or_overlap_is_found(shape, data):
    numel = math.prod(shape)
    boxes = boxes_of_range(shape, 0, numel // 2) + boxes_of_range(shape, numel // 2, numel)
    victim = data.draw(st.sampled_from(boxes))
    without = [box for box in boxes if box is not victim]
    assert "missing" in (coverage_error(shape, without) or "")
    assert "overlap" in (coverage_error(shape, [*boxes, victim]) or "")


def test_planted_shift_is_found_although_the_elements_add_up():
    assert "overlap" in (coverage_error((4, 4), [Box((0, 0), (2, 4)), Box((1, 0), (2, 4))]) or "")
    assert "outside" in (coverage_error((4, 4), [Box((0, 0), (2, 4)), Box((3, 0), (2, 4))]) or "")
