"""ledger.jsonl: the samples that each step consumed, and those that were left out, one row for each step.

Samples are numbered by their place in the training order (data/order.py), which never changes within a run. The rows
tile that order: each number up to the last row's lies in exactly one row, as a sample taken or one hopped over.
"""

from typing import Any

from data.order import hopped_ranges, take
from launcher.training.state import TrainState


def ledger_row(state: TrainState, consumed_before: int, *, trained: bool) -> dict[str, Any]:
    """The ledger's row for the step that ``state`` has just finished and that began at sample ``consumed_before``.

    The step took the samples from ``first_sample`` to ``last_sample`` (inclusive) except those in ``hopped``, the
    half-open ranges of ``state.skipped`` that lie before or among them. ``tokens`` is cumulative, as in metrics.jsonl.
    ``trained`` is false where the optimizer did not advance.
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
