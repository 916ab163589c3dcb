"""What an estimate counts of tokens' travel: where it is waited for."""

import pytest

from launcher.estimate.messages import Messages, hide
from launcher.trace.hardware import read_hardware
from launcher.trace.ops import Op, Work
from launcher.trace.roofline import least_seconds
from parallel.collectives import RowExchange
from parallel.mesh import Axis

EP = "communication: ep"
RATES = read_hardware("H200").rates({EP: True})


def message(ms: float) -> Op:
    """One that takes so many milliseconds."""
    return Op(Work("alltoall_base_", "wire", None, 0, 0, 1e-3 * ms * RATES.wire_rate(EP), "all-to-all"), EP, "forward")


def work(ms: float) -> Op:
    """Computation of so many milliseconds."""
    return Op(Work("some", "other", None, round(1e-3 * ms * RATES.bandwidth), 0), "other", "forward")


def milliseconds(ops: list[Op], waits: list[tuple[int, int]]) -> list[float]:
    """Of each operation, without what is hidden."""
    return [1e3 * least_seconds(op, RATES)[0] for op in hide(ops, waits, RATES)]


@pytest.mark.parametrize(
    ("ops", "waits", "found"),
    [
        ([message(2), work(3), work(1)], [], [2, 3, 1]),  # as without ep_overlap
        ([message(2), work(3), work(1)], [(0, 1)], [2, 3, 1]),
        ([message(2), work(3), work(1)], [(0, 2)], [0, 3, 1]),
        ([message(5), work(3), work(1)], [(0, 3)], [1, 3, 1]),
        ([message(2), message(2), work(1), work(1)], [(0, 2), (1, 3)], [2, 1, 1, 1]),  # one after another
        ([message(2), message(2), work(1), work(1)], [(1, 3), (0, 4)], [0, 3, 1, 1]),  # a wait for both
        ([message(2), work(3), message(2), work(1)], [(0, 2), (2, 4)], [0, 3, 1, 1]),
        ([message(2), work(1), message(4), work(1), work(1)], [(0, 3), (2, 5)], [1, 1, 2, 1, 1]),
    ],
)
def test_a_message_counts_where_it_is_waited_for(ops, waits, found):
    assert milliseconds(ops, waits) == pytest.approx(found, abs=1e-3)


def test_messages_are_found_among_the_operations():
    ops: list[Op] = []
    messages, axis = Messages(ops), Axis(0, 2, (0, 1), None)
    first, second = (RowExchange([1, 1], [1, 1], axis) for _ in range(2))
    for exchange in (first, second):
        ops.append(message(1))
        messages.watch(exchange, "begun")
    ops.append(work(1))
    messages.watch(first, "waited for")
    messages.watch(second, "waited for")
    assert messages.waits == [(0, 3), (1, 3)]


def test_sums_of_bytes_are_as_before():
    ops = hide([message(2), work(3)], [(0, 2)], RATES)
    assert ops[0].work.sent_bytes == message(2).work.sent_bytes
