"""The experts' grouped version against one expert after another: outputs and every gradient."""

import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kernel_references import experts_reference
from modeling.kernels.expert_turns import GatesAndUps, Rows, sum_of_rows
from modeling.kernels.experts import (
    ExpertBiases,
    SumRows,
    Ways,
    WeightedSumRows,
    WeightsToRows,
    experts_grouped,
    gathered_weighted_sum,
    narrow,
    narrow_dtype,
    order_by_expert,
    place_blocks,
    place_rows,
    row_multiple_of,
)
from modeling.kernels.fuse import plainly

FEW = settings(max_examples=40, deadline=None, derandomize=True)


def inputs(
    n_tokens: int, n_experts: int, top_k: int, seed: int, dtype: torch.dtype = torch.float32, n_used: int | None = None
) -> list[Tensor]:
    """hidden_TD, indices_TK, weights_TK, gate_EFD, up_EFD, down_EDF; the first ``n_used`` experts get all tokens."""
    generator = torch.Generator().manual_seed(seed)
    d_model, d_ff = 16, 24
    scores_TE = torch.rand(n_tokens, n_used or n_experts, generator=generator)
    shapes = [(n_experts, d_ff, d_model), (n_experts, d_ff, d_model), (n_experts, d_model, d_ff)]
    matrices = [(torch.randn(shape, generator=generator) * 0.3).to(dtype) for shape in shapes]
    hidden_TD = torch.randn(n_tokens, d_model, generator=generator).to(dtype)
    weights_TK = torch.rand(n_tokens, top_k, generator=generator)
    return [hidden_TD, scores_TE.topk(top_k).indices, weights_TK, *matrices]


