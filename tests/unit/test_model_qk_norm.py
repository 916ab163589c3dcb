"""QK norm against plain arithmetic: over one head or all, before or after channels turn."""

import pytest
import torch
from torch import Tensor

from modeling.attention import GroupedQueryAttention
from modeling.config import ModelConfig
from modeling.rope import Rotary

EPS = 1e-3
POSITIONS_BS = torch.tensor([[0, 1, 2, 7, 0, 1]])


def normed(row: Tensor, weight: Tensor) -> Tensor:
    return weight * row / (row.square().mean() + EPS).sqrt()


def turned(head_C: Tensor, angles_R: Tensor) -> Tensor:
    """Each pair of channels (c, c + C/2) as a complex number, times e to the angle."""
    first, second = head_C.chunk(2)
    turned_R = torch.complex(first, second) * torch.polar(torch.ones_like(angles_R), angles_R)
    return torch.cat([turned_R.real, turned_R.imag])


def by_hand(heads_HC: Tensor, weight: Tensor, angles_R: Tensor, *, over_all: bool, is_late: bool) -> Tensor:
    """One token's heads, normed and turned."""

    def norm(heads_HC: Tensor) -> Tensor:
        if over_all:
            return normed(heads_HC.flatten(), weight).view_as(heads_HC)
        return torch.stack([normed(head_C, weight) for head_C in heads_HC])

    def turn(heads_HC: Tensor) -> Tensor:
        return torch.stack([turned(head_C, angles_R) for head_C in heads_HC])

    return norm(turn(heads_HC)) if is_late else turn(norm(heads_HC))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("over", ["head", "all_heads"])
def test_queries_and_keys_are_normed_where_the_config_says(over: str, is_late: bool) -> None:
    """fp32, 1e-5: the same operations in another order."""
    config = ModelConfig(
        family="none",
        d_model=16,
        n_heads=4,
        n_kv_heads=2,
        d_head=8,
        norm_eps=EPS,
        qk_norm=True,
        qk_norm_over="head" if over == "head" else "all_heads",
        qk_norm_after_rope=is_late,
    )
    attention = GroupedQueryAttention(config, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in attention.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    hidden_BSD = torch.randn(1, 6, 16, generator=generator)
    rotary = Rotary(8, config.rope_theta)
    with torch.no_grad():
        q_BSHC, k_BSGC, _ = attention.heads(hidden_BSD, rotary.tables(POSITIONS_BS))
    assert attention.q_norm is not None and attention.k_norm is not None
    for seen_BSHC, project, norm in ((q_BSHC, attention.q, attention.q_norm), (k_BSGC, attention.k, attention.k_norm)):
        rows_BSHC = (hidden_BSD @ project.weight.T).unflatten(-1, (-1, 8))
        for token, position in enumerate(POSITIONS_BS[0].tolist()):
            angles_R = position * rotary.frequencies(torch.device("cpu"))
            wanted_HC = by_hand(
                rows_BSHC[0, token], norm.weight, angles_R, over_all=over == "all_heads", is_late=is_late
            )
            torch.testing.assert_close(seen_BSHC[0, token], wanted_HC, rtol=1e-5, atol=1e-5)
