"""ledger.jsonl: which samples each step consumed, so that what was trained on, and what was not, is known afterwards.

Samples are numbered by their place in the training order (data/order.py), which never changes within a run. The rows
tile it: each number up to the last row's is in one row only, as taken or as hopped over.
"""

from typing import Any

from data.order import hopped_ranges, take
from launcher.training.state import TrainState


def ledger_row(state: TrainState, consumed_before: int, *, trained: bool) -> dict[str, Any]:
    """The line of the step that ``state`` has just ended and that began at sample ``consumed_before``.

    ``first_sample`` and ``last_sample`` are the step's, without the half-open ranges ``hopped``: those of
    ``state.skipped`` that lie before or among them. ``tokens`` is cumulative, as in metrics.jsonl. ``trained`` is false
    where the optimizer did not advance.
    """
    (first,) = take(consumed_before, 1, state.skipped).tolist()
    return {
        "step": state.step,
        "first_sample": first,
        "last_sample": state.consumed - 1,
        "hopped": hopped_ranges(consumed_before, state.consumed, state.skipped),
        "tokens": state.tokens,
        "trained": trained,
    }
