"""A router's choice on a CPU: the k largest scores, as torch has them, and of equal ones the first."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from modeling.kernels.top_k import top_k_places


def reference(scores_TE: Tensor, k: int) -> Tensor:
    """By a stable sort, which leaves equal scores in their order."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(n_tokens=st.integers(0, 20), n_experts=st.integers(1, 300), seed=st.integers(0, 999), data=st.data())
def test_choice_is_that_of_a_stable_sort(n_tokens: int, n_experts: int, seed: int, data: st.DataObject) -> None:
    """Of any sign and size, with many that are equal."""
    k = data.draw(st.integers(1, n_experts))
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.randn(n_tokens, n_experts, generator=generator) * 10.0 ** (seed % 40 - 30)
    few_TE = scores_TE.sign() * (seed % 3)
    for each_TE in (scores_TE, few_TE.abs(), scores_TE.softmax(-1), -scores_TE.exp()):
        found_TK = top_k_places(each_TE, k)
        assert found_TK.dtype == torch.int64 and torch.equal(found_TK, reference(each_TE, k))
        assert torch.equal(each_TE.gather(1, found_TK), each_TE.topk(k).values)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_that_are_no_numbers(sign: float) -> None:
    """-inf, which stands outside a token's groups, is last; NaN is first, so that it is not hidden.

    The NaN that processors make, of inf - inf, has a sign on some of them.
    """
    nan = torch.tensor(math.nan).copysign(torch.tensor(sign))
    scores_TE = torch.tensor([[0.5, -math.inf, 0.0, math.inf, -1.0], [0.5, 0.0, 0.9, -math.inf, 0.1]])
    scores_TE[1, 1] = nan
    assert bool(nan.signbit()) == (sign < 0)
    assert top_k_places(scores_TE, 5)[0].tolist() == [3, 0, 2, 4, 1]
    assert top_k_places(scores_TE, 2)[1].tolist() == [1, 2] == scores_TE.topk(2).indices[1].tolist()


def test_both_zeros_are_equal() -> None:
    assert top_k_places(torch.tensor([[-0.0, 0.0, -0.0]]), 3).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("form", ["transposed", "sliced", "with a gradient"])
def test_scores_may_lie_in_memory_as_they_like(form: str) -> None:
    scores_TE = torch.rand(6, 10).t() if form == "transposed" else torch.rand(10, 12)[:, 3:9]
    scores_TE = scores_TE.clone().requires_grad_() if form == "with a gradient" else scores_TE
    before = scores_TE.detach().clone()
    assert torch.equal(top_k_places(scores_TE, 2), reference(scores_TE, 2)) and torch.equal(scores_TE, before)


def test_fake_scores_have_the_shape() -> None:
    with FakeTensorMode():
        found_TK = top_k_places(torch.empty(7, 16), 4)
    assert found_TK.shape == (7, 4) and found_TK.dtype == torch.int64


def test_planted_order_by_bits_alone_is_wrong_below_zero() -> None:
    """What the reference would miss if scores were never negative: biased ones are."""
    scores_TE = torch.tensor([[-1.0, -2.0, -0.5]])
    by_bits = scores_TE.view(torch.int32).topk(1).indices
    assert int(top_k_places(scores_TE, 1)) == 2 != int(by_bits)
