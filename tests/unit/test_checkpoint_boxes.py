"""Flat ranges as boxes, and the coverage certificate."""

import itertools
import math
import time

import pytest
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


def test_what_is_missing_is_told_although_the_elements_add_up():
    """One element twice, another not at all: the first one in order is named."""
    boxes = [Box((1,), (1,)), Box((1,), (1,))]
    assert coverage_error((2,), boxes) == "element [0] is missing"
    assert coverage_error((), [Box((), ())]) is None and coverage_error((0, 3), []) is None


@pytest.mark.parametrize("strips", ["rows", "columns"])
def test_many_boxes_take_time_in_proportion_to_their_number(strips):
    """Strips along the first dim all meet every plane of it: comparing each pair would take hours."""
    n = 8_000
    boxes = [Box((i, 0), (1, n)) if strips == "rows" else Box((0, i), (n, 1)) for i in range(n)]
    started = time.process_time()
    assert coverage_error((n, n), boxes) is None
    assert "overlap" in (coverage_error((n, n), [*boxes, boxes[n // 2]]) or "")
    assert time.process_time() - started < 3
