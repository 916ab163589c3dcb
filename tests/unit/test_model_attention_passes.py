"""Attention's passes in C++ (attention_tiles.cpp, attention_vectors.cpp): against the formula, fp32 and fp64.

Those for bf16 are tested on matrix units and on vectors of bf16 where the processor has these, and where it has vectors
once more with plain loops in their place.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from cpp_passes import KINDS, NEEDS_COMPILER, NEEDS_VECTORS, broken_for_units, broken_for_vectors, on_units
from kernel_references import attend_reference
from modeling.context import PADDING, Context
from modeling.dropout import ScoreDropout
from modeling.kernels import attention_passes, native, tiles
from modeling.kernels.attention import attend, masked_attention
from modeling.pieces import Piece
from modeling.score_terms import Alibi, Buckets, ScoreTerms
from packed_heads import FEW, contexts, heads

pytestmark = pytest.mark.skipif(NEEDS_COMPILER is not None, reason=str(NEEDS_COMPILER))
WHY_NOT_TILES, PASSES_OF = attention_passes.why_not_tiles, attention_passes.passes_of
BF16 = torch.bfloat16
NAMES = ("out", "q", "k", "v")


@pytest.fixture(scope="module", params=["vectors", *KINDS])
def passes(request: pytest.FixtureRequest) -> Iterator[None]:
    """bf16 is computed in fp32, or on units that multiply it, or by plain loops in the units' place."""
    with pytest.MonkeyPatch.context() as patch:
        take(patch, None if request.param == "vectors" else on_units(attention_passes.TILES, request.param))
        yield


def take(patch: pytest.MonkeyPatch, on_units: ctypes.CDLL | None) -> None:
    """From now on bf16 is computed by this library for units; None: in fp32."""
    passes_of = attention_passes.passes_of

    def taken(dtype: torch.dtype) -> tuple[attention_passes.Pass, attention_passes.Pass] | None:
        if dtype == BF16 and on_units is not None:
            return on_units.forward, on_units.backward
        return passes_of(dtype)

    patch.setattr(attention_passes, "why_not_tiles", lambda: "vectors are wanted")
    patch.setattr(attention_passes, "passes_of", taken)


def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which each pass in C++ adds its name."""
    names, call = [], attention_passes.call

    def told(which: int, *given: object) -> None:
        names.append(("forward", "backward")[which])
        call(which, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_passes, "call", told)
    return names


@FEW
@given(
    context=contexts(),
    window=st.none() | st.integers(1, 26),
    n_kv_heads=st.integers(1, 2),
    groups=st.integers(1, 6),
    d_v=st.sampled_from([8, 4]),
    has_slopes=st.booleans(),
    has_sinks=st.booleans(),
    block=st.integers(1, 9),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([BF16, torch.float32]),
)
def test_numbers_are_the_formulas(
    passes: None,
    context: Context,
    window: int | None,
    n_kv_heads: int,
    groups: int,
    d_v: int,
    has_slopes: bool,
    has_sinks: bool,
    block: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    """Outputs and gradients to 0.04: a few of bf16's roundings of numbers below 4. In fp32 to 1e-5. Of real tokens."""
    n_heads, bound = n_kv_heads * groups, 0.04 if dtype == BF16 else 1e-5
    ours, references = (heads(context, n_heads, n_kv_heads, seed, dtype, d_v=d_v) for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    sinks = [torch.randn(n_heads, generator=generator)] * 2 if has_sinks else [None, None]
    sinks = [None if each is None else each.clone().requires_grad_() for each in sinks]
    is_real_BS11 = (context.documents_BS != PADDING)[..., None, None]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        names = called(patch)
        kernels = (partial(attend, block=block), attend_reference)
        for tensors, sinks_H, kernel in zip((ours, references), sinks, kernels, strict=True):
            alibi = Alibi(12, range(12)[:n_heads]) if has_slopes else None
            out = kernel(*tensors, context, window, ScoreTerms(alibi=alibi, sinks_H=sinks_H))
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)) * is_real_BS11
            (out * weights).sum().backward()
            of_sinks = [] if sinks_H is None else [sinks_H.grad]
            found.append([out * is_real_BS11, *(each.grad for each in tensors), *of_sinks])
        assert names == ["forward", "backward"]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)