def outputs_and_gradients(experts: Callable[..., Tensor], arguments: list[Tensor]) -> list[Tensor]:
    """The output, and the gradient of every argument but the indices."""
    leaves = [a.clone().requires_grad_(a.is_floating_point()) for a in arguments]
    out_TD = experts(*leaves)
    weights_TD = torch.randn(out_TD.shape, generator=torch.Generator().manual_seed(1))
    (out_TD.float() * weights_TD).sum().backward()
    return [out_TD.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def relative_error(value: Tensor, reference: Tensor) -> float:
    error, norm = (value.double() - reference.double()).norm(), reference.double().norm()
    return float(error / norm) if norm > 0 else float(error)


@FEW
@given(
    n_tokens=st.sampled_from([7, 64, 65, 200]),
    n_experts=st.integers(1, 5),
    has_biases=st.booleans(),
    swiglu_limit=st.sampled_from([None, 0.4, 7.0]),
    row_multiple=st.sampled_from([1, 2, 8, 64]),  # 2: more than 64 rows are rounded up to 4, more than 128 to 8
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_biases_and_clamped_gates_equal_reference(
    n_tokens: int,
    n_experts: int,
    has_biases: bool,
    swiglu_limit: float | None,
    row_multiple: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """fp32: 1e-6 relative to each norm, outputs and gradients, biases' too; an expert without tokens has none."""
    top_k = data.draw(st.integers(1, n_experts))
    n_used = data.draw(st.integers(top_k, n_experts))
    arguments = inputs(n_tokens, n_experts, top_k, seed, n_used=n_used)
    generator = torch.Generator().manual_seed(seed)
    if has_biases:
        arguments += [torch.randn(matrix.shape[:2], generator=generator) for matrix in arguments[3:]]

    def grouped(*arguments: Tensor) -> Tensor:
        biases = ExpertBiases(*arguments[6:]) if has_biases else None
        return experts_grouped(*arguments[:6], biases, swiglu_limit, row_multiple=row_multiple)

    def slow(*arguments: Tensor) -> Tensor:
        return experts_reference(*arguments[:6], arguments[6:] or None, swiglu_limit)

    results = zip(outputs_and_gradients(grouped, arguments), outputs_and_gradients(slow, arguments), strict=True)
    assert all(relative_error(value, reference) < 1e-6 for value, reference in results)


@FEW
@given(
    n_tokens=st.sampled_from([7, 63, 64, 65, 200]),
    n_experts=st.integers(1, 9),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_grouped_equals_reference(n_tokens: int, n_experts: int, seed: int, data: st.DataObject) -> None:
    """fp32: 1e-6 relative to each norm, for any top_k up to n_experts and experts without tokens."""
    top_k = data.draw(st.integers(1, n_experts))
    n_used = data.draw(st.integers(top_k, n_experts))
    arguments = inputs(n_tokens, n_experts, top_k, seed, n_used=n_used)
    fast = outputs_and_gradients(experts_grouped, arguments)
    slow = outputs_and_gradients(experts_reference, arguments)
    for value, reference in zip(fast, slow, strict=True):
        assert relative_error(value, reference) < 1e-6
    for gradient_E in fast[3:]:
        assert not gradient_E[n_used:].any()  # no token, no gradient: exactly zero


@pytest.mark.parametrize("seed", range(20))
def test_one_token(seed: int) -> None:
    """To 1e-5: the gradient of its only weight is one dot product, which may cancel."""
    arguments = inputs(1, 3, 1, seed)
    fast = outputs_and_gradients(experts_grouped, arguments)
    slow = outputs_and_gradients(experts_reference, arguments)
    assert all(relative_error(value, reference) < 1e-5 for value, reference in zip(fast, slow, strict=True))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_grouped_in_bf16(top_k: int) -> None:
    """As near to the fp32 result as the reference in bf16 is, to a quarter."""
    arguments = inputs(150, 4, top_k, 0, torch.bfloat16)
    exact = outputs_and_gradients(experts_reference, [a.float() if a.is_floating_point() else a for a in arguments])
    fast = outputs_and_gradients(experts_grouped, arguments)
    slow = outputs_and_gradients(experts_reference, arguments)
    for value, other, reference in zip(fast, slow, exact, strict=True):
        assert relative_error(value, reference) < 1.25 * relative_error(other, reference) + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_at_all(dtype: torch.dtype) -> None:
    """A micro-batch of padding alone: nothing comes out, and gradients are zero."""
    arguments = inputs(0, 4, 2, 0, dtype)
    out_TD, *gradients = outputs_and_gradients(experts_grouped, arguments)
    assert out_TD.shape == (0, 16)
    assert not any(gradient.any() for gradient in gradients)


def test_grouped_repeats_bit_for_bit() -> None:
    arguments = inputs(200, 8, 3, 0)
    first = outputs_and_gradients(experts_grouped, arguments)
    again = outputs_and_gradients(experts_grouped, arguments)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@FEW
@given(
    n_tokens=st.integers(0, 80),
    n_experts=st.integers(1, 6),
    row_multiple=st.sampled_from([1, 2, 4, 64]),
    seed=st.integers(0, 9),
)
def test_rows_are_distinct_and_sorted_by_expert(n_tokens: int, n_experts: int, row_multiple: int, seed: int) -> None:
    indices_TK = inputs(n_tokens, n_experts, min(2, n_experts), seed)[1]
    counts_E = indices_TK.flatten().bincount(minlength=n_experts)
    rows_TK, tokens_R, ends_E, _ = place_rows(indices_TK, counts_E, row_multiple)
    n_rows = len(tokens_R)
    assert len(rows_TK.unique()) == rows_TK.numel()
    assert n_rows == int(ends_E[-1])
    assert not (ends_E % row_multiple).any()
    starts_E = torch.cat([torch.zeros(1, dtype=torch.int32), ends_E[:-1]])
    assert ((starts_E[indices_TK] <= rows_TK) & (rows_TK < starts_E[indices_TK] + counts_E[indices_TK])).all()
    tokens_TK = torch.arange(n_tokens)[:, None].expand_as(rows_TK)
    assert torch.equal(tokens_R[rows_TK], tokens_TK)
    for expert in range(n_experts):  # in the order of the tokens
        rows = rows_TK[indices_TK == expert]
        assert torch.equal(rows, rows.sort().values)


@FEW
@given(
    counts=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    row_multiple=st.sampled_from([1, 4, 64]),
)
def test_blocks_lie_as_sorting_would_have_them(counts: list[list[int]], row_multiple: int) -> None:
    """Rows that came in blocks, rank by rank and there expert by expert: the same rows as by sorting, to the last."""
    counts_NE = torch.tensor(counts)
    indices_T1 = torch.arange(3).repeat(len(counts)).repeat_interleave(counts_NE.flatten())[:, None]
    found = place_blocks(counts_NE, len(indices_T1), row_multiple)
    sorted_ = place_rows(indices_T1, counts_NE.sum(0), row_multiple)
    assert all(torch.equal(one, other) for one, other in zip(found[:3], sorted_[:3], strict=True))


@pytest.mark.parametrize("top_k", [1, 3])
def test_weights_in_the_sum_of_rows(top_k: int) -> None:
    """fp64: as weights that multiply the rows before, on a CPU and by the formula that other devices compute."""
    indices_TK = inputs(20, 4, top_k, 0)[1]
    rows = place_rows(indices_TK, indices_TK.flatten().bincount(minlength=4), 1)
    generator = torch.Generator().manual_seed(0)
    rows_RD = torch.randn(20 * top_k, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(20, top_k, generator=generator, dtype=torch.float64, requires_grad=True)
    grad_TD = torch.randn(20, 8, generator=generator, dtype=torch.float64)

    def with_gradients(out_TD: Tensor) -> list[Tensor]:
        return [out_TD, *torch.autograd.grad(out_TD, (rows_RD, weights_TK), grad_TD)]

    before = with_gradients(SumRows.apply(rows_RD * WeightsToRows.apply(weights_TK, rows), rows, plainly))
    for found in (
        with_gradients(WeightedSumRows.apply(rows_RD, weights_TK, rows, plainly)),
        with_gradients(gathered_weighted_sum(rows_RD, weights_TK, rows.rows_TK)),
    ):
        for value, expected in zip(found, before, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-14, atol=1e-14)


def test_rows_are_rounded_up_where_that_is_fast() -> None:
    """On a CPU in 16 bits, to a 16th of an expert's mean rows or less: elsewhere nobody needs them."""
    wide, narrow = torch.empty(0), torch.empty(0, dtype=torch.bfloat16)
    found = {mean: row_multiple_of(narrow, mean) for mean in (0, 511, 512, 768, 1024, 5000)}
    assert found == {0: 16, 511: 16, 512: 32, 768: 32, 1024: 64, 5000: 256}
    assert row_multiple_of(wide, 768) == row_multiple_of(narrow.to("meta"), 768) == 1
    for mean in range(256, 100_000, 97):
        assert mean / 32 < row_multiple_of(narrow, mean) <= mean / 16


def test_planted_neighbors_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries off by one row are seen."""
    arguments = inputs(100, 4, 2, 0)

    def shifted(indices_TK: Tensor, counts_E: Tensor, row_multiple: int) -> Rows:
        rows = place_rows(indices_TK, counts_E, row_multiple)
        rows.ends_E[:-1] += 1
        return rows

    monkeypatch.setattr("modeling.kernels.experts.place_rows", shifted)
    assert relative_error(experts_grouped(*arguments), experts_reference(*arguments)) > 1e-3


def test_planted_gradient_of_one_slot_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that brings back the first expert's share alone is seen."""
    arguments = inputs(100, 4, 2, 0)
    calls: list[Tensor] = []

    def first_share(rows_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
        """The second sum of a pass, which is the backward's, has one row."""
        calls.append(rows_RD)
        return sum_of_rows(rows_RD, rows_TK[:, :1] if len(calls) == 2 else rows_TK, weights_TK)

    monkeypatch.setattr("modeling.kernels.expert_turns.sum_of_rows", first_share)
    fast = outputs_and_gradients(experts_grouped, arguments)
    slow = outputs_and_gradients(experts_reference, arguments)
    assert relative_error(fast[1], slow[1]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_do_not_disturb_each_other(dtype: torch.dtype) -> None:
    """Bit for bit: two micro-batches go forward before either goes back, as in a pipeline, and share nothing kept."""
    one, other = inputs(200, 6, 2, 0, dtype), inputs(90, 6, 3, 1, dtype)
    alone = outputs_and_gradients(experts_grouped, one)

    def disturbed(*arguments: Any) -> Tensor:
        out_TD = experts_grouped(*arguments)
        outputs_and_gradients(experts_grouped, other)
        return out_TD

    together = outputs_and_gradients(disturbed, one)
    assert all(torch.equal(value, before) for value, before in zip(together, alone, strict=True))


SHARES = [0.0, 0.3, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_used", [6, 2])
@pytest.mark.parametrize("share", SHARES)
def test_what_is_multiplied_again_changes_no_bit(share: float, n_used: int, dtype: torch.dtype) -> None:
    """However rows lie by experts, and with another micro-batch between the passes; at most the share is kept."""
    one, other = inputs(200, 6, 2, 0, dtype, n_used), inputs(90, 6, 3, 1, dtype)
    sharing, kept = partial(experts_grouped, ways=Ways(kept_share=share)), list[int]()

    def count(each: Tensor) -> Tensor:
        kept.append(len(each) if each.shape[1:] == (48,) else 0)
        return each

    def computed(*arguments: Any) -> Tensor:
        with saved_tensors_hooks(count, lambda each: each):
            out_TD = sharing(*arguments)
        outputs_and_gradients(sharing, other)
        return out_TD

    found = outputs_and_gradients(computed, one)
    assert all(map(torch.equal, found, outputs_and_gradients(experts_grouped, one)))
    n_rows = sum(-(-int(n) // 16) * 16 for n in one[1].flatten().bincount()) if dtype == torch.bfloat16 else 400
    assert sum(kept) == int(share * n_rows)


def test_planted_an_expert_that_is_not_multiplied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gates and ups that are there are then another expert's."""
    arguments = inputs(200, 6, 2, 0)
    expected = outputs_and_gradients(experts_grouped, arguments)
    monkeypatch.setattr(GatesAndUps, "has", lambda self, expert: True)
    found = outputs_and_gradients(partial(experts_grouped, ways=Ways(kept_share=0.5)), arguments)
    assert torch.equal(found[0], expected[0]) and relative_error(found[1], expected[1]) > 1e-3


def test_large_tensors_are_not_made_anew() -> None:
    """Once the rows have their memory, a forward pass faults in less than half of their pages."""
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(4096, 384, generator=generator).bfloat16()
    indices_TK = torch.rand(4096, 64, generator=generator).topk(12).indices
    weights_TK = torch.full((4096, 12), 1 / 12)
    gate_EFD, up_EFD, down_EDF = (torch.zeros(shape).bfloat16() for shape in [(64, 16, 384)] * 2 + [(64, 384, 16)])
    with torch.no_grad():
        experts_grouped(hidden_TD, indices_TK, weights_TK, gate_EFD, up_EFD, down_EDF)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        experts_grouped(hidden_TD, indices_TK, weights_TK, gate_EFD, up_EFD, down_EDF)
    row_bytes = 4096 * 12 * 384 * 2
    faulted = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faulted * resource.getpagesize() < row_bytes / 2


@pytest.mark.parametrize("n_experts", [3, 300, 1 << 16, 70000])
def test_pairs_in_the_order_of_their_experts(n_experts: int) -> None:
    """On a CPU by counting, as far as 16 bits hold the experts' numbers; those of one expert stay in their order."""
    experts_P = torch.randint(n_experts, (500,), generator=torch.Generator().manual_seed(n_experts))
    experts_P[-1] = n_experts - 1
    found = order_by_expert(experts_P, n_experts)
    assert torch.equal(found, experts_P.argsort(stable=True)) and found.dtype == torch.int64


@pytest.mark.parametrize("n_experts", [1, 128, 256, 257, 70_000])
def test_experts_in_fewer_bytes_come_in_the_same_order(n_experts: int) -> None:
    """As a GPU sorts them: every expert's number is held, so the order of pairs is the one of 64 bits."""
    generator = torch.Generator().manual_seed(n_experts)
    experts_P = torch.cat([torch.arange(n_experts), torch.randint(n_experts, (500,), generator=generator)])
    narrow_P = experts_P.to(narrow_dtype(n_experts))
    assert torch.equal(narrow_P.long(), experts_P)
    assert torch.equal(narrow_P.argsort(stable=True), experts_P.argsort(stable=True))
    assert narrow(experts_P, n_experts) is experts_P  # on a CPU
