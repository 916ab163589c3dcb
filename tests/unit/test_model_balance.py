"""The router and the balancing rules: against loops, and what must not influence what."""

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modeling.balance import InjectLoss, sequence_balance_losses, sequence_balance_sums, updated_bias, z_losses
from modeling.config import ModelConfig
from modeling.context import PADDING, Context
from modeling.moe import MoE, build_moe
from modeling.moe_config import BiasBalance, MoEConfig, NoBalance, SequenceAuxBalance
from modeling.router import Router
from modeling.router_biases import move_router_biases

FEW = settings(max_examples=30, deadline=None, derandomize=True)


def slow_balance_loss(affinity_SE: Tensor, indices_SK: Tensor, documents_S: Tensor) -> float:
    """DeepSeek-V3, eq. 17 to 20, for one sequence, token by token."""
    n_experts, top_k = affinity_SE.shape[1], indices_SK.shape[1]
    real = [token for token in range(len(documents_S)) if documents_S[token] != PADDING]
    total = 0.0
    for expert in range(n_experts):
        sent = sum(int(expert in indices_SK[token].tolist()) for token in real)
        load = n_experts / (top_k * max(1, len(real))) * sent
        total += load * sum(float(affinity_SE[token, expert]) for token in real) / max(1, len(real))
    return total


