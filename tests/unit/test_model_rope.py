"""Rotary tables where a pass's length decides: what is told of it changes nothing that its positions say.

And queries that grow with their positions.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from modeling.attention import Attention, AttentionCore
from modeling.config import FamilyName
from modeling.context import Context
from modeling.rope import Rotary
from modeling.rope_scaling import DynamicScaling, LongRopeScaling, YarnScaling
from small_models import LENGTHS, build, example_config, packed_rows

SCALINGS = {
    "dynamic": DynamicScaling(factor=2.0, original_seq_len=16),
    "longrope": LongRopeScaling(
        original_seq_len=16, longest_seq_len=64, short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(2.0, 4.0, 6.0, 8.0)
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("length", [1, 16, 17, 40])
@pytest.mark.parametrize("bound", [16, 17, 64])
def test_a_bound_changes_no_table(scaling, length, bound):
    """Positions that stay within the original length keep its frequencies, however long the row could have been."""
    rotary, positions_BS = Rotary(8, 10000.0, SCALINGS[scaling]), torch.arange(min(length, bound))[None]
    found, expected = rotary.tables(positions_BS, bound), rotary.tables(positions_BS)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_planted_bound_that_is_taken_for_the_length_is_seen(scaling):
    rotary, positions_BS = Rotary(8, 10000.0, SCALINGS[scaling]), torch.arange(10)[None]
    plain = rotary.frequencies(positions_BS.device, length=10)
    assert not torch.equal(plain, rotary.frequencies(positions_BS.device, length=64))


YARN = YarnScaling(factor=8.0, original_seq_len=4, query_growth=0.5)


@pytest.mark.parametrize(("position", "lengths"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (4_000_003, 1_000_000)])
def test_queries_grow_by_each_whole_original_length(position, lengths):
    factors_BS1 = Rotary(8, 10000.0, YARN).query_factors(torch.tensor([[position]]))
    assert factors_BS1 is not None and factors_BS1.shape == (1, 1, 1) and factors_BS1.dtype == torch.float32
    assert float(factors_BS1) == pytest.approx(1 + 0.5 * math.log(1 + lengths), rel=1e-6)


@pytest.mark.parametrize("bound", [None, 1, 4, 5, 64])
def test_a_bound_changes_no_factor_of_queries(bound):
    rotary, positions_BS = Rotary(8, 10000.0, YARN), torch.arange(min(20, bound or 20))[None]
    expected, found = rotary.query_factors(positions_BS), rotary.query_factors(positions_BS, bound)
    assert expected is not None
    assert torch.equal(expected if found is None else found, expected)
    assert (found is None) == (bound in (1, 4)) and (found is not None or bool((expected == 1).all()))


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(8, 10000.0),
        Rotary(0, 10000.0, YARN),  # no channel turns
        Rotary(8, 10000.0, YarnScaling()),
        Rotary(8, 10000.0, SCALINGS["dynamic"]),
    ],
)
def test_queries_of_other_layers_do_not_grow(rotary):
    assert rotary.query_factors(torch.arange(20)[None]) is None


@pytest.mark.parametrize("family", ["ministral3", "deepseek_v3"])
def test_queries_alone_are_multiplied_and_positions_restart_with_each_document(family: FamilyName) -> None:
    """In latent attention too, of whose queries all channels grow; what a core sees is compared."""
    config = replace(example_config(family, rope_scaling=YARN), family="none", n_layers=1, moe=None)
    rows = packed_rows(config.vocab_size, 1, LENGTHS)
    factors_BS = 1 + 0.5 * torch.log(1 + torch.floor(rows.positions_BS / 4))
    assert factors_BS[0].tolist()[8] == 1 < factors_BS[0].tolist()[19]  # the row's third document begins at 8
    grown = seen_by_core(config, rows.context())
    plain = seen_by_core(replace(config, rope_scaling=replace(YARN, query_growth=0.0)), rows.context())
    torch.testing.assert_close(grown[0], plain[0] * factors_BS[..., None, None], rtol=1e-6, atol=0.0)
    assert torch.equal(grown[1], plain[1]) and torch.equal(grown[2], plain[2])


def seen_by_core(config: Any, context: Context) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values that the first layer's attention gives to its core."""
    model = build(config, 3)
    attention = model.layer_of("0").attention
    assert isinstance(attention, Attention)
    seen: list[torch.Tensor] = []
    core: AttentionCore = attention.core

    def watched(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        seen.extend((q, k, v))
        return core(q, k, v, *rest)

    attention.core = watched
    hidden_BSD = torch.randn(*context.positions_BS.shape, config.d_model, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        attention(hidden_BSD, context)
    return tuple(seen)
