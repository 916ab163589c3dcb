"""The picture of `profile`: its words lie in their places."""

import itertools

import pytest

from launcher.profile.picture import draw_memory
from launcher.trace.recorder import HOLDERS, Memory


@pytest.mark.parametrize("n_micro_batches", [1, 4, 6, 8, 16])
def test_names_of_phases_lie_within_them(n_micro_batches: int) -> None:
    """Of many micro-batches no name lies over the next one, and the short update's not beyond the axes."""
    phases = [phase for _ in range(n_micro_batches) for phase in ["forward"] * 10 + ["backward"] * 10] + ["update"]
    held = [dict.fromkeys(HOLDERS, 0) | {"weights": 2**20, "activations": at % 10 * 2**16} for at in range(len(phases))]
    times = [0.01 * at for at in range(len(phases))]
    figure = draw_memory("x", Memory(times, held, phases, held[9], times[9], "forward"), "time")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    names = [text for text in axes.texts if text.get_text() in ("forward", "backward", "update")]
    boxes = sorted((text.get_window_extent() for text in names), key=lambda box: box.x0)
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
    assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)
    assert bool(names) == (n_micro_batches <= 6)
