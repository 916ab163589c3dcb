"""Attention over packed documents: the fast cores against the formula, and the mask against a loop."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import modeling.kernels.terms as term_kernels
from kernel_references import attend_reference
from modeling.attention import build_attention
from modeling.config import AttentionGate, MLAConfig, ModelConfig
from modeling.context import PADDING, Context
from modeling.dropout import ScoreDropout
from modeling.kernels import attention_passes
from modeling.kernels.attention import attend, fits_rows, has_fast_rows
from modeling.kernels.widths import widened
from modeling.pieces import QUERY_BLOCK, cut_documents
from modeling.rope import Rotary
from modeling.rope_scaling import LinearScaling
from modeling.score_terms import Alibi, Buckets, ScoreTerms
from packed_heads import FEW, contexts, heads


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
    in_cpp=st.booleans(),
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
    in_cpp: bool,
) -> None:
    """Outputs and gradients, fp32: 1e-5, rounding of sums in another order. Values may be narrower than keys.

    Of real tokens: nobody looks at what padding attends to. A machine without a compiler has torch's kernel alone.
    """
    n_heads = n_kv_heads * groups
    fits = attention_passes.fits if in_cpp else lambda *_: False
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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_passes, "fits", fits)
            found.append(kernel(*tensors[:3], context, window, terms))
    is_real_BS11 = (context.documents_BS != PADDING)[..., None, None]
    out, reference = found
    torch.testing.assert_close(out * is_real_BS11, reference * is_real_BS11, rtol=1e-5, atol=1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)) * is_real_BS11
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_passes, "fits", fits)
        (out * weights).sum().backward()
    (reference * weights).sum().backward()
    for mine, theirs in zip(ours, references, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("in_cpp", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_between_calls_is_no_part_of_a_result(
    dtype: torch.dtype, in_cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_cpp:
        monkeypatch.setattr(attention_passes, "fits", lambda *_: False)
    for one, other in zip(passes_of_two(dtype, together=True), passes_of_two(dtype, together=False), strict=True):
        assert torch.equal(one, other)


def test_planted_a_result_in_kept_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself sees that a result's memory was written to again."""
    kept = term_kernels.SCRATCH
    monkeypatch.setattr(attention_passes, "fits", lambda *_: False)
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


def test_layers_with_a_window_turn_by_their_own_base_and_unscaled() -> None:
    """As Gemma 3's do."""
    scaling, local = LinearScaling(factor=8.0), {"sliding_window": 8, "full_attention_layers": (1,)}
    config = ModelConfig(family="none", n_layers=2, rope_scaling=scaling, local_rope_theta=50.0, **local)
    with torch.device("meta"):
        found = [build_attention(config, layer).rotary for layer in range(2)]
    assert found == [Rotary(config.head_dim, 50.0), Rotary(config.head_dim, config.rope_theta, scaling)]


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
@pytest.mark.parametrize("is_latent", [False, True])
def test_what_attention_puts_out_is_gated(gate: AttentionGate, is_latent: bool) -> None:
    """By the sigmoid of a projection of its input: a number for each channel, or one for all channels of a head."""
    mla = MLAConfig(kv_lora_rank=6, q_lora_rank=None, d_nope=4, d_rope=2, d_v=3) if is_latent else None
    plain = ModelConfig(family="none", d_model=12, n_heads=4, n_kv_heads=4 if is_latent else 2, mla=mla)
    config = replace(plain, attention_gate=gate)
    attention, ungated = build_attention(config, 0), build_attention(plain, 0)
    generator = torch.Generator().manual_seed(0)
    for weight in attention.parameters():
        nn.init.normal_(weight.data, generator=generator)
    ungated.load_state_dict(attention.state_dict(), strict=False)
    width = config.v_head_dim
    ungated.o.weight = nn.Parameter(torch.eye(4 * width))  # so that what comes out is what the heads put out
    hidden_BSD = torch.randn(2, 7, 12, generator=generator)
    places_BS = torch.arange(7).repeat(2, 1)
    context = Context(places_BS, torch.zeros_like(places_BS))
    assert attention.output_gate is not None
    gates_BSX = attention.output_gate(hidden_BSD).sigmoid()
    if gate == "headwise":
        assert attention.output_gate.weight.shape == (4, 12)
        gates_BSX = gates_BSX.repeat_interleave(width, dim=-1)
    expected_BSD = (ungated(hidden_BSD, context) * gates_BSX) @ attention.o.weight.T
    torch.testing.assert_close(attention(hidden_BSD, context), expected_BSD, rtol=1e-5, atol=1e-5)
