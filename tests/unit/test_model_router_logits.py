"""The router's logits against torch's own product: values and gradients, and what is kept for the backward pass."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from launcher.trace.ops import work_of
from modeling.kernels import router_logits
from modeling.kernels.router_logits import RouterLogits


def inputs(dtype: torch.dtype, n_tokens: int = 129) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD, weight_ED = (torch.randn(n, 40, generator=generator).to(dtype).requires_grad_() for n in (n_tokens, 6))
    return [hidden_TD, weight_ED, torch.randn(n_tokens, 6, generator=generator)]


def values_and_gradients(logits_TE: Tensor, leaves: list[Tensor], grad_TE: Tensor) -> list[Tensor]:
    return [logits_TE.detach(), *torch.autograd.grad(logits_TE, leaves, grad_TE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_torch(dtype: torch.dtype) -> None:
    """To 1e-6 of each norm; gradients in bf16 to a hundredth of its rounding, since both are rounded once."""
    hidden_TD, weight_ED, grad_TE = inputs(dtype)
    leaves = [hidden_TD, weight_ED]
    expected = values_and_gradients(F.linear(hidden_TD.float(), weight_ED.float()), leaves, grad_TE)
    found = values_and_gradients(RouterLogits.apply(hidden_TD, weight_ED), leaves, grad_TE)
    assert [each.dtype for each in found] == [torch.float32, dtype, dtype]
    bounds = [1e-6, *[1e-6 if dtype == torch.float32 else 4e-5] * 2]
    for value, reference, bound in zip(found, expected, bounds, strict=True):
        assert float((value.double() - reference.double()).norm() / reference.double().norm()) < bound


def test_no_tokens() -> None:
    """A rank may have none: nothing comes out, and the weights' gradient is zero."""
    hidden_TD, weight_ED, grad_TE = inputs(torch.bfloat16, n_tokens=0)
    found = values_and_gradients(RouterLogits.apply(hidden_TD, weight_ED), [hidden_TD, weight_ED], grad_TE)
    assert [each.shape for each in found] == [(0, 6), (0, 40), (6, 40)]
    assert not found[2].any()


def test_one_gradient_alone() -> None:
    """Of the weight or of the hidden states alone, as zero-bubble schedules ask for them."""
    hidden_TD, weight_ED, grad_TE = inputs(torch.float32)
    both = torch.autograd.grad(RouterLogits.apply(hidden_TD, weight_ED), [hidden_TD, weight_ED], grad_TE)
    for number, leaf in enumerate((hidden_TD, weight_ED)):
        (alone,) = torch.autograd.grad(RouterLogits.apply(hidden_TD, weight_ED), [leaf], grad_TE)
        assert torch.equal(alone, both[number])


def test_nothing_is_kept_in_more_bits_than_it_came_in() -> None:
    hidden_TD, weight_ED, _ = inputs(torch.bfloat16)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        RouterLogits.apply(hidden_TD, weight_ED)
    assert [each.data_ptr() for each in kept] == [hidden_TD.data_ptr(), weight_ED.data_ptr()]


def test_planted_rounded_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product in bf16 is far off the bound."""
    hidden_TD, weight_ED, _ = inputs(torch.float32)

    def rounded(left_TI: Tensor, right_OI: Tensor) -> Tensor:
        return (left_TI.bfloat16() @ right_OI.bfloat16().T).float()

    monkeypatch.setattr(router_logits, "product", rounded)
    with torch.no_grad():
        expected = hidden_TD @ weight_ED.T
        assert float((RouterLogits.apply(hidden_TD, weight_ED) - expected).norm() / expected.norm()) > 1e-4


def test_its_products_are_counted() -> None:
    """A profile of it has the multiplications of torch's own product, forward and backward."""
    hidden_TD, weight_ED, _ = inputs(torch.float32)
    left, right = hidden_TD.detach(), weight_ED.detach()
    arguments = (left, right, None, "none", [], "")
    work = work_of(torch.ops.mkldnn._linear_pointwise.default, arguments, {}, left @ right.T)
    assert work is not None
    assert (work.kind, work.flops) == ("product", 2 * 129 * 40 * 6)
