"""Sinks, caps, slopes, buckets and dropped weights: as a GPU computes them, too, whose kernels do not know them."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from kernel_references import attend_reference, like_flash
from modeling.context import PADDING, Context
from modeling.dropout import ScoreDropout
from modeling.kernels.attention import attend, masked_attention, row_block, row_formula
from modeling.kernels.sink_attention import sink_attention
from modeling.kv_cache import LayerCache
from modeling.score_terms import Alibi, Buckets, ScoreTerms, bucket_sums
from packed_heads import FEW, contexts, heads


@FEW
@given(
    context=contexts(),
    window=st.none() | st.integers(1, 26),
    n_kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    d_v=st.sampled_from([8, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_sinks_join_what_a_kernel_of_documents_tells(
    context: Context, window: int | None, n_kv_heads: int, groups: int, d_v: int, dtype: torch.dtype, seed: int
) -> None:
    """As CUDA computes them, with the formula in FlashAttention's place: outputs and all gradients.

    fp32 to 1e-5, sums in another order; bf16 to 0.04, a few of its roundings of numbers below 4.
    """
    ours, references = (heads(context, n_kv_heads * groups, n_kv_heads, seed, dtype, d_v=d_v) for _ in range(2))
    is_real_BS11 = (context.documents_BS != PADDING)[..., None, None]
    found = []
    for tensors in (ours, references):
        generator = torch.Generator().manual_seed(seed)
        sinks_H = torch.randn(n_kv_heads * groups, generator=generator).requires_grad_()
        if tensors is ours:
            out = sink_attention(*tensors, context, window, sinks_H, like_flash())
        else:
            out = attend_reference(*tensors, context, window, ScoreTerms(sinks_H=sinks_H))
        assert out.dtype == dtype
        weights = torch.randn(out.shape, generator=generator) * is_real_BS11
        (out * weights).sum().backward()
        found.append([out * is_real_BS11, sinks_H.grad, *(each.grad for each in tensors)])
    bound = 1e-5 if dtype == torch.float32 else 0.04
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)


@FEW
@given(
    context=contexts(),
    window=st.none() | st.integers(1, 26),
    positions=st.sampled_from(["rope", "alibi", "t5"]),
    has_sinks=st.booleans(),
    cap=st.sampled_from([None, 0.7]),
    drops=st.booleans(),
    block=st.sampled_from([1, 3, 8, 26]),
    seed=st.integers(0, 99),
)
def test_pieces_of_rows_equal_whole_documents(
    context: Context,
    window: int | None,
    positions: str,
    has_sinks: bool,
    cap: float | None,
    drops: bool,
    block: int,
    seed: int,
) -> None:
    """As CUDA computes scores that no kernel of its own knows: outputs and gradients to 1e-5, in fp32."""
    ours, references = (heads(context, 4, 2, seed, d_v=4) for _ in range(2))
    is_real_BS11 = (context.documents_BS != PADDING)[..., None, None]
    found = []
    for tensors in (ours, references):
        generator = torch.Generator().manual_seed(seed)
        sinks_H, bias_HN = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((4,), (4, 5)))
        is_biased = positions == "t5"
        terms = ScoreTerms(
            Alibi(8, range(1, 5)) if positions == "alibi" else None,
            sinks_H if has_sinks else None,
            bias_HN if is_biased else None,
            Buckets(5, 9) if is_biased else None,
            cap,
            ScoreDropout(0.3, torch.arange(context.positions_BS.shape[0]), range(4)) if drops else None,
        )
        if tensors is ours:
            out = row_formula(*tensors, context, window, terms, block)
        else:
            out = attend(*tensors, context, window, terms)
        weights = torch.randn(out.shape, generator=generator) * is_real_BS11
        (out * weights).sum().backward()
        joined = [each.grad for each, wanted in ((sinks_H, has_sinks), (bias_HN, is_biased)) if wanted]
        found.append([out * is_real_BS11, *joined, *(each.grad for each in tensors)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@FEW
@given(context=contexts(), window=st.none() | st.integers(1, 26), block=st.integers(1, 26))
def test_pieces_of_rows_hold_all_that_is_seen_and_little_more(context: Context, window: int | None, block: int) -> None:
    """Each pair that the mask shows is in a piece, each query in one, and the first key is some row's query's.

    Nobody looks at what padding attends to.
    """
    mask_BSS = context.mask_BSS(window) & (context.documents_BS != PADDING)[..., None]
    seen_BSS = torch.zeros_like(mask_BSS)
    queries: list[int] = []
    for rows, own, keys in context.row_pieces(window, block):
        assert rows == slice(0, len(mask_BSS)) and own.stop - own.start <= block and keys.stop == own.stop
        assert context.mask_BSS(window)[:, own, keys.start].any()
        seen_BSS[:, own, keys] = True
        queries += range(own.start, own.stop)
    assert queries == list(range(mask_BSS.shape[1]))
    assert not (mask_BSS & ~seen_BSS).any()


@pytest.mark.parametrize("positions", ["rope", "alibi", "t5"])
def test_masked_queries_in_pieces_equal_all_at_once(positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's attention to what is cached and itself, capped and with sinks: outputs to 1e-6."""
    context = Context(torch.arange(9)[None], torch.zeros(1, 9, dtype=torch.long))
    q, k, v = heads(context, 4, 2, 0)
    bias_HN = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)) if positions == "t5" else None
    terms = ScoreTerms(
        Alibi(4, range(4)) if positions == "alibi" else None,
        torch.tensor([0.5, -1.0, 0.0, 2.0]),
        bias_HN,
        None if bias_HN is None else Buckets(5, 9),
        0.7,
    )
    mask = terms.mask(context.mask_BSS(None), context.positions_BS, context.positions_BS)[..., 2:, :]
    buckets = None if terms.buckets is None else context.buckets_BSS(terms.buckets)[:, 2:]
    whole = masked_attention(q[:, 2:], k, v, mask, terms, buckets)
    monkeypatch.setattr("modeling.kernels.attention.row_block", lambda q_BQHC, n_keys: 3)
    torch.testing.assert_close(masked_attention(q[:, 2:], k, v, mask, terms, buckets), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole, attend(q, k, v, context, None, terms)[:, 2:], rtol=1e-5, atol=1e-5)


