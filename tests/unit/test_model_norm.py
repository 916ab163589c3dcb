"""LayerNorm against its definition (Ba et al. 2016, arXiv:1607.06450, eq. 4) and torch's own."""

import pytest
import torch
from torch import nn

from modeling.norm import LayerNorm, RMSNorm, build_norm
from small_models import example_config

EPS = 1e-5


def layer_norm(*, adds_one: bool) -> LayerNorm:
    norm = LayerNorm(24, EPS, adds_one=adds_one)
    with torch.no_grad():
        norm.weight.normal_(generator=torch.Generator().manual_seed(0))
        norm.bias.normal_(generator=torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize("adds_one", [False, True])
def test_layer_norm_is_what_it_says(adds_one: bool) -> None:
    """1e-6: fp32 against fp64."""
    norm = layer_norm(adds_one=adds_one)
    hidden = 3 + 2 * torch.randn(4, 7, 24, generator=torch.Generator().manual_seed(2))
    exact = hidden.double()
    deviation = (exact - exact.mean(-1, keepdim=True)) / (exact.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    wanted = deviation * (norm.weight.double() + adds_one) + norm.bias.double()
    torch.testing.assert_close(norm(hidden).double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_equals_torch_s(dtype: torch.dtype) -> None:
    """Bit for bit, in bf16 too: both compute in fp32 and round once."""
    ours, theirs = layer_norm(adds_one=False).to(dtype), nn.LayerNorm(24, EPS, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    hidden = torch.randn(4, 7, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(ours(hidden), theirs(hidden))


def test_the_config_chooses() -> None:
    assert isinstance(build_norm(example_config("llama")), RMSNorm)
    assert isinstance(build_norm(example_config("llama", norm="layer")), LayerNorm)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_one_and_a_small_weight_are_added_in_fp32(kind: type[LayerNorm | RMSNorm]) -> None:
    """In bf16 their sum would be one."""
    norms = [kind(24, EPS, adds_one=True).bfloat16() for _ in range(2)]
    hidden = torch.randn(4, 7, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad():
        for norm, value in zip(norms, (0.0, 2.0**-9), strict=True):
            for name, parameter in norm.named_parameters():
                parameter.fill_(value if name == "weight" else 0.0)
    assert not torch.equal(*(norm(hidden) for norm in norms))
