"""Sums of gradients: compiled, and as an operator, they are torch's own, bit for bit."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.trace.ops import work_of
from modeling.kernels.fuse import compiled, plainly
from parallel.zero import accumulation
from parallel.zero.norm import CPU_PIECE

LENGTHS = (1, 2, 5, 1000, CPU_PIECE + 3)


@pytest.fixture(autouse=True)
def all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones are compiled, too."""
    monkeypatch.setattr(accumulation, "WORTH_IT", 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", [0, 1], ids=["aligned", "anywhere"])
def test_compiled_sums_are_plain_ones(dtype: torch.dtype, place: int) -> None:
    """Of any length, from any place in memory, in place, and without a gradient of their own."""
    for length in LENGTHS:
        held, gradient = torch.randn(place + length), torch.randn(place + length).to(dtype)[place:]
        for adds in (True, False):
            total, wanted = held.clone()[place:], held.clone()[place:]
            where = total.data_ptr()
            accumulation.accumulate_there(total.requires_grad_(), gradient, adds)
            (accumulation.add if adds else accumulation.write)(wanted, gradient)
            assert torch.equal(total, wanted) and total.data_ptr() == where, (length, adds)
            assert total.grad_fn is None


def test_chains_and_sums_are_compiled_together() -> None:
    assert accumulation.accumulation_by(compiled) is accumulation.COMPILED
    assert accumulation.accumulation_by(plainly) is accumulation.PLAIN


def test_a_fake_sum_is_one_operation_that_reads_and_writes_once() -> None:
    """As an estimate counts it: 2 bytes read of each bf16 number, 4 read and 4 written of each fp32 one."""
    accumulation._library()
    with FakeTensorMode():
        total, gradient = torch.empty(1000), torch.empty(1000, dtype=torch.bfloat16)
        for adds, n_bytes in ((True, 10_000), (False, 6_000)):
            assert torch.ops.roundtable.accumulate(total, gradient, adds) is None
            work = work_of(torch.ops.roundtable.accumulate.default, (total, gradient, adds), {}, None)
            assert work is not None and (work.bytes, work.launches) == (n_bytes, 1)
