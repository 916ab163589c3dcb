"""Products of 8 bits against all 256 numbers that E4M3 has, against fp64, and against a GPU's own operator.

Tolerances: what a factor becomes is exact. A product is summed in fp32 in some order and rounded to bf16, by 2^-8 of it
at most, so it is held to 2^-8 of its summands' sizes, added up; to twice that where a bias is added.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from modeling.decoder import build_decoder
from modeling.kernels import cuts, fp8
from modeling.kernels.cuts import E4M3, LARGEST, Cuts, cut, cut_across, put_back
from modeling.kernels.fp8 import Fp8Products
from modeling.kernels.products import AS_THEY_ARE
from modeling.precision import multiply_by, products_of
from small_models import example_config

ALL = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
NUMBERS = np.sort(np.unique(ALL[ALL.isfinite()].numpy()))
ROUNDING = 2.0**-8
ENDS = torch.tensor([16, 16, 48, 64], dtype=torch.int32)  # the second expert has no rows


def nearest(number: float) -> set[float]:
    """The numbers of E4M3 next to it: two where it lies halfway."""
    distances = np.abs(NUMBERS - number)
    return set(NUMBERS[distances == distances.min()])


def drawn(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    """Numbers in bf16 of sizes that differ by a factor of e^(spread x a few)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (spread * torch.randn(shape, generator=generator)).exp()
    return (torch.randn(shape, generator=generator) * sizes).bfloat16()


def test_each_number_becomes_the_nearest_one_that_8_bits_have():
    numbers_8, factors = cut(drawn(40, 33, spread=3.0))
    rows = drawn(40, 33, spread=3.0).double()
    assert factors.dtype == torch.float32 and factors.shape == (40, 1)
    for row, row_8, factor in zip(rows, numbers_8.double(), factors.double()[:, 0], strict=True):
        for number, number_8 in zip(row.tolist(), row_8.tolist(), strict=True):
            assert number_8 in nearest(number / float(factor))


def test_a_row_s_largest_number_lies_next_to_the_largest_that_there_is():
    rows = drawn(500, 9, spread=8.0)
    numbers_8, factors = cut(rows)
    largest = rows.double().abs().amax(-1) / factors.double()[:, 0]
    assert ((largest > LARGEST / 2) & (largest <= LARGEST)).all()
    mantissas, _ = torch.frexp(factors)
    assert (mantissas == 0.5).all()  # powers of two
    assert numbers_8.float().isfinite().all()


@pytest.mark.parametrize("largest", [448.0, 449.0, 3e38, 1e-38, 1e-45])
def test_rows_of_every_size_keep_their_largest_number(largest):
    row = torch.tensor([[largest, 0.0]])
    back = put_back(*cut(row)).double()
    assert float(back[0, 0]) == pytest.approx(float(row[0, 0]), rel=2**-4) or largest < 1e-36  # below all scales: zero
    assert float(back[0, 1]) == 0


