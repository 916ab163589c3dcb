"""Attention's forward pass in 16 bits on a CPU with matrix units: its numbers, whose whole units nobody sees.

The kernel is torch's own, which runs on every CPU; that it is taken here on a processor without AMX is set by hand.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernel_references import attend_reference
from modeling.context import PADDING, Context
from modeling.dropout import ScoreDropout
from modeling.kernels import narrow_attention
from modeling.kernels.attention import attend
from modeling.kernels.narrow_attention import KEY_UNIT, QUERY_UNIT, fits_narrow, whole_units
from modeling.score_terms import Alibi, Buckets, ScoreTerms
from packed_heads import FEW, contexts, heads

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_attention, "has_matrix_units", lambda: True)


def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list to which each call of the kernel adds its numbers of queries and of keys."""
    shapes, attend_block = [], narrow_attention.attend_block

    def told(q: Tensor, k: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        assert q.dtype == k.dtype == BF16
        shapes.append((q.shape[1], k.shape[1]))
        return attend_block(q, k, *rest)

    monkeypatch.setattr(narrow_attention, "attend_block", told)
    return shapes


@FEW
@given(
    context=contexts(),
    window=st.none() | st.integers(1, 26),
    n_kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    d_v=st.sampled_from([8, 4]),
    added=st.sampled_from([None, "slopes", "bias"]),
    units=st.sampled_from([(1, 1), (4, 6), (3, 16), (64, 128)]),
    block=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_numbers_are_the_formulas(
    context: Context,
    window: int | None,
    n_kv_heads: int,
    groups: int,
    d_v: int,
    added: str | None,
    units: tuple[int, int],
    block: int,
    seed: int,
) -> None:
    """Outputs and gradients to 0.04: a few of bf16's roundings of numbers below 4. Of real tokens."""
    n_heads = n_kv_heads * groups
    ours, references = (heads(context, n_heads, n_kv_heads, seed, BF16, d_v=d_v) for _ in range(2))
    bias_HN = torch.randn(n_heads, 5, generator=torch.Generator().manual_seed(seed))
    score_terms = ScoreTerms(
        alibi=Alibi(8, range(8)[1 : 1 + n_heads]) if added == "slopes" else None,
        bias_HN=bias_HN if added == "bias" else None,
        buckets=Buckets(5, 9) if added == "bias" else None,
    )
    is_real_BS11 = (context.documents_BS != PADDING)[..., None, None]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow_attention, "QUERY_UNIT", units[0])
        patch.setattr(narrow_attention, "KEY_UNIT", units[1])
        shapes = called(patch)
        for tensors, kernel in ((ours, partial(attend, block=block)), (references, attend_reference)):
            out = kernel(*tensors, context, window, score_terms)
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)) * is_real_BS11
            (out * weights).sum().backward()
            found.append([out * is_real_BS11, *(each.grad for each in tensors)])
        seq_len = context.positions_BS.shape[1]
        assert shapes, "the kernel in 16 bits was not taken"
        for n_queries, n_keys in shapes:
            assert n_queries % units[0] == 0 or n_queries == seq_len
            assert n_keys % units[1] == 0 or n_keys == seq_len
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.04, atol=0.04)


def packed(lengths: list[int]) -> Context:
    """One row of documents."""
    documents_S = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Context(torch.cat([torch.arange(n) for n in lengths])[None], documents_S[None])


LENGTHS = [5, 150, 70, 1, 129, 45]


def far() -> tuple[float, float]:
    """How far, in their norm, outputs and the keys' gradients are from fp32's."""
    context = packed(LENGTHS)
    narrow = heads(context, 4, 2, 7, BF16)
    wide = [each.detach().float().requires_grad_() for each in narrow]
    found = []
    for tensors in (narrow, wide):
        out = attend(*tensors, context, None)
        out.float().square().sum().backward()
        found.append((out.detach().float(), tensors[1].grad.float()))
    out, by_keys = (float((one - two).norm() / two.norm()) for one, two in zip(*found, strict=True))
    return out, by_keys


def test_pieces_have_whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of any length; numbers within two of bf16's roundings of fp32's."""
    shapes = called(monkeypatch)
    assert max(far()) < 2**-7
    assert set(shapes) <= {(n, m) for n in (64, 128) for m in (128, 256)} and len(shapes) == 8


@pytest.mark.parametrize("fault", ["others are seen", "the last unit", "normalizers of others"])
def test_planted_faults_of_whole_units_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled_up = narrow_attention.filled_up
    if fault == "others are seen":
        monkeypatch.setattr(narrow_attention, "filled_up", lambda *given: filled_up(*given).nan_to_num(neginf=0.0))
    elif fault == "the last unit":
        monkeypatch.setattr(narrow_attention, "within", lambda inner, outer: slice(0, inner.stop - inner.start))
    else:
        attend_block = narrow_attention.attend_block
        monkeypatch.setattr(
            narrow_attention,
            "attend_block",
            lambda *given: tuple(each + more for each, more in zip(attend_block(*given), (0, 0.1), strict=True)),
        )
    assert max(far()) > 0.02


@pytest.mark.parametrize(
    ("places", "unit", "n", "wanted"),
    [
        ((0, 64), 64, 512, (0, 64)),
        ((100, 164), 64, 512, (100, 164)),
        ((100, 165), 64, 512, (37, 165)),
        ((3, 7), 64, 512, (0, 64)),  # nothing before it: what comes after
        ((500, 512), 64, 512, (448, 512)),
        ((3, 7), 64, 40, (0, 40)),  # a row of less than a unit
        ((0, 300), 128, 310, (0, 310)),
    ],
)
def test_units_lie_around_their_places(places: tuple[int, int], unit: int, n: int, wanted: tuple[int, int]) -> None:
    assert whole_units(slice(*places), unit, n) == slice(*wanted)
    assert QUERY_UNIT <= KEY_UNIT


def test_what_is_taken_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 on such a processor, of whole sequences; nothing that is fake, capped, dropped or joined by sinks."""
    context = packed([4, 8])
    q, k, v = heads(context, 4, 2, 0, BF16)
    shapes = called(monkeypatch)
    attend(q, k, v, context, None)
    assert len(shapes) == 2
    for score_terms in (
        ScoreTerms(cap=3.0),
        ScoreTerms(sinks_H=torch.zeros(4)),
        ScoreTerms(dropout=ScoreDropout(0.5, torch.arange(1), range(4))),
    ):
        attend(q, k, v, context, None, score_terms)
    attend(*(each.half() for each in (q, k, v)), context, None)
    attend(*(each.float() for each in (q, k, v)), context, None)
    assert len(shapes) == 2
    assert not fits_narrow(q[:, -1:], k)  # one more token of a sequence that is kept
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        assert not fits_narrow(*(mode.from_tensor(each) for each in (q, k)))
    monkeypatch.setattr(narrow_attention, "has_matrix_units", lambda: False)
    assert not fits_narrow(q, k)