@FEW
@given(
    n_sequences=st.integers(1, 3),
    seq_len=st.integers(1, 9),
    n_experts=st.integers(1, 6),
    padding=st.integers(0, 9),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_balance_loss_equals_a_loop(
    n_sequences: int, seq_len: int, n_experts: int, padding: int, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    top_k = data.draw(st.integers(1, n_experts))
    affinity_TE = torch.rand(n_sequences * seq_len, n_experts, generator=generator).softmax(-1)
    indices_TK = affinity_TE.topk(top_k).indices
    documents_BS = torch.zeros(n_sequences, seq_len, dtype=torch.long)
    documents_BS[-1, max(0, seq_len - padding) :] = PADDING
    sums_BX = sequence_balance_sums(affinity_TE, indices_TK, documents_BS)
    losses_B = sequence_balance_losses(sums_BX, indices_TK.shape[1])
    if not (documents_BS == PADDING).any():
        assert torch.equal(sequence_balance_sums(affinity_TE, indices_TK, documents_BS, has_padding=False), sums_BX)
    for row in range(n_sequences):
        part = slice(row * seq_len, (row + 1) * seq_len)
        expected = slow_balance_loss(affinity_TE[part], indices_TK[part], documents_BS[row])
        assert float(losses_B[row]) == pytest.approx(expected, rel=1e-5)


def test_even_routing_has_balance_loss_one() -> None:
    affinity_TE = torch.full((8, 4), 0.25)
    indices_TK = torch.arange(16).view(8, 2) % 4
    assert float(
        sequence_balance_losses(sequence_balance_sums(affinity_TE, indices_TK, torch.zeros(1, 8)), indices_TK.shape[1])
    ) == pytest.approx(1.0)


def test_z_loss_is_the_squared_logsumexp() -> None:
    logits_TE = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(z_losses(logits_TE), logits_TE.exp().sum(-1).log() ** 2)


def test_injected_loss_equals_added_loss() -> None:
    """The gradient of a total that has the loss, scale times, added to it: bit for bit."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, generator=generator, requires_grad=True) for _ in range(2))

    def gradients(injected: bool) -> tuple[Tensor, ...]:
        carrier, loss = x * y, (x.exp() + y).sum()
        if injected:
            return torch.autograd.grad(InjectLoss.apply(carrier, loss, 0.3).square().sum(), [x, y])
        return torch.autograd.grad(carrier.square().sum() + 0.3 * loss, [x, y])

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert InjectLoss.apply(x, y.sum(), 0.3).equal(x)


def test_bias_moves_towards_the_mean_load() -> None:
    bias_E = torch.tensor([0.0, 0.5, -0.5, 0.1])
    moved_E = updated_bias(bias_E, torch.tensor([10, 0, 5, 5]), rate=0.25)
    assert moved_E.tolist() == pytest.approx([-0.25, 0.75, -0.5, 0.1])  # the mean is 5
    assert moved_E.dtype == torch.float32


def test_large_counts_are_compared_exactly() -> None:
    """One pair among 2**25 is seen, though fp32 cannot count them."""
    counts_E = torch.tensor([2**25 + 1, 2**25 - 1])
    assert updated_bias(torch.zeros(2), counts_E, 1.0).tolist() == [-1.0, 1.0]


def router(score: Literal["softmax", "sigmoid"], *, has_bias: bool, normalize_top_k: bool = True) -> Router:
    made = Router(
        d_model=8,
        n_experts=6,
        top_k=2,
        n_best=2,
        score=score,
        normalize_top_k=normalize_top_k,
        routed_scale=2.5,
        has_bias=has_bias,
    )
    made.weight.data = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    if made.bias is not None:
        made.bias.zero_()
    return made


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_weights(score: Literal["softmax", "sigmoid"]) -> None:
    hidden_TD = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    plain = router(score, has_bias=False, normalize_top_k=False)(hidden_TD)
    scores_TE = plain.logits_TE.softmax(-1) if score == "softmax" else plain.logits_TE.sigmoid()
    torch.testing.assert_close(plain.weights_TK, 2.5 * scores_TE.topk(2).values)
    normal = router(score, has_bias=False)(hidden_TD)
    torch.testing.assert_close(normal.weights_TK.sum(-1), torch.full((30,), 2.5))
    torch.testing.assert_close(normal.affinity_TE.sum(-1), torch.ones(30))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_bias_moves_the_choice_and_never_the_weights(score: Literal["softmax", "sigmoid"]) -> None:
    hidden_TD = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    biased = router(score, has_bias=True)
    before = biased(hidden_TD)
    assert biased.bias is not None
    biased.bias[3] = 10.0
    after = biased(hidden_TD)
    assert (after.indices_TK == 3).any(-1).all()
    replayed = router(score, has_bias=False)(hidden_TD, after.indices_TK)
    assert torch.equal(after.weights_TK, replayed.weights_TK)
    assert torch.equal(after.affinity_TE, before.affinity_TE)
    assert not any(name == "bias" for name, _ in biased.named_parameters())


def test_router_computes_in_fp32() -> None:
    half = router("softmax", has_bias=True).to(torch.bfloat16)
    routing = half(torch.randn(4, 8).bfloat16())
    assert {routing.weights_TK.dtype, routing.logits_TE.dtype, routing.affinity_TE.dtype} == {torch.float32}


def built_moe(config: MoEConfig, seed: int = 0) -> MoE:
    moe = build_moe(config, 16)
    generator = torch.Generator().manual_seed(seed)
    for weight in moe.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.3
    for buffer in moe.buffers():
        buffer.zero_()
    return moe


def test_auxiliary_gradients_equal_those_of_an_explicit_total() -> None:
    """Balance and z-loss reach the router as if they had been added to the loss, with the Context's weights."""
    config = MoEConfig(n_experts=4, top_k=2, d_ff=8, balance=SequenceAuxBalance(coefficient=0.5), z_loss=0.25)
    moe = built_moe(config)
    hidden_BSD = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    documents_BS = torch.zeros(2, 6, dtype=torch.long)
    documents_BS[1, 4:] = PADDING
    positions_BS = torch.arange(6).expand(2, 6)

    def context(balance_scale: float, z_scale: float) -> Context:
        return Context(positions_BS, documents_BS, balance_scale, z_scale, has_padding=True)

    out_BSD, stats = moe(hidden_BSD, context(0.5, 0.1), 0)
    out_BSD.square().sum().backward()
    injected = moe.router.weight.grad
    moe.zero_grad()
    out_BSD, again = moe(hidden_BSD, context(0.0, 0.0), 0)
    routed_TD = hidden_BSD[documents_BS != PADDING]
    routing = moe.router(routed_TD)
    balance = moe.sequence_losses(routing.affinity_TE, routing.indices_TK, context(0.0, 0.0)).sum()
    z = z_losses(routing.logits_TE).sum()
    (out_BSD.square().sum() + 0.5 * 0.5 * balance + 0.25 * 0.1 * z).backward()
    torch.testing.assert_close(injected, moe.router.weight.grad, rtol=1e-5, atol=1e-6)
    assert float(stats.balance_loss) == float(again.balance_loss) == pytest.approx(float(balance.detach()))
    assert float(stats.z_loss) == pytest.approx(float(z.detach()))
    assert int(stats.counts_E.sum()) == 2 * len(routed_TD)


def test_balance_among_experts_that_all_are_chosen_is_no_gradient() -> None:
    """The loss is 1 whatever the router does: bit for bit the gradients without it."""
    hidden_BSD = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
    gradients = []
    for balance in (SequenceAuxBalance(coefficient=1e3), NoBalance()):
        moe = built_moe(MoEConfig(n_experts=5, top_k=5, d_ff=8, score="sigmoid", balance=balance))
        context = Context(torch.arange(7).expand(2, 7), torch.zeros(2, 7, dtype=torch.long), balance_scale=0.5)
        out_BSD, stats = moe(hidden_BSD, context, 0)
        assert float(stats.balance_loss) == pytest.approx(2)  # 1 of each sequence
        out_BSD.square().sum().backward()
        assert moe.router.weight.grad is not None and moe.router.weight.grad.any()
        gradients.append(moe.router.weight.grad)
    assert torch.equal(*gradients)


def test_a_rule_that_nothing_applies_is_an_error() -> None:
    rule: Any = SimpleNamespace(name="new", moves_bias=True)
    model: Any = None
    moe = MoEConfig(n_experts=4, top_k=2, d_ff=8, balance=rule)
    with pytest.raises(AssertionError, match="new"):
        build_moe(moe, 8)
    with pytest.raises(AssertionError, match="new"):
        move_router_biases(model, ModelConfig(moe=moe), {})


def test_planted_wrong_scale_is_seen() -> None:
    """An auxiliary loss weighed by tokens instead of sequences changes the gradient."""
    moe = built_moe(MoEConfig(n_experts=4, top_k=2, d_ff=8, balance=SequenceAuxBalance(coefficient=0.5)))
    hidden_BSD = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    gradients = []
    for scale in (1 / 2, 1 / 12):
        moe.zero_grad()
        context = Context(torch.arange(6).expand(2, 6), torch.zeros(2, 6, dtype=torch.long), balance_scale=scale)
        moe(hidden_BSD, context, 0)[0].sum().backward()
        gradients.append(moe.router.weight.grad)
    assert not torch.allclose(*gradients, rtol=1e-3)


def test_padding_is_not_routed_and_comes_out_as_zero() -> None:
    moe = built_moe(MoEConfig(n_experts=4, top_k=2, d_ff=8, balance=BiasBalance()))
    hidden_BSD = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    documents_BS = torch.zeros(2, 6, dtype=torch.long)
    documents_BS[:, 4:] = PADDING
    context = Context(torch.arange(6).expand(2, 6), documents_BS, has_padding=True)
    out_BSD, stats = moe(hidden_BSD, context, 0)
    assert not out_BSD[:, 4:].any()
    assert int(stats.counts_E.sum()) == 2 * 8
    assert stats.choice_TK.shape == (8, 2) and context.choices == {}
    alone_BSD, _ = moe(hidden_BSD[:, :4], Context(torch.arange(4).expand(2, 4), documents_BS[:, :4]), 0)
    torch.testing.assert_close(out_BSD[:, :4], alone_BSD)


@pytest.mark.parametrize("balance", [BiasBalance(), SequenceAuxBalance(coefficient=0.1)])
def test_padding_alone(balance: BiasBalance | SequenceAuxBalance) -> None:
    """A micro-batch without one real token: zeros, finite statistics, zero gradients."""
    moe = built_moe(MoEConfig(n_experts=4, top_k=2, d_ff=8, balance=balance, z_loss=0.1))
    documents_BS = torch.full((2, 6), PADDING)
    context = Context(torch.zeros(2, 6, dtype=torch.long), documents_BS, 1.0, 1.0, has_padding=True)
    hidden_BSD = torch.randn(2, 6, 16, requires_grad=True)
    out_BSD, stats = moe(hidden_BSD, context, 0)
    out_BSD.sum().backward()
    assert not out_BSD.any()
    assert float(stats.balance_loss) == float(stats.z_loss) == float(stats.entropy) == 0.0
    assert all(weight.grad is None or not weight.grad.any() for weight in moe.parameters())
