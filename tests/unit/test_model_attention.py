"""Attention over packed documents: the fast cores against the formula, and the mask against a loop."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import modeling.kernels.terms as term_kernels
from kernel_references import attend_reference, like_flash
from modeling.context import PADDING, Context
from modeling.dropout import ScoreDropout
from modeling.kernels.attention import attend, fits_rows, has_fast_rows, masked_attention, row_block, row_formula
from modeling.kernels.sink_attention import sink_attention
from modeling.kernels.widths import widened
from modeling.kv_cache import LayerCache
from modeling.pieces import QUERY_BLOCK, cut_documents
from modeling.score_terms import Alibi, Buckets, ScoreTerms, bucket_sums

FEW = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    """Rows of packed documents, some ending in padding."""
    seq_len = draw(st.integers(1, 24))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        positions: list[int] = []
        documents: list[int] = []
        while len(positions) < seq_len:
            length = draw(st.integers(1, seq_len - len(positions)))
            is_padding = len(positions) + length == seq_len and bool(positions) and draw(st.booleans())
            positions += [0] * length if is_padding else range(length)
            documents += [PADDING if is_padding else len(set(documents))] * length
        rows.append((positions, documents))
    positions_BS = torch.tensor([row[0] for row in rows])
    documents_BS = torch.tensor([row[1] for row in rows])
    return Context(positions_BS, documents_BS, has_padding=bool((documents_BS == PADDING).any()))


def heads(
    context: Context, n_heads: int, n_kv_heads: int, seed: int, dtype: torch.dtype = torch.float32, d_v: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, seq_len = context.positions_BS.shape
    shapes = [(batch, seq_len, n, width) for n, width in ((n_heads, 8), (n_kv_heads, 8), (n_kv_heads, d_v))]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@FEW
@given(
    context=contexts(),
    window=st.none() | st.integers(1, 26),
    n_kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    d_v=st.sampled_from([8, 4]),
    has_slopes=st.booleans(),
    has_sinks=st.booleans(),
    has_bias=st.booleans(),
    cap=st.sampled_from([None, 0.7]),
    drops=st.booleans(),
    block=st.sampled_from([1, 3, QUERY_BLOCK]),
    seed=st.integers(0, 99),
)
def test_attend_equals_reference(
    context: Context,
    window: int | None,
    n_kv_heads: int,
    groups: int,
    d_v: int,
    has_slopes: bool,
    has_sinks: bool,
    has_bias: bool,
    cap: float | None,
    drops: bool,
    block: int,
    seed: int,
) -> None:
    """Outputs and gradients, fp32: 1e-5, rounding of sums in another order. Values may be narrower than keys.

    Of real tokens: nobody looks at what padding attends to.
    """
    n_heads = n_kv_heads * groups
    ours, references = (heads(context, n_heads, n_kv_heads, seed, d_v=d_v) for _ in range(2))
    found = []
    for tensors, kernel in ((ours, partial(attend, block=block)), (references, attend_reference)):
        generator = torch.Generator().manual_seed(seed)
        sinks_H, bias_HN = (torch.randn(shape, generator=generator) for shape in ((n_heads,), (n_heads, 5)))
        tensors += [each.requires_grad_() for each, wanted in ((sinks_H, has_sinks), (bias_HN, has_bias)) if wanted]
        terms = ScoreTerms(
            Alibi(8, range(8)[1 : 1 + n_heads]) if has_slopes and not has_bias else None,
            sinks_H if has_sinks else None,
            bias_HN if has_bias else None,
            Buckets(5, 9) if has_bias else None,
            cap,
            ScoreDropout(0.3, torch.arange(context.positions_BS.shape[0]), range(n_heads)) if drops else None,
        )
        found.append(kernel(*tensors[:3], context, window, terms))
    is_real_BS11 = (context.documents_BS != PADDING)[..., None, None]
    out, reference = found
    torch.testing.assert_close(out * is_real_BS11, reference * is_real_BS11, rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)) * is_real_BS11
    (out * weights).sum().backward()
    (reference * weights).sum().backward()
    for mine, theirs in zip(ours, references, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


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


def test_attend_in_bf16() -> None:
    """Within two of bf16's roundings of outputs below 4."""
    context = Context(torch.arange(16)[None], torch.zeros(1, 16, dtype=torch.long))
    q, k, v = heads(context, 4, 2, 0, torch.bfloat16)
    torch.testing.assert_close(
        attend(q, k, v, context, None), attend_reference(q, k, v, context, None), rtol=0, atol=0.03
    )