def packed(lengths: Sequence[int], n_rows: int = 1) -> Context:
    """Rows of documents of these lengths."""
    documents_S = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions_S = torch.cat([torch.arange(n) for n in lengths])
    return Context(*(each.repeat(n_rows, 1) for each in (positions_S, documents_S)))


class Drawn:
    """Queries, keys, values and a gradient for rows of documents."""

    def __init__(self, context: Context, sizes: tuple[int, int, int], seed: int = 0, scale: float = 1.0) -> None:
        n_heads, n_kv_heads, d_head = sizes
        generator = torch.Generator().manual_seed(seed)
        self.context = context
        self.q, self.k, self.v, self.grad = (
            (torch.randn(*context.positions_BS.shape, n, d_head, generator=generator) * factor).to(BF16)
            for n, factor in ((n_heads, scale), (n_kv_heads, 1), (n_kv_heads, 1), (n_heads, 1))
        )

    def passes(self, dtype: torch.dtype = BF16, window: int | None = None) -> dict[str, Tensor]:
        """The output and the gradients, by NAMES."""
        given = [each.to(dtype).clone().requires_grad_() for each in (self.q, self.k, self.v)]
        out = attend(*given, self.context, window)
        out.backward(self.grad.to(dtype))
        return dict(zip(NAMES, (out.detach(), *(each.grad for each in given)), strict=True))


def by_torch(drawn: Drawn, dtype: torch.dtype, window: int | None) -> dict[str, Tensor]:
    """The passes by torch's kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_passes, "fits", lambda *_: False)
        return drawn.passes(dtype, window)


def check_wide(drawn: Drawn, window: int | None = None) -> None:
    """Raises AssertionError where a tensor in fp32 lies farther from torch's than sums in another order."""
    wanted, found = by_torch(drawn, torch.float32, window), drawn.passes(torch.float32, window)
    for name in NAMES:
        distance = float((found[name] - wanted[name]).norm() / wanted[name].norm())
        assert distance < 1e-6, (name, distance)


def check(drawn: Drawn, window: int | None = None) -> None:
    """Raises AssertionError where a tensor lies farther from fp32 than roundings take it.

    The passes by torch round inputs and results alone. On units weights are rounded once more, and the gradients by
    scores, each as much again, and errors that are independent add as squares do: a half more in all.
    """
    wanted, found = by_torch(drawn, torch.float32, window), drawn.passes(BF16, window)
    usual = by_torch(drawn, BF16, window)
    for name in NAMES:
        distances = [float((each[name].float() - wanted[name]).norm()) for each in (found, usual)]
        assert distances[0] <= 1.6 * distances[1] < 2**-6 * float(wanted[name].norm()), (name, distances)


LENGTHS = (
    tuple(range(1, 24)),
    (5, 150, 70, 1, 129, 45),
    (31, 32, 33, 64, 65, 300),
    (700,),
)
SIZES = ((1, 1, 32), (6, 2, 64), (5, 1, 24), (3, 3, 80))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_output_and_gradients_are_near_to_fp32(
    passes: None, lengths: tuple[int, ...], sizes: tuple[int, int, int]
) -> None:
    """Documents of one block and of several pieces of keys; more query heads for a key than are computed at once."""
    check(Drawn(packed(lengths), sizes))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_fp32_differs_by_the_order_of_sums_alone(lengths: tuple[int, ...], sizes: tuple[int, int, int]) -> None:
    check_wide(Drawn(packed(lengths), sizes))
    check_wide(Drawn(packed(lengths, n_rows=2), sizes), 45)


@pytest.mark.parametrize("window", [2, 32, 100, 290])
def test_windows(passes: None, window: int) -> None:
    check(Drawn(packed((20, 400, 180)), (2, 1, 40)), window)


def test_rows_of_the_same_boundaries(passes: None) -> None:
    check(Drawn(packed((70, 30), n_rows=3), (4, 2, 32)))


@pytest.mark.parametrize("scale", [0.0, 30.0, 3000.0])
def test_scores_of_any_size(passes: None, scale: float) -> None:
    """Weights of a query may be those of one key alone, or equal; nothing overflows."""
    drawn = Drawn(packed((300, 40)), (2, 1, 32), scale=scale)
    wanted, found = drawn.passes(torch.float32), drawn.passes()
    for name in NAMES:
        most = 2e-2 * max(1.0, float(wanted[name].abs().max()))
        assert torch.allclose(found[name].float(), wanted[name], rtol=2e-2, atol=most), name


