"""How many rows an expert is computed over, and that its products are built for all such numbers before they come."""

from bisect import bisect_left
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.backends import mkldnn

from modeling.kernels import expert_turns
from modeling.kernels.expert_turns import BUILT, is_built_by_rows
from modeling.kernels.experts import experts_grouped
from modeling.kernels.row_counts import UNITS, rounded_up, row_counts

UNIT = 16  # of small counts, on a CPU in 16 bits
needs_bf16 = pytest.mark.skipif(
    not is_built_by_rows(torch.bfloat16), reason="this processor has no products of its own in bf16"
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(unit=st.integers(1, 300), counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=9))
def test_counts_go_to_the_next_number(unit: int, counts: list[int]) -> None:
    numbers = (0, *row_counts(unit, 10**6, 10**6))
    found = rounded_up(torch.tensor(counts), unit).tolist()
    assert found == [numbers[bisect_left(numbers, count)] for count in counts]
    for count, rounded in zip(counts, found, strict=True):
        assert rounded - count < max(unit, count / (UNITS / 2))


def test_numbers_reach_as_far_as_may_be_needed() -> None:
    """Up to the next doubling of the unit, as few as the tokens allow."""
    first = tuple(range(16, 513, 16))
    assert row_counts(16, 1, 4096) == row_counts(16, 512, 4096) == first
    assert row_counts(16, 513, 4096) == row_counts(16, 1024, 4096) == first + tuple(range(544, 1025, 32))
    assert row_counts(16, 1025, 4096)[-17:] == (1024, *range(1088, 2049, 64))
    assert row_counts(16, 1, 40) == (16, 32, 48) and row_counts(16, 513, 600)[-2:] == (576, 608)
    assert row_counts(16, 0, 0) == row_counts(16, 0, 4096) == ()
    assert len(row_counts(16, 16 * 2048, 16 * 2048)) == 32 + 6 * 16


def train_experts(d_ff: int, tokens_of: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
    """One pass in each direction, each token to one expert."""
    n_experts, d_model = len(tokens_of), 56
    shapes = [(n_experts, d_ff, d_model), (n_experts, d_ff, d_model), (n_experts, d_model, d_ff)]
    gate, up, down = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    indices_T1 = torch.arange(n_experts).repeat_interleave(torch.tensor(tokens_of))[:, None]
    hidden_TD = torch.randn(len(indices_T1), d_model, dtype=dtype, requires_grad=True)
    weights_T1 = torch.ones(indices_T1.shape, requires_grad=True)
    experts_grouped(hidden_TD, indices_T1, weights_T1, gate, up, down).sum().backward()


def products_built(capfd: pytest.CaptureFixture[str], d_ff: int, tokens_of: list[int]) -> int:
    """How many products oneDNN says that it built, in one pass."""
    capfd.readouterr()
    with mkldnn.verbose(mkldnn.VERBOSE_ON_CREATION):
        train_experts(d_ff, tokens_of)
    return capfd.readouterr().out.count("create:cache_miss")


@needs_bf16
def test_no_product_is_built_later(capfd: pytest.CaptureFixture[str]) -> None:
    """oneDNN's own word, for other tokens of an expert in each pass; by as many products as there are."""
    assert products_built(capfd, 40, [100, 61, 39]) == 6 * 13
    assert BUILT[56, 40, torch.bfloat16] == set(row_counts(UNIT, 100, 200))
    for tokens_of in ([1, 150, 49], [0, 200, 0], [17, 170, 13], [0, 0, 0]):
        assert products_built(capfd, 40, tokens_of) == 0, tokens_of


@needs_bf16
def test_planted_nothing_built_ahead(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_turns, "build_matmul_kernels", lambda *_: None)
    assert products_built(capfd, 48, [100, 61, 39]) == 6 * 3
    assert products_built(capfd, 48, [1, 150, 49]) == 6 * 2  # 49 and 61 are 64 both


@needs_bf16
def test_what_is_built_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(3)
        matrices = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((3, 32, 56), (3, 32, 56), (3, 56, 32))]
        hidden_TD, indices_TK = torch.randn(90, 56).bfloat16(), torch.rand(90, 3).topk(2).indices
        out_TD = experts_grouped(hidden_TD, indices_TK, torch.rand(90, 2), *matrices)
        return [out_TD, *torch.autograd.grad(out_TD.sum(), matrices)]

    with monkeypatch.context() as patched:
        patched.setattr(expert_turns, "build_matmul_kernels", lambda *_: None)
        before = gradients()
    BUILT.clear()
    assert all(torch.equal(one, other) for one, other in zip(gradients(), before, strict=True))
    assert BUILT


def test_nothing_is_built_where_nobody_trains_or_nothing_is_kept() -> None:
    BUILT.clear()
    gate, down = torch.randn(2, 8, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()
    hidden_TD, indices_T1, weights_T1 = torch.randn(9, 16).bfloat16(), torch.zeros(9, 1).long(), torch.ones(9, 1)
    experts_grouped(hidden_TD, indices_T1, weights_T1, gate, gate, down)
    train_experts(8, [4, 5], torch.float32)
    assert not BUILT


def test_torch_without_onednn_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such builds lack the operators that tell what the processor has."""
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    is_built_by_rows.cache_clear()
    try:
        assert not is_built_by_rows(torch.bfloat16) and not is_built_by_rows(torch.float16)
    finally:
        is_built_by_rows.cache_clear()
