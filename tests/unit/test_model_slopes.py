"""Slopes as channels of queries and keys: attention that knows no slopes, with them, is attention with slopes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernel_references import attend_reference
from modeling.context import PADDING, Context
from modeling.kernels import slope_channels
from modeling.kernels.attention import attend
from modeling.kernels.slope_channels import BASE, digits_of, fits_slopes, slope_parts, with_slopes
from modeling.score_terms import Alibi, ScoreTerms
from packed_heads import FEW, contexts, heads

HALF = (torch.bfloat16, torch.float16)


def unknowing(q: Tensor, k: Tensor, v: Tensor, context: Context, window: int | None, scale: float) -> Tensor:
    """Attention that takes a scale, and no slopes, in fp32."""
    told = scale * q.shape[-1] ** 0.5
    return attend_reference(q.float() * told, k.float(), v.float(), context, window)


@FEW
@given(
    context=contexts(),
    window=st.none() | st.integers(1, 26),
    n_kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    d_v=st.sampled_from([8, 4]),
    n_heads=st.integers(6, 12),
    dtype=st.sampled_from(HALF),
    seed=st.integers(0, 99),
)
def test_a_gpu_s_attention_with_slopes_equals_the_formula(
    context: Context,
    window: int | None,
    n_kv_heads: int,
    groups: int,
    d_v: int,
    n_heads: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Outputs to 1e-5, in fp32 from equal heads of 16 bits; gradients to their rounding, 2^-8 of numbers below 4."""
    held = n_kv_heads * groups
    ours, references = (heads(context, held, n_kv_heads, seed, dtype, d_v=d_v) for _ in range(2))
    is_real_BS11 = (context.documents_BS != PADDING)[..., None, None]
    terms, found = ScoreTerms(Alibi(n_heads, range(held))), []
    for tensors in (ours, references):
        q, k, v = tensors
        if tensors is ours:
            channels = context.slope_channels(Alibi(n_heads, range(held)), q.shape[-1], dtype)
            sloped = with_slopes(q, k, channels)
            out = unknowing(*sloped, v, context, window, q.shape[-1] ** -0.5)
        else:
            out = attend_reference(q.float(), k.float(), v.float(), context, window, terms)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)) * is_real_BS11
        (out * weights).sum().backward()
        found.append([out * is_real_BS11, *(each.grad.float() for each in tensors)])  # type: ignore[union-attr]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("n_heads", [1, 6, 12, 64])
@pytest.mark.parametrize("seq_len", [9, 300, 8192, 60_000, 70_000])
def test_far_tokens_have_their_slopes(dtype: torch.dtype, n_heads: int, seq_len: int) -> None:
    """Differences of scores between neighbours and from end to end, from products summed in fp64."""
    if digits_of(seq_len) > slope_channels.MOST_DIGITS[dtype]:
        assert not fits_slopes(torch.empty(1, seq_len, 1, 64, dtype=dtype, device="meta"))
        return
    alibi, d_head = Alibi(n_heads, range(n_heads)), 64
    positions_BS = torch.arange(seq_len)[None]
    channels = Context(positions_BS, torch.zeros_like(positions_BS)).slope_channels(alibi, d_head, dtype)
    of_queries_HN, of_keys_SN = channels.of_queries_HN.double(), channels.of_keys_BSN[0].double()
    assert channels.of_queries_HN.dtype == channels.of_keys_BSN.dtype == dtype
    scores_HS = of_queries_HN @ of_keys_SN.T * d_head**-0.5
    meant_HS = alibi.slopes(positions_BS.device).double()[:, None] * positions_BS
    exactness = 2**-22 if dtype == torch.bfloat16 else 2**-12  # fp16 knows nothing below 6e-8
    torch.testing.assert_close(scores_HS, meant_HS, rtol=exactness, atol=1e-12)