def test_threads_change_no_bit(passes: None) -> None:
    drawn, n_threads = Drawn(packed((90, 200), n_rows=3), (6, 2, 32)), torch.get_num_threads()
    usual = drawn.passes()
    try:
        torch.set_num_threads(4)
        found = drawn.passes()
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(usual[name], found[name]) for name in NAMES)


def test_a_document_does_not_depend_on_others(passes: None) -> None:
    """Bit for bit; what is not a number stays in its document."""
    drawn = Drawn(packed((40, 50, 70)), (4, 2, 32))
    usual = drawn.passes()
    drawn.q[0, 60, 1, 3] = drawn.k[0, 70, 1, 0] = drawn.v[0, 80, 0, 5] = float("nan")
    found = drawn.passes()
    others = [*range(40), *range(90, 160)]
    for name in NAMES:
        assert torch.equal(usual[name][:, others], found[name][:, others]), name
    assert found["out"][0, 60, 1].isnan().all() and found["q"][0, 60, 1].isnan().all()
    assert found["out"][0, 70:90, 2:].isnan().all() and found["out"][0, 80:90, :2, 5].isnan().all()


def test_memory_of_heads_may_lie_anyhow(passes: None) -> None:
    """Heads before tokens, parts of larger tensors, gradients of one number."""
    drawn = Drawn(packed((40, 30), n_rows=2), (4, 2, 24))
    usual = drawn.passes()
    for name in ("q", "k", "v"):
        drawn.__dict__[name] = torch.stack([getattr(drawn, name).transpose(1, 2)] * 3, dim=-1)[..., 1].transpose(1, 2)
    found = drawn.passes()
    assert all(torch.equal(usual[name], found[name]) for name in NAMES)
    drawn.grad = torch.ones((), dtype=BF16).expand_as(drawn.q)
    other = drawn.passes()
    drawn.grad = torch.ones_like(drawn.q)
    assert all(torch.equal(other[name], each) for name, each in drawn.passes().items())