def test_zeros_stay_zeros():
    assert torch.equal(put_back(*cut(torch.zeros(3, 5))), torch.zeros(3, 5).bfloat16())


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_not_hidden(wrong):
    """E4M3 has no infinity, and a cast makes it 448: a run would go on from an overflow that nobody sees."""
    rows = torch.tensor([[1.0, wrong, 2.0], [1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    back = put_back(*cut(rows))
    assert back[0].isnan().all() and back[1].isfinite().all()
    out = Fp8Products().linear(rows, torch.ones(4, 3, dtype=torch.bfloat16), None)
    assert out[0].isnan().all() and out[1].isfinite().all()


@given(st.integers(0, 2**31), st.integers(1, 8), st.floats(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_cut_changes_only_what_is_small_in_its_row(seed, n_parts, spread):
    """A rank that holds a part of a row gets the same numbers, but for those below 2^-14 of the whole row's largest."""
    rows = drawn(3, 8 * n_parts, seed=seed, spread=spread)
    whole = put_back(*cut(rows))
    parts = torch.cat([put_back(*cut(part)) for part in rows.chunk(n_parts, dim=1)], dim=1)
    shows = rows.abs() >= rows.abs().amax(-1, keepdim=True) * 2.0**-14
    assert torch.equal(whole[shows], parts[shows])


def test_16_bits_hold_what_8_bits_are_put_back_to():
    numbers_8, factors = cut(drawn(64, 64, spread=4.0))
    assert torch.equal(put_back(numbers_8, factors).double(), numbers_8.double() * factors.double())


def test_across_is_that_of_the_transpose():
    numbers = drawn(3, 8, 16)
    for ours, theirs in zip(cut_across(numbers), cut(numbers.transpose(1, 2).contiguous()), strict=True):
        assert torch.equal(ours.float(), theirs.float()) and ours.is_contiguous()


@pytest.mark.parametrize("across", [False, True])
def test_what_is_cut_lies_row_by_row_however_it_was_given(across):
    """A GPU's product takes no other factor, and a gradient may come as a transpose or as one number expanded."""
    cut_given = cut_across if across else cut
    for given_numbers in (drawn(16, 48).T, drawn(16, 48), drawn(1).expand(16, 48), drawn(2, 16, 48).transpose(1, 2)):
        numbers_8, factors = cut_given(given_numbers)
        same_8, same_factors = cut_given(given_numbers.contiguous())
        assert numbers_8.is_contiguous() and torch.equal(numbers_8.float(), same_8.float())
        assert torch.equal(factors, same_factors)


@pytest.mark.parametrize("make", [lambda grad: grad, lambda grad: grad.T.contiguous().T, lambda grad: grad[:1, :1]])
def test_gradients_lie_row_by_row_however_they_come(make):
    rows, weight = drawn(16, 48).requires_grad_(), drawn(32, 48, seed=1).requires_grad_()
    stack = drawn(4, 32, 48, seed=1).requires_grad_()
    out = Fp8Products().linear(rows, weight)
    found = torch.autograd.grad(out, (rows, weight), make(drawn(16, 32, seed=2)).expand(16, 32))
    grouped = Fp8Products().grouped(rows, ENDS // 4, stack)
    found += torch.autograd.grad(grouped, (rows, stack), make(drawn(16, 32, seed=2)).expand(16, 32))
    assert all(grad.is_contiguous() for grad in found)


def close(ours: Tensor, exact: Tensor, sizes: Tensor) -> None:
    assert ((ours.double() - exact).abs() <= ROUNDING * sizes + 1e-30).all()


def test_a_product_and_its_gradients_are_those_of_the_cut_factors():
    rows, weight, grad = drawn(6, 10, 48), drawn(32, 48, seed=1), drawn(6, 10, 32, seed=2)
    bias = drawn(32, seed=3)
    rows.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    out = Fp8Products().linear(rows, weight, bias)
    out.backward(grad)
    rows_8, weight_8 = (put_back(*cut(each.detach())).double() for each in (rows, weight))
    across_8 = put_back(*cut_across(weight.detach())).double().T  # (O, I) again
    grad_8 = put_back(*cut(grad)).double()
    sizes = rows_8.abs() @ weight_8.abs().T + bias.double().abs()
    close(out, rows_8 @ weight_8.T + bias.double(), 2 * sizes)
    close(rows.grad, grad_8 @ across_8, grad_8.abs() @ across_8.abs())
    rows_flat, flat_grad = rows.detach().flatten(0, 1), grad.double().flatten(0, 1)
    over_grad, over_rows = (put_back(*cut_across(each)).double() for each in (grad.flatten(0, 1), rows_flat))
    close(weight.grad, over_grad @ over_rows.T, over_grad.abs() @ over_rows.abs().T)
    close(bias.grad, flat_grad.sum(0), flat_grad.abs().sum(0))
    # and they are products of 8 bits, not of 16
    assert not torch.equal(out, F.linear(rows, weight, bias))
    assert not torch.equal(weight.grad, grad.flatten(0, 1).T @ rows_flat)


def differences_of_parts(n_parts: int, spread: float, between: float, seed: int) -> Tensor:
    """Of a weight's gradient, made as a whole and in parts, over what may lie between the two.

    Parts differ from the whole where numbers are 2^-14 of their channel's largest or less: those are rounded to whole
    multiples of 2^-17 of it, and so lie within 2^-17 of it in either cut. The rest is what bf16 rounds of each part's
    product and of the whole's, 2^-8 of the sizes of the summands.
    """
    generator = torch.Generator().manual_seed(seed)
    unlike = (between * torch.randn(n_parts, 1, 1, generator=generator)).exp()
    rows, grad = (
        (drawn(n_parts, 24, width, seed=seed, spread=spread).float() * unlike).bfloat16() for width in (48, 32)
    )
    grad = grad.flip(0)  # the largest rows beside the smallest gradients
    whole = Fp8Products().weight_grad(grad.flatten(0, 1), rows.flatten(0, 1)).double()
    parts = [Fp8Products().weight_grad(*each) for each in zip(grad, rows, strict=True)]
    grad, rows = grad.flatten(0, 1).double().abs(), rows.flatten(0, 1).double().abs()
    lost = 2.0**-17 * (grad.amax(0)[:, None] * rows.sum(0) + grad.sum(0)[:, None] * rows.amax(0))
    bound = (2 * ROUNDING * grad.T @ rows + lost) * (1 + 2**-4) ** 2  # sizes after the cut
    return (whole - torch.stack(parts).double().sum(0)).abs() / (bound + 1e-30)


@given(st.sampled_from([2, 3, 4, 8]), st.floats(0, 2), st.floats(0, 3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_a_weight_s_gradient_is_the_sum_of_its_parts_gradients(n_parts, spread, between, seed):
    """Ranks and micro-batches share out the tokens, each with scales of its own, however unlike their tokens are."""
    assert differences_of_parts(n_parts, spread, between, seed).max() <= 1


def test_scales_that_are_no_powers_of_two_would_show_which_tokens_lie_together(monkeypatch):
    def cut_to_the_top(numbers: Tensor) -> tuple[Tensor, Tensor]:
        factors = numbers.abs().amax(-1, keepdim=True).float() / LARGEST
        return (numbers.float() / factors).to(E4M3).contiguous(), factors

    monkeypatch.setattr(cuts, "cut", cut_to_the_top)
    assert differences_of_parts(8, 0.0, 0.0, 0).max() > 1


@pytest.mark.parametrize("n_rows", [1, 15, 17, 30])
def test_a_weight_s_gradient_takes_any_number_of_rows(n_rows):
    """A GPU's product sums over whole units of 16, so rows of zeros are added."""
    rows, grad = drawn(n_rows, 48), drawn(n_rows, 32, seed=2)
    found = Fp8Products().weight_grad(grad, rows)
    grad_8, rows_8 = (put_back(*cut_across(each)).double() for each in (grad, rows))
    close(found, grad_8 @ rows_8.T, grad_8.abs() @ rows_8.abs().T)


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_the_weight_s_gradient(wrong):
    rows, grad = drawn(16, 48), drawn(16, 32, seed=2)
    grad[3, 5] = wrong
    found = Fp8Products().weight_grad(grad, rows)
    assert found[5].isnan().all() and found[torch.arange(32) != 5].isfinite().all()


def test_experts_products_are_those_of_each_expert():
    rows, weight, grad = drawn(64, 48), drawn(4, 32, 48, seed=1), drawn(64, 32, seed=2)
    rows.requires_grad_(), weight.requires_grad_()
    Fp8Products().grouped(rows, ENDS, weight).backward(grad)
    start = 0
    for expert, end in enumerate(ENDS.tolist()):
        mine, own = rows.detach()[start:end].requires_grad_(), weight.detach()[expert].requires_grad_()
        Fp8Products().linear(mine, own, None).backward(grad[start:end])
        sizes = put_back(*cut(grad[start:end])).double().abs() @ own.detach().double().abs()
        close(rows.grad[start:end], mine.grad.double(), 2 * sizes)
        given, taken = grad[start:end].double(), mine.detach().double()
        close(weight.grad[expert], given.T @ taken, given.abs().T @ taken.abs())  # 16 bits
        start = end


needs_operator = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason=f"torch {torch.__version__} has its scaled product on GPUs alone",
)


@needs_operator
def test_the_operator_that_gpus_take_computes_the_same():
    """torch has its scaled product on CPUs too: the order of its arguments, and what scales mean, are seen there."""
    rows, weight = drawn(16, 48), drawn(32, 48, seed=1)
    found = []
    for across in (False, True):
        given_weight = weight.T.contiguous() if across else weight
        ours = (fp8.product_back if across else fp8.product)(rows, given_weight, Cuts())
        (rows_8, rows_R1), (weight_8, weight_O1) = cut(rows), (cut_across if across else cut)(given_weight)
        row = F.ScalingType.RowWise
        theirs = F.scaled_mm(rows_8, weight_8.t(), rows_R1, row, weight_O1.t(), row, output_dtype=torch.bfloat16)
        sizes = put_back(rows_8, rows_R1).double().abs() @ put_back(weight_8, weight_O1).double().abs().T
        close(ours, theirs.double(), 2 * sizes)
        found.append(ours)
    assert torch.equal(*found)


@needs_operator
def test_the_operator_that_gpus_take_sums_over_rows_too():
    rows, grad = drawn(30, 48), drawn(30, 32, seed=2)
    ours = Fp8Products().weight_grad(grad, rows)
    padded = [F.pad(each, (0, 0, 0, 2)) for each in (grad, rows)]
    (grad_8, grad_O1), (rows_8, rows_I1) = (cut_across(each) for each in padded)
    theirs = fp8.scaled_product(grad_8, grad_O1, rows_8, rows_I1, torch.bfloat16, fast=False)
    sizes = put_back(grad_8, grad_O1).double().abs() @ put_back(rows_8, rows_I1).double().abs().T
    close(ours, theirs.double(), 2 * sizes)


def test_no_rows_are_no_error():
    """An expert rank, or a rank of padding, may have none."""
    none = torch.zeros(0, 48, dtype=torch.bfloat16, requires_grad=True)
    weight = drawn(32, 48).requires_grad_()
    Fp8Products().linear(none, weight, None).sum().backward()
    assert none.grad.shape == (0, 48) and torch.equal(weight.grad, torch.zeros_like(weight))
    stack, ends = drawn(4, 32, 48).requires_grad_(), torch.zeros(4, dtype=torch.int32)
    Fp8Products().grouped(none, ends, stack).sum().backward()
    assert torch.equal(stack.grad, torch.zeros_like(stack))


def test_scores_and_the_head_keep_16_bits():
    with torch.device("meta"):
        model = build_decoder(example_config("qwen2_moe"))
    multiply_by(model, products_of("fp8"))
    taken = {
        name for name, module in model.named_modules() if getattr(module, "products", AS_THEY_ARE) is not AS_THEY_ARE
    }
    kinds = {name.split(".", 2)[-1] for name in taken}
    assert {"attention.q", "attention.o", "feed_forward.experts", "feed_forward.shared.down"} <= kinds
    assert not any("shared_gate" in name or "router" in name or name == "head" for name in taken)
    assert products_of("bf16") is AS_THEY_ARE


@pytest.mark.parametrize(("kind", "is_taken"), [("elementwise", True), ("headwise", False)])
def test_gates_of_a_head_each_keep_16_bits(kind, is_taken):
    """A rank's part of them may be no whole unit of 16: no rule on widths speaks of them."""
    config = replace(example_config("afmoe"), family="none", attention_gate=kind)
    with torch.device("meta"):
        model = build_decoder(config)
    multiply_by(model, products_of("fp8"))
    gate = model.get_submodule("layers.0.attention.output_gate")
    assert (gate.products is not AS_THEY_ARE) == is_taken
