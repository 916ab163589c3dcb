"""What is computed while tokens travel to their experts, in both passes; nobody reads rows before they came."""

import pytest
import torch
from torch import Tensor, nn

from arriving import AXIS, Arriving
from modeling.context import Context
from modeling.kernels.experts import count_pairs, experts_grouped
from modeling.moe import MoE, build_moe
from modeling.moe_config import MoEConfig, SequenceAuxBalance
from parallel.expert import make_dispatch
from small_models import packed_rows

CONFIG = MoEConfig(n_experts=8, top_k=2, d_ff=12, n_shared_experts=1, balance=SequenceAuxBalance(coefficient=0.1))


def layer(overlap: bool) -> MoE:
    """A rank's part of a layer."""
    moe = build_moe(CONFIG, 16)
    generator = torch.Generator().manual_seed(0)
    for name in ("gate", "up", "down"):
        setattr(moe.experts, name, nn.Parameter(getattr(moe.experts, name)[:4]))
    for weight in moe.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    moe.sender.dispatch = make_dispatch(AXIS, overlap=overlap)
    if overlap:
        moe.compute_shared_early()
    return moe


def passes(moe: MoE, events: list[str]) -> list[Tensor]:
    """The output and every gradient; notes when the shared expert's passes run."""
    rows = packed_rows(64, 0, [[9, 7], [16]])
    context = Context(rows.documents_BS, rows.positions_BS, balance_scale=1.0, z_scale=1.0)
    hidden_BSD = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert moe.shared is not None
    moe.shared.register_forward_hook(lambda *_: events.append("shared"))
    moe.shared.gate.weight.register_hook(lambda _: events.append("shared"))  # type: ignore[union-attr]
    balance = moe.add_sequence_sums
    moe.add_sequence_sums = lambda sums_BX: (events.append("balance"), balance(sums_BX))[1]
    out_BSD, _ = moe(hidden_BSD, context, 0)
    events.append("forward ends")
    out_BSD.square().sum().backward()
    return [out_BSD, hidden_BSD.grad, *(weight.grad for weight in moe.parameters())]  # type: ignore[list-item]


def test_the_shared_expert_runs_while_tokens_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the balance loss, in the forward pass; in the backward pass while gradients travel. Bit for bit the same."""
    there = Arriving(monkeypatch, more=1)
    found = passes(layer(overlap=True), there.events)
    forward = ["begin 1", "balance", "shared", "wait 1", "begin 2", "wait 2", "forward ends"]
    assert there.events == [*forward, "begin 3", "wait 3", "begin 4", "shared", "wait 4"]
    there.events.clear()
    wanted = passes(layer(overlap=False), there.events)
    assert there.events == ["balance", "shared", "forward ends", "shared"]
    assert len(found) == len(wanted) > 8
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("never", [1, 2, 3, 4])
def test_planted_reading_without_a_wait(monkeypatch: pytest.MonkeyPatch, never: int) -> None:
    """Rows that are read too early are not numbers: the output, or the gradient alone."""
    there = Arriving(monkeypatch, more=1, never=never)
    out_BSD, grad_BSD, *_ = passes(layer(overlap=True), there.events)
    assert bool(out_BSD.isfinite().all()) == (never > 2)
    assert not grad_BSD.isfinite().all()


def test_one_device_sends_nothing() -> None:
    """Its dispatch gives the tokens as they are; without gradients too."""
    moe = build_moe(CONFIG, 16)
    for weight in moe.parameters():
        nn.init.normal_(weight, std=0.3)
    hidden_TD, indices_TK, weights_TK = torch.randn(6, 16), torch.tensor([[0, 3]] * 6), torch.rand(6, 2)
    with torch.no_grad():
        counts_E = count_pairs(indices_TK, CONFIG.n_experts)
        rows_RD, compute = moe.sender(hidden_TD, indices_TK, counts_E, moe.experts.fuse)
        assert rows_RD is hidden_TD
        matrices = (moe.experts.gate, moe.experts.up, moe.experts.down)
        wanted = experts_grouped(hidden_TD, indices_TK, weights_TK, *matrices)
        assert torch.equal(moe.experts(rows_RD, weights_TK, compute), wanted)
