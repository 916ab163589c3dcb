"""The ledger's rows say which samples a step took, and tile the training order."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from data.order import take
from launcher.training.ledger import hopped_ranges, ledger_row
from launcher.training.state import TrainState


def test_a_row_says_what_a_step_took():
    state = TrainState(step=3, consumed=24, tokens=600)
    assert ledger_row(state, 16, trained=True) == {
        "step": 3,
        "first_sample": 16,
        "last_sample": 23,
        "hopped": [],
        "tokens": 600,
        "trained": True,
    }


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=5)


@given(skipped=RANGES, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_rows_tile_the_order(skipped, sizes):
    """Batches drawn as the loop draws them, whatever is skipped: each sample in one row, taken or hopped over."""
    state = TrainState(skipped=skipped)
    numbers: list[int] = []
    for size in sizes:
        before = state.consumed
        batch = take(before, size, skipped)
        state.step, state.consumed = state.step + 1, int(batch[-1]) + 1
        row = ledger_row(state, before, trained=True)
        hopped = [number for start, stop in row["hopped"] for number in range(start, stop)]
        taken = sorted({*range(row["first_sample"], row["last_sample"] + 1)} - {*hopped})
        assert taken == batch.tolist() and row["first_sample"] == batch[0]
        numbers += taken + hopped
    assert sorted(numbers) == list(range(state.consumed))


@given(skipped=RANGES, start=st.integers(0, 60), length=st.integers(0, 30))
@example(skipped=[(2, 4), (4, 7)], start=0, length=9)
def test_hopped_ranges_are_apart_and_in_order(skipped, start, length):
    ranges = hopped_ranges(start, start + length, skipped)
    assert all(first < last for first, last in ranges)
    assert all(left[1] < right[0] for left, right in pairwise(ranges))