@pytest.mark.parametrize("dtype", HALF)
def test_parts_of_a_slope_make_the_whole_of_it(dtype: torch.dtype) -> None:
    slopes_H = Alibi(48, range(48)).slopes(torch.device("cpu")) * math.sqrt(80)
    parts_HP = slope_parts(slopes_H, dtype)
    assert parts_HP.dtype == dtype
    torch.testing.assert_close(parts_HP.double().sum(-1), slopes_H.double(), rtol=0, atol=2**-25)


@pytest.mark.parametrize(
    ("dtype", "seq_len", "width", "fits"),
    [
        (torch.bfloat16, 8192, 128, True),
        (torch.bfloat16, 8192, 250, True),
        (torch.bfloat16, 8192, 251, False),
        (torch.bfloat16, 256, 253, True),
        (torch.bfloat16, BASE**2 + 1, 128, True),
        (torch.float16, BASE**2, 128, True),
        (torch.float16, BASE**2 + 1, 128, False),
        (torch.float32, 8192, 128, False),
    ],
)
def test_heads_too_wide_or_rows_too_long_are_left_to_masks(
    dtype: torch.dtype, seq_len: int, width: int, fits: bool
) -> None:
    assert fits_slopes(torch.empty(1, seq_len, 1, width, dtype=dtype, device="meta")) == fits


@pytest.mark.parametrize(("seq_len", "digits"), [(1, 1), (BASE, 1), (BASE + 1, 2), (BASE**2, 2), (BASE**2 + 1, 3)])
def test_digits_of_the_last_place(seq_len: int, digits: int) -> None:
    assert digits_of(seq_len) == digits
    assert BASE**digits > seq_len - 1


class OnGpu(Tensor):
    """A tensor that says so."""

    is_cuda, is_cpu = True, False  # type: ignore[assignment]


def test_a_gpu_makes_no_mask_of_pairs_for_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values get the queries' width, and what comes out is as wide as they were; with sinks it is the formula's."""
    places_1S = torch.arange(300)[None]
    context, seen = Context(places_1S, torch.zeros_like(places_1S)), []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1], rest[-1]))
        return v.repeat_interleave(2, dim=2)

    monkeypatch.setattr("modeling.kernels.attention.plain_attention", kernel)
    tensors = [torch.zeros(1, 300, n, width, dtype=torch.bfloat16) for n, width in ((4, 20), (2, 20), (2, 12))]
    on_gpu = [each.as_subclass(OnGpu) for each in tensors]
    alibi = Alibi(4, range(4))
    assert attend(*on_gpu, context, None, ScoreTerms(alibi)).shape == (1, 300, 4, 12)
    assert seen == [(32, 32, 32, 20**-0.5)]
    assert context.masks == context.sloping_masks == {} and len(context.sloping_channels) == 1
    monkeypatch.setattr("modeling.kernels.attention.masked_attention", lambda *_: "the formula")
    assert attend(*on_gpu, context, None, ScoreTerms(alibi, sinks_H=torch.zeros(4))) == "the formula"


@pytest.mark.parametrize("fault", [None, "one part", "one digit", "the scale of the wider heads"])
def test_planted_faults_are_seen(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    positions_BS = torch.arange(600)[None]
    context, alibi = Context(positions_BS, torch.zeros_like(positions_BS)), Alibi(6, range(6))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 600, 6, 8, generator=generator).bfloat16() for _ in range(3))
    if fault == "one part":
        monkeypatch.setattr(slope_channels, "PARTS", 1)
    if fault == "one digit":
        monkeypatch.setattr(slope_channels, "digits_of", lambda seq_len: 1)
    sloped = with_slopes(q, k, context.slope_channels(alibi, 8, torch.bfloat16))
    scale = (sloped[0].shape[-1] if fault == "the scale of the wider heads" else 8) ** -0.5
    out = unknowing(*sloped, v, context, None, scale)
    reference = attend_reference(q.float(), k.float(), v.float(), context, None, ScoreTerms(alibi))
    error = float((out - reference).abs().max())
    assert error < 2e-5 if fault is None else error > 1e-4
