"""The router's logits by oneDNN against torch's own product: values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.trace.ops import work_of
from modeling.kernels import router_logits
from modeling.kernels.router_logits import LogitsByOneDnn


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD, weight_ED = (torch.randn(n, 40, generator=generator).to(dtype).requires_grad_() for n in (129, 6))
    return [hidden_TD, weight_ED, torch.randn(129, 6, generator=generator)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_torch(dtype: torch.dtype) -> None:
    """To 1e-6 of each norm; gradients in bf16 to a hundredth of its rounding, since both are rounded once."""
    hidden_TD, weight_ED, grad_TE = inputs(dtype)
    logits_TE = F.linear(hidden_TD.float(), weight_ED.float())
    expected = [logits_TE.detach(), *torch.autograd.grad(logits_TE, [hidden_TD, weight_ED], grad_TE)]
    found_TE = router_logits.router_logits(hidden_TD, weight_ED)
    found = [found_TE.detach(), *torch.autograd.grad(found_TE, [hidden_TD, weight_ED], grad_TE)]
    assert [each.dtype for each in found] == [torch.float32, dtype, dtype]
    bounds = [1e-6, *[1e-6 if dtype == torch.float32 else 4e-5] * 2]
    for value, reference, bound in zip(found, expected, bounds, strict=True):
        assert float((value.double() - reference.double()).norm() / reference.double().norm()) < bound


def test_one_gradient_alone() -> None:
    """Of the weight or of the hidden states alone, as zero-bubble schedules ask for them."""
    hidden_TD, weight_ED, grad_TE = inputs(torch.float32)
    both = torch.autograd.grad(LogitsByOneDnn.apply(hidden_TD, weight_ED), [hidden_TD, weight_ED], grad_TE)
    for number, leaf in enumerate((hidden_TD, weight_ED)):
        (alone,) = torch.autograd.grad(LogitsByOneDnn.apply(hidden_TD, weight_ED), [leaf], grad_TE)
        assert torch.equal(alone, both[number])


def test_planted_rounded_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product in bf16 is far off the bound."""
    hidden_TD, weight_ED, _ = inputs(torch.float32)

    def rounded(left_TI: Tensor, right_OI: Tensor) -> Tensor:
        return (left_TI.bfloat16() @ right_OI.bfloat16().T).float()

    monkeypatch.setattr(router_logits, "product", rounded)
    with torch.no_grad():
        expected = hidden_TD @ weight_ED.T
        assert float((router_logits.router_logits(hidden_TD, weight_ED) - expected).norm() / expected.norm()) > 1e-4


def test_its_products_are_counted() -> None:
    """A profile of it has the multiplications of torch's own product, forward and backward."""
    hidden_TD, weight_ED, _ = inputs(torch.float32)
    left, right = hidden_TD.detach(), weight_ED.detach()
    arguments = (left, right, None, "none", [], "")
    work = work_of(torch.ops.mkldnn._linear_pointwise.default, arguments, {}, left @ right.T)
    assert work is not None
    assert (work.kind, work.flops) == ("product", 2 * 129 * 40 * 6)