def passes_of_two(dtype: torch.dtype, *, together: bool) -> list[Tensor]:
    """Outputs and gradients of two samples' attention: both forward passes first, or one sample after the other."""
    found, waiting = [], []
    for seed, length in enumerate((40, 24)):
        context = Context(torch.arange(length)[None], torch.zeros(1, length, dtype=torch.long))
        tensors = heads(context, 4, 2, seed, dtype)
        waiting.append((attend(*tensors, context, None), tensors))
        if together and len(waiting) < 2:
            continue
        for out, given_heads in waiting:
            out.backward(out.detach())
            found += [out.detach(), *(each.grad for each in given_heads)]
        waiting = []
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_between_calls_is_no_part_of_a_result(dtype: torch.dtype) -> None:
    for one, other in zip(passes_of_two(dtype, together=True), passes_of_two(dtype, together=False), strict=True):
        assert torch.equal(one, other)


def test_planted_a_result_in_kept_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself sees that a result's memory was written to again."""
    kept = term_kernels.SCRATCH
    monkeypatch.setattr(term_kernels, "room_for", lambda heads, name: kept.take(name, heads.shape, heads))
    with pytest.raises(RuntimeError, match="modified inplace"):
        passes_of_two(torch.float32, together=True)


@FEW
@given(context=contexts(), window=st.none() | st.integers(1, 26))
def test_mask_is_what_it_says(context: Context, window: int | None) -> None:
    positions_BS, documents_BS = context.positions_BS, context.documents_BS
    mask_BSS = context.mask_BSS(window)
    batch, seq_len = positions_BS.shape
    for row in range(batch):
        for query in range(seq_len):
            for key in range(seq_len):
                same = documents_BS[row, query] == documents_BS[row, key]
                back = int(positions_BS[row, query] - positions_BS[row, key])
                assert mask_BSS[row, query, key] == (same and 0 <= back < (window or 1000))
    assert mask_BSS.any(-1).all()  # no softmax over nothing


@FEW
@given(context=contexts())
def test_boundaries_cut_where_documents_change(context: Context) -> None:
    boundaries, longest = context.cu_seqlens
    flat = [(row, int(number)) for row, line in enumerate(context.documents_BS) for number in line]
    starts = [index for index in range(len(flat)) if index == 0 or flat[index] != flat[index - 1]]
    assert boundaries.tolist() == [*starts, len(flat)]
    assert longest == max(boundaries.diff().tolist())
    assert boundaries.dtype == torch.int32


@FEW
@given(context=contexts())
def test_rows_that_are_one_document_each(context: Context) -> None:
    assert context.rows_are_documents == all(len({*row}) == 1 for row in context.documents_BS.tolist())


@pytest.mark.parametrize(
    ("length", "width", "window", "is_whole"),
    [
        (256, 64, None, True),
        (256, 64, 256, True),
        (256, 64, 255, False),
        (256, 36, None, False),
        (256, 136, None, False),
        (128, 64, None, False),
    ],
)
def test_a_gpu_takes_the_kernel_for_whole_rows_where_it_fits(
    monkeypatch: pytest.MonkeyPatch, length: int, width: int, window: int | None, is_whole: bool
) -> None:
    """Tensors that say that they lie on a GPU, which counts as one of Hopper's kind."""
    places_S = torch.arange(256)
    context = Context((places_S % length).expand(2, 256), (places_S // length).expand(2, 256))
    monkeypatch.setattr("modeling.kernels.attention.row_attention", lambda *_: "whole rows")
    monkeypatch.setattr("modeling.kernels.attention.varlen_attention", lambda *_: "documents")
    heads = [torch.empty(2, 256, n, width, dtype=torch.bfloat16).as_subclass(OnGpu) for n in (4, 2, 2)]
    assert attend(*heads, context, window) == ("whole rows" if is_whole else "documents")


@pytest.mark.parametrize(
    ("capability", "has_cudnn", "fits"),
    [
        ((9, 0), True, True),
        ((10, 3), True, True),
        ((9, 0), False, False),
        ((8, 0), True, False),
        ((12, 0), True, False),
    ],
)
def test_the_kernel_for_whole_rows_is_for_gpus_on_which_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_cudnn: bool, fits: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: has_cudnn)
    assert has_fast_rows.__wrapped__(torch.device("cuda", 0)) == fits


@pytest.mark.parametrize("seq_len", [1, 77, 127, 129, 1000])
def test_rows_of_any_length_build_no_graphs(seq_len: int) -> None:
    """A graph takes up to a second, and one is built for each shape."""
    rows = torch.empty(1, seq_len, 4, 64)
    assert not fits_rows(rows, rows)


def test_deterministic_runs_take_no_kernel_whose_sums_have_no_order() -> None:
    rows = torch.empty(1, 128, 4, 64)
    assert fits_rows(rows, rows)
    torch.use_deterministic_algorithms(True)
    try:
        assert not fits_rows(rows, rows)
    finally:
        torch.use_deterministic_algorithms(False)


class OnGpu(Tensor):
    """A tensor that says so."""

    is_cuda, is_cpu = True, False  # type: ignore[assignment]


def test_masks_are_built_once_for_each_window() -> None:
    context = Context(torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.long))
    assert context.mask_BSS(2) is context.mask_BSS(2)
    assert context.mask_BSS(None) is not context.mask_BSS(2)


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