def test_scores_of_a_piece_of_rows_are_limited() -> None:
    """gpt-oss-20b's 64 heads over 8,192 tokens in fp32: 17 GB of scores, cut into 256 MiB at a time."""
    q_BSHC = torch.empty(1, 8192, 64, 64, device="meta")
    assert row_block(q_BSHC, 8192) == 128 and row_block(q_BSHC[:, :, :8], 8192) == 1024
    assert row_block(q_BSHC[:, :512], 512) >= 512  # all at once


@pytest.mark.parametrize("has_slopes", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attend_with_terms_in_bf16(has_slopes: bool, has_sinks: bool) -> None:
    """Within two of bf16's roundings of outputs below 4: slopes and sinks are not rounded to it."""
    context = Context(torch.arange(300)[None], torch.zeros(1, 300, dtype=torch.long))
    q, k, v = heads(context, 4, 2, 0, torch.bfloat16)
    terms = ScoreTerms(
        Alibi(256, range(256)[-4:]) if has_slopes else None, torch.tensor([0.3, -2.0, 5.0, 0.0]) if has_sinks else None
    )
    ours, exact = attend(q, k, v, context, None, terms), attend_reference(q, k, v, context, None, terms)
    torch.testing.assert_close(ours, exact, rtol=0, atol=0.03)


def test_sinks_far_above_and_below_all_scores() -> None:
    """A sink above takes everything, one below nothing; nothing overflows."""
    context = Context(torch.arange(16)[None], torch.zeros(1, 16, dtype=torch.long))
    q, k, v = heads(context, 2, 2, 0)
    sinks_H = torch.tensor([1000.0, -1000.0], requires_grad=True)
    out = attend(q, k, v, context, None, ScoreTerms(sinks_H=sinks_H))
    assert not out[:, :, 0].any()
    torch.testing.assert_close(out[:, :, 1], attend(q, k, v, context, None)[:, :, 1])
    out.sum().backward()
    assert sinks_H.grad is not None and not sinks_H.grad.any()


def test_slopes_are_those_of_the_authors_code() -> None:
    """As transformers' Bloom has them, also for numbers of heads that are no power of two."""
    for n_heads in (1, 2, 3, 8, 12, 14, 71, 112):
        theirs = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32).view(n_heads, 2)[:, 1]
        slopes = Alibi(n_heads, range(n_heads)).slopes(torch.device("cpu"))
        torch.testing.assert_close(slopes, theirs, rtol=1e-5, atol=0)
        parts = [Alibi(n_heads, range(n_heads)).of_part(rank, n_heads) for rank in range(n_heads)]
        assert torch.equal(torch.cat([part.slopes(torch.device("cpu")) for part in parts]), slopes)


