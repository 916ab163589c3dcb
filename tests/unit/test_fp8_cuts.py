"""When factors of 8 bits are cut: rows once for products that read them one after another, kept weights once a change.

All are exact: what is not cut again is what would have been cut.
"""

import pytest
import torch
from torch import Tensor

from modeling.kernels import cuts as kernel
from modeling.kernels.cuts import Cuts, cut, cut_across
from modeling.kernels.fp8 import Fp8Products


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def n_cuts(monkeypatch):
    """The shapes that were cut, in order; those of transposes twice, as they came and as they were cut."""
    shapes, sound = [], cut

    def counted(numbers: Tensor):
        shapes.append(tuple(numbers.shape))
        return sound(numbers)

    monkeypatch.setattr(kernel, "cut", counted)
    return shapes


def same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(mine.float(), other.float()) for mine, other in zip(ours, theirs, strict=True))


def test_queries_keys_and_values_share_what_their_rows_are_cut_to(n_cuts):
    products, weights = Fp8Products(), [drawn(size, 48, seed=size).requires_grad_() for size in (64, 32, 16)]
    rows = drawn(2, 24, 48).requires_grad_()
    outs = [products.linear(rows, weight) for weight in weights]
    assert n_cuts == [(48, 48), (64, 48), (32, 48), (16, 48)]
    torch.autograd.backward(outs, [drawn(*out.shape, seed=3) for out in outs])
    assert n_cuts.count((48, 48)) == 2  # forward along the width, and once along the tokens for all three weights
    others = [Fp8Products().linear(rows, weight) for weight in weights]  # nothing shared
    assert all(torch.equal(mine, other) for mine, other in zip(outs, others, strict=True))


def test_experts_gates_and_ups_share_theirs(n_cuts):
    products, ends = Fp8Products(), torch.tensor([16, 48], dtype=torch.int32)
    rows, gate, up = drawn(48, 32), drawn(2, 16, 32, seed=1), drawn(2, 16, 32, seed=2)
    found = products.grouped(rows, ends, gate), products.grouped(rows.view_as(rows), ends, up)
    assert n_cuts == [(48, 32), (2, 16, 32), (2, 16, 32)]
    assert torch.equal(found[1], Fp8Products().grouped(rows, ends, up))


def test_rows_that_have_changed_are_cut_again():
    cuts, rows = Cuts(), drawn(16, 48)
    former = cuts.of_rows(rows)
    assert cuts.of_rows(rows)[0] is former[0] and cuts.of_rows(rows.view(16, 48))[0] is former[0]
    rows.mul_(3)
    assert same(cuts.of_rows(rows), cut(rows)) and not same(cuts.of_rows(rows), former)
    assert same(cuts.of_rows(rows[:8]), cut(rows[:8]))  # another part of the same memory
    assert same(cuts.of_rows(rows.view(48, 16)), cut(rows.view(48, 16)))
    assert same(cuts.of_rows_across(rows), cut_across(rows))


def test_other_rows_in_the_same_place_are_cut_again():
    """Memory that was freed is given out again: what has its address is not what had it."""
    cuts, seen = Cuts(), set()
    for seed in range(200):
        rows = drawn(16, 48, seed=seed)
        assert same(cuts.of_rows(rows), cut(rows))
        seen.add(rows.data_ptr())
        del rows
    assert len(seen) < 200, "no address came twice, so nothing was tested"


def test_rows_that_are_not_tracked_are_cut_each_time(n_cuts):
    """Where torch counts no changes, as in evaluations under inference_mode, none would be seen."""
    cuts = Cuts()
    with torch.inference_mode():
        rows = drawn(16, 48)
        cuts.of_rows(rows)
        rows.mul_(3)
        assert same(cuts.of_rows(rows), cut(rows))
    assert n_cuts == [(16, 48)] * 2


@pytest.mark.parametrize("shape", [(32, 48), (4, 32, 48)])
def test_kept_weights_are_cut_once_a_change_each_way(n_cuts, shape):
    cuts, weight = Cuts(keeps_weights=True), drawn(*shape)
    for seed in range(3):
        weight.data.copy_(drawn(*shape, seed=seed))  # as DeepSpeed writes, unseen by torch's own count
        cuts.weights_changed()
        for _ in range(4):
            assert same(cuts.of_weight(weight, across=False), cut(weight))
            assert same(cuts.of_weight(weight, across=True), cut(weight.transpose(-1, -2)))
    assert len(n_cuts) == 6


def test_parts_of_kept_weights_are_kept_by_themselves(n_cuts):
    """Chunks of experts are views of all of them."""
    cuts, stack = Cuts(keeps_weights=True), drawn(4, 32, 48)
    for _ in range(2):
        for part in (stack[:2], stack[2:], stack):
            assert same(cuts.of_weight(part, across=False), cut(part))
    assert n_cuts == [(2, 32, 48), (2, 32, 48), (4, 32, 48)]


def test_kept_weights_are_let_go_before_others_take_their_place():
    """So the memory of kept weights is what it was; and of weights that are gone none stays."""
    cuts, weight = Cuts(keeps_weights=True), drawn(32, 48)
    cuts.of_weight(weight, across=False)
    cuts.weights_changed()
    alive = []
    sound = cuts.make
    cuts.make = lambda *given, **named: (alive.append(len(cuts.kept)), sound(*given, **named))[1]
    cuts.of_weight(weight, across=False)
    assert alive == [0]
    del weight
    cuts.weights_changed()
    assert not cuts.kept


def test_weights_are_cut_each_time_unless_they_are_kept(n_cuts):
    cuts, weight = Cuts(), drawn(32, 48)
    for _ in range(3):
        cuts.of_weight(weight, across=False)
    assert len(n_cuts) == 3


@pytest.mark.parametrize("n_rows", [1, 16, 30, 48])
@pytest.mark.parametrize("make", [lambda rows: rows, lambda rows: rows.t().contiguous().t(), lambda rows: rows[:, :1]])
def test_rows_are_cut_across_in_whole_units(n_rows, make):
    """However they lie; what fills the last unit is zeros, which change no scale."""
    rows = make(drawn(n_rows, 48)).expand(n_rows, 48)
    for ours in (Cuts().of_rows_across(rows), Cuts().of_gradient_across(rows)):
        theirs = cut(rows.t())
        assert ours[0].shape == (48, -(-n_rows // 16) * 16) and ours[0].is_contiguous()
        assert torch.equal(ours[0][:, :n_rows].float(), theirs[0].float()) and not ours[0][:, n_rows:].float().any()
        assert torch.equal(ours[1], theirs[1])