def check_mask(kind: str, dtype: torch.dtype = BF16) -> None:
    """Raises AssertionError where a pass under random masks is not the formula's, to a few of bf16's roundings.

    Rows, or heads, see other keys each. Some queries see none, which gives zeros and -inf; some all, some none of a
    block between others.
    """
    generator = torch.Generator().manual_seed(3)
    batch, seq_len, n_heads = 2, 170, 3
    n_masks = 1 if kind == "of heads" else batch
    sees = torch.rand(n_masks, seq_len, seq_len, generator=generator) < 0.3
    sees[:, 7], sees[:, 32:96] = False, True
    sees[:, 96:128, 32:64] = sees[:, 128:, 64:128] = False
    mask: Tensor = sees
    if kind != "bool":
        shape = (len(sees), n_heads if kind == "of heads" else 1, seq_len, seq_len)
        mask = (torch.randn(shape, generator=generator) * (kind == "of heads")).masked_fill_(
            ~sees[:, None], float("-inf")
        )
    if kind == "of columns":
        mask = mask.mT.contiguous().mT
    q, k, v, grad = (torch.randn(batch, seq_len, n_heads, 16, generator=generator).to(dtype) for _ in range(4))
    pieces = [Piece(slice(0, batch), slice(first, first + 85), slice(0, seq_len)) for first in (0, 85)]

    def of_piece(piece: Piece) -> Tensor:
        return mask[..., piece.queries, piece.keys]

    out, lse = attention_passes.forward(q, k, v, pieces, of_piece)
    grads = attention_passes.backward(grad, q, k, v, out, lse, pieces, of_piece)
    given = [each.float().requires_grad_() for each in (q, k, v)]
    scores = torch.einsum("bqhc,bshc->bhqs", *given[:2]) / 4
    scores = scores.masked_fill(~sees[:, None], float("-inf")) + (0 if kind == "bool" else mask)
    wanted = torch.einsum("bhqs,bshc->bqhc", scores.softmax(-1).nan_to_num(0), given[2])
    (wanted * grad)[:, [*range(7), *range(8, seq_len)]].sum().backward()
    assert out[:, 7].count_nonzero() == 0 and lse[:, :, 7].isneginf().all() and grads[0][:, 7].count_nonzero() == 0
    assert torch.allclose(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip((out, *grads), (wanted, *(each.grad for each in given)), strict=True):
        assert theirs is not None
        assert torch.allclose(mine.float(), theirs.nan_to_num(0), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("kind", ["bool", "of rows", "of heads", "of columns"])
def test_masks_of_any_kind(passes: None, kind: str) -> None:
    check_mask(kind)


def test_what_is_taken_in_cpp(passes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 and bf16, documents of whole sequences; nothing that is fake, capped, biased or dropped."""
    context = packed((4, 8))
    q, k, v = heads(context, 4, 2, 0, BF16)
    names = called(monkeypatch)
    attend(q, k, v, context, None, ScoreTerms(sinks_H=torch.zeros(4)))
    attend(*(each.float() for each in (q, k, v)), context, None)
    assert names == ["forward"] * 2
    for terms in (
        ScoreTerms(cap=3.0),
        ScoreTerms(bias_HN=torch.zeros(4, 5), buckets=Buckets(5, 9)),
        ScoreTerms(dropout=ScoreDropout(0.5, torch.arange(1), range(4))),
    ):
        attend(q, k, v, context, None, terms).float().sum().backward()
    attend(*(each.half() for each in (q, k, v)), context, None)
    masked_attention(q, k, v, context.mask_BSS(None), ScoreTerms(sinks_H=torch.zeros(4)))  # masks of whole rows
    assert names == ["forward"] * 2
    assert attention_passes.fits(q, k, v)
    assert not attention_passes.fits(q[:, -1:], k, v)  # one more token of a sequence that is kept
    with FakeTensorMode() as mode:
        assert not attention_passes.fits(*(mode.from_tensor(each) for each in (q, k, v)))


def test_a_process_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units for bf16, else vectors of fp32, else nothing."""
    q, k, v = heads(packed((4, 8)), 4, 2, 0, BF16)
    monkeypatch.setattr(attention_passes, "why_not_tiles", WHY_NOT_TILES)
    monkeypatch.setattr(attention_passes, "passes_of", PASSES_OF)
    assert attention_passes.fits(q, k, v)
    monkeypatch.setattr(attention_passes, "why_not", lambda: "no compiler")
    assert attention_passes.fits(q, k, v) == (WHY_NOT_TILES() is None)
    assert not attention_passes.fits(q.float(), k.float(), v.float())
    monkeypatch.setattr(attention_passes, "why_not_tiles", lambda: "no units")
    assert not attention_passes.fits(q, k, v)


def test_tiles_that_linux_refuses_leave_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux before 5.16 does, on a processor that has both."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for may_use, options in ((False, tiles.VECTORS), (True, tiles.TILES)):
        monkeypatch.setattr(tiles, "may_use_tiles", lambda may_use=may_use: may_use)
        assert tiles.options.__wrapped__() == options
    monkeypatch.undo()
    assert torch.cpu._is_amx_tile_supported() or not tiles.may_use_tiles()


def check_some(check: Callable[..., None] = check) -> None:
    """What planted faults are seen by."""
    check(Drawn(packed((420, 75)), (5, 1, 40)))
    check(Drawn(packed((400,)), (2, 1, 40)), 40)
    check_mask("of rows", BF16 if check is not check_wide else torch.float32)


def test_nothing_is_seen_where_nothing_is_planted(passes: None) -> None:
    check_some()
    check_some(check_wide)


IN_BOTH = {
    "blocks that are seen in part are taken whole": (": Seen::SOME", ": Seen::ALL"),
    "blocks are taken as hidden": ("n_seen == 0 ? Seen::NOTHING", "n_seen < 100 ? Seen::NOTHING"),
    "another row's mask": ("mask + at * piece->mask_of_query", "mask + at / 2 * piece->mask_of_query"),
    "the first keys alone": ("key < piece.keys[1]; key += KEYS", "key < piece.keys[0] + 1; key += KEYS"),
}
ON_UNITS = {
    "keys beyond the last are seen": ("n_changed == 0 && n == BLOCK", "n_changed == 0"),
    "a step of each product is left out": ("step < steps; step++", "step + 1 < steps; step++"),
    "scores are not scaled": ("{_mm512_mul_ps(found.low, scale), _mm512_mul_ps(found.high, scale)}", "found"),
    "what was summed is kept as it was": ("weight(_mm512_sub_ps(before, top))", "_mm512_set1_ps(1.0f)"),
    "the greatest score is forgotten": ("_mm512_store_ps(tops + half, now);", ""),
    "weights of other rows are summed": ("_mm512_reduce_add_ps(totals[row])", "_mm512_reduce_add_ps(totals[0])"),
    "the mean is not taken off": ("set1_ps(means[at])", "set1_ps(0.0f)"),
    "heads that share a key replace each other": ("add_product(dk_at,", "product(dk_at,"),
    "later pieces replace the first ones'": (
        "_mm512_add_ps(_mm512_load_ps(at), more)",
        "more",
    ),
    "keys' gradients are not transposed": ("    transpose(low);\n    transpose(high);\n", ""),
    "channels of the second half are lost": ("to += TILE;\n", ""),
    "hidden blocks keep what was there": ("made.clear();", ""),
    "hidden weights keep what was there": ("std::memset(weights + j * STEP, 0, STEP * sizeof(Bf16));", ""),
    "gradients of scores are not scaled": ("_mm512_mul_ps(low, factor)", "_mm512_mul_ps(low, _mm512_set1_ps(1.0f))"),
    "the first head's queries": ("all.q.at<Bf16>(row, query, head + each)", "all.q.at<Bf16>(row, query, head)"),
}
BY_DOTS = {  # by vectors of bf16
    "the first eight rows alone": ("first < BLOCK; first += ROWS", "first < ROWS; first += ROWS"),
    "the first rows of a tile twice": (" + first % TILE_ROWS * BLOCK;", ";"),
    "the upper rows take the lower ones' factors": ("rows = left + first / TILE_ROWS * TILE", "rows = left"),
    "products replace what was there": ("ADDS ? _mm512_load_ps(to + row * TILE_ROWS)", "false ? *(__m512*)to"),
    "the first step alone": ("step < steps; step++)\n      for", "step < 1; step++)\n      for"),
    "both halves of the columns are one": ("upper = factors(pairs + TILE)", "upper = factors(pairs)"),
    "the first pair of a row": ("row * BLOCK + k);", "row * BLOCK);"),
}
BY_VECTORS = {
    "a number of each product is left out": ("inner < n_inner; inner++", "inner + 1 < n_inner; inner++"),
    "rows beyond whole eights are left out": ("multiply_rows<1, true>", "multiply_rows<ROWS, true>"),
    "products replace what was there": ("ADDS || inner > 0", "inner > 0"),
    "scores are not scaled": ("at[k] *= scale", "at[k] *= 1"),
    "what was summed is kept as it was": ("kept = exponential(tops[row] - less)", "kept = 1"),
    "the greatest score is forgotten": ("tops[row] = top;", ""),
    "exponentials are coarse": ("{1.0f / 120, 1.0f / 24, ", "{1.0f / 24, "),
    "the mean is not taken off": ("(grad[key] - mean)", "(grad[key] - 0)"),
    "hidden keys keep their scores": ("std::fill_n(at, n, HIDDEN)", "0"),
    "gradients by keys are those by values": ("Left{grads + at, 1, KEYS}", "Left{scores + at, 1, KEYS}"),
    "the first head's queries": ("all.q, row, query, head + each", "all.q, row, query, head"),
}


@pytest.mark.parametrize("fault", [*IN_BOTH, *BY_VECTORS])
def test_planted_faults_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = {**IN_BOTH, **BY_VECTORS}[fault]
    library = broken_for_vectors(attention_passes.VECTORS, native.FUSED, tmp_path, change)
    monkeypatch.setattr(attention_passes, "passes_of", lambda dtype: (library.forward_fp32, library.backward_fp32))
    with pytest.raises(AssertionError):
        check_some(check_wide)


@pytest.mark.skipif(NEEDS_VECTORS is not None, reason=str(NEEDS_VECTORS))
@pytest.mark.parametrize(
    ("kind", "fault"),
    [*(("loops", fault) for fault in (*IN_BOTH, *ON_UNITS)), *(("dots", fault) for fault in BY_DOTS)],
)
def test_planted_faults_on_units_are_seen(
    kind: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = (BY_DOTS if kind == "dots" else {**IN_BOTH, **ON_UNITS})[fault]
    take(monkeypatch, broken_for_units(attention_passes.TILES, tmp_path, change, kind=kind))
    with pytest.raises(AssertionError):
        check_some()