def test_buckets_are_those_of_t5() -> None:
    """As transformers' T5 has them for a decoder, for distances far beyond the last bucket."""
    keys_S = torch.arange(3000)
    for count, max_distance in ((32, 128), (2, 3), (7, 20), (64, 1024)):
        theirs = T5Attention._relative_position_bucket(-keys_S, False, count, max_distance)
        ours = Buckets(count, max_distance).of(torch.tensor([[2999]]), keys_S[None])
        assert torch.equal(ours[0, 0].flip(0), theirs)


@pytest.mark.parametrize("count", [1, 5])
def test_sums_over_buckets_are_those_of_a_loop(count: int) -> None:
    """Gradients of scores that lie in memory in another order, and a bucket that no pair is in: fp64's rounding."""
    generator = torch.Generator().manual_seed(count)
    dscores_BHQS = torch.randn(2, 4, 3, 7, generator=generator).transpose(1, 2)
    buckets_BQS = torch.randint(count, (2, 4, 7), generator=generator)
    sums_HN = torch.zeros(3, count + 1, dtype=torch.float64)
    for row, head, query, key in product(range(2), range(3), range(4), range(7)):
        sums_HN[head, buckets_BQS[row, query, key]] += dscores_BHQS[row, head, query, key]
    torch.testing.assert_close(bucket_sums(dscores_BHQS, buckets_BQS, count + 1), sums_HN, rtol=1e-14, atol=1e-14)


def test_sums_over_buckets_are_made_by_kernels_that_deterministic_runs_have_on_gpus() -> None:
    """None of the operations that torch says throw there."""
    throwing = str(torch.use_deterministic_algorithms.__doc__).split("operations will throw a")[1]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        bucket_sums(torch.ones(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.int64), 4)
    called = {event.name.removeprefix("aten::") for event in seen.events()}
    assert len(called) > 3
    assert [name for name in called if f"torch.{name}`" in throwing or f"Tensor.{name}`" in throwing] == []


def test_cached_tokens_are_attended_to_with_the_same_terms() -> None:
    """Token by token with a cache, as all at once; positions go on from those that are cached."""
    context = Context(torch.arange(9)[None], torch.zeros(1, 9, dtype=torch.long))
    tensors = heads(context, 4, 2, 0)
    sinks_H = torch.tensor([0.5, -1.0, 0.0, 2.0])
    slopes = ScoreTerms(Alibi(4, range(4)), sinks_H)
    bias = ScoreTerms(None, sinks_H, torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), Buckets(6, 8), 0.7)
    for window, terms in product((None, 3), (slopes, bias)):
        cache = LayerCache()
        steps = []
        for step in range(9):
            now = slice(step, step + 1)
            seen = Context(context.positions_BS[:, now], context.documents_BS[:, now])
            q, k, v = (tensor[:, now] for tensor in tensors)
            held = cache.extend((k, v), seen, window)
            steps.append(held.attend(q, *held.kept, seen, window, terms))
        torch.testing.assert_close(torch.cat(steps, 1), attend(*tensors, context, window, terms), rtol=1e-5, atol=1e-5)