@pytest.mark.parametrize("fault", ["documents", "causality", "window"])
def test_planted_mask_fault(fault: str) -> None:
    """Attention across documents, into the future, or one token too far back differs from the reference."""
    positions_BS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    documents_BS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    whole, broken = (Context(positions_BS, documents_BS) for _ in range(2))
    key, block = (2, 3, None, None), 3
    match fault:
        case "documents":
            broken.cuts[2, block] = cut_documents(documents_BS * 0, 2, block)
        case "causality":
            broken.bands[key] = torch.zeros_like(broken.band(2, block, None, None)[0]), None
        case "window":
            broken.cuts[2, block] = cut_documents(documents_BS, 3, block)
            broken.bands[key] = whole.band(3, block, None, None)
    q, k, v = heads(whole, 2, 1, 0)
    exact = attend_reference(q, k, v, whole, 2)
    torch.testing.assert_close(attend(q, k, v, whole, 2, block=block), exact)
    assert not torch.allclose(attend(q, k, v, broken, 2, block=block), exact, atol=1e-3)


@FEW
@given(context=contexts(), window=st.none() | st.integers(1, 26), block=st.integers(1, 30))
def test_pieces_hold_each_pair_that_is_seen_and_cost_what_documents_cost(
    context: Context, window: int | None, block: int
) -> None:
    """Each query is in one piece, with all keys that it sees; and no piece is wider than its window and its queries."""
    seen_BSS = torch.zeros_like(context.mask_BSS(window))
    queries_BS = torch.zeros_like(context.documents_BS)
    band = context.band(window, block, None, None)[0]
    for piece in context.document_pieces(window, block):
        n_queries, n_keys = (part.stop - part.start for part in piece[1:])
        assert n_queries <= block and (window is None or n_keys <= window - 1 + n_queries)
        assert not context.documents_BS[piece.rows, piece.keys].diff(dim=1).any()
        queries_BS[piece.rows, piece.queries] += 1
        seen_BSS[piece.rows, piece.queries, piece.keys] |= piece.of_band(band)[0] == 0
    assert (queries_BS == 1).all()
    is_real_BS1 = (context.documents_BS != PADDING)[..., None]
    assert torch.equal(seen_BSS & is_real_BS1, context.mask_BSS(window) & is_real_BS1)


def test_rows_that_lie_alike_are_one_piece() -> None:
    """Rows of one document each are one call, as without packing."""
    context = Context(torch.arange(6).repeat(4, 1), torch.zeros(4, 6, dtype=torch.long))
    assert context.document_pieces(None, 128) == [(slice(0, 4), slice(0, 6), slice(0, 6))]


@FEW
@given(context=contexts(), window=st.none() | st.integers(1, 26), seed=st.integers(0, 99))
def test_values_filled_up_with_zeros(context: Context, window: int | None, seed: int) -> None:
    """Attention of narrower values is that of the filled up ones, cut; the other channels are zero."""
    q_BSHC, k_BSGC, v_BSGC = heads(context, 4, 2, seed, d_v=4)
    out = attend(q_BSHC, k_BSGC, widened(v_BSGC, 8), context, window)
    torch.testing.assert_close(out[..., :4], attend(q_BSHC, k_BSGC, v_BSGC, context, window), rtol=1e-5, atol=1e-5)
    assert not out[..., 4:].any()
