"""Linear attention: the rule in chunks against the rule token by token, its convolutions, documents and caches.

In fp64 token by token and in fp32 by chunks, what is put out and every gradient differ by rounding alone: 2e-5 of the
largest element at most, where most differ by 1e-6.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from kernel_references import gated_delta_reference
from launcher.config.tree import RunConfig, TrainConfig
from launcher.trace.ops import work_of
from launcher.trace.parts import Axes
from launcher.trace.recorder import Recorder
from launcher.trace.regions import Regions
from launcher.training import linear
from modeling.config import ModelConfig
from modeling.context import Context
from modeling.counts import count_parameters, forward_flops_per_token
from modeling.dims import units_of
from modeling.init import initial_box, initial_tensor
from modeling.kernels import fused_delta
from modeling.kernels.gated_delta import RuleSizes, by_chunks, continued, cuts_of, gated_delta
from modeling.kernels.rerun import rerun
from modeling.kernels.short_convolution import short_convolution
from modeling.kernels.short_convolution import short_convolution_by_channels as by_channels
from modeling.kv_cache import LayerCache
from modeling.linear_attention import GatedNorm, LinearAttention
from modeling.linear_attention_config import LinearAttentionConfig
from modeling.logical import logical_tensors
from modeling.precision_config import Precision
from small_models import build

TOLERANCE = 2e-5
CUDA = torch.device("cuda")
SMALL = LinearAttentionConfig(n_k_heads=2, n_v_heads=4, d_k=6, d_v=10)
CONFIG = ModelConfig(family="none", d_model=12, n_layers=4, n_heads=2, n_kv_heads=2, linear_attention=SMALL)
LENGTHS = [[7, 1, 12], [20], [3, 9, 8]]  # of the documents, row by row


def places(lengths: list[list[int]]) -> tuple[Tensor, Tensor]:
    """positions_BS and documents_BS of packed rows."""
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    documents = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(positions), torch.stack(documents)


def drawn(seed: int, batch: int, seq_len: int) -> list[Tensor]:
    """Queries, keys, values, how much fades and how much is written, of two key heads and four value heads."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, seq_len, 2, 6, generator=generator) for _ in range(2))
    v = torch.randn(batch, seq_len, 4, 10, generator=generator)
    fading = -torch.rand(batch, seq_len, 4, generator=generator).square() * 3
    return [q, k, v, fading, torch.rand(batch, seq_len, 4, generator=generator)]


def assert_near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    error = (found.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max().clamp(min=1e-3), float(error)


@pytest.mark.parametrize("piece_bytes", [1, 2000, 1 << 20])
@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_chunks_are_the_rule_gated_delta_reference(chunk: int, piece_bytes: int) -> None:
    """Of packed documents, some of which end within a chunk or cross several; and every gradient."""
    positions_BS, documents_BS = places(LENGTHS)
    given_tensors = [each.requires_grad_() for each in drawn(1, *positions_BS.shape)]
    out = gated_delta(*given_tensors, Context(positions_BS, documents_BS), RuleSizes(chunk, piece_bytes))
    expected = gated_delta_reference(*given_tensors, positions_BS)
    assert_near(out, expected)
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(out, given_tensors, along)
    for mine, theirs in zip(found, torch.autograd.grad(expected, given_tensors, along.double()), strict=True):
        assert_near(mine, theirs.double())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 1000),
    steep=st.sampled_from([0.0, 1.0, 200.0]),
)
def test_any_documents_in_any_chunks(lengths: list[int], chunk: int, seed: int, steep: float) -> None:
    """Whether nothing fades, or a token leaves exp(-600) of what was: nothing overflows.

    Logarithms of what is left are summed over a chunk in fp32, and differ by as much as a sum's last place.
    """
    positions_BS, documents_BS = places([lengths])
    q, k, v, fading, writing = drawn(seed, *positions_BS.shape)
    given_tensors = (q, k, v, steep * fading, writing)
    out = gated_delta(*given_tensors, Context(positions_BS, documents_BS), RuleSizes(chunk))
    last_place = 2**-23 * steep * 3 * min(chunk, sum(lengths))
    assert_near(out, gated_delta_reference(*given_tensors, positions_BS), TOLERANCE + last_place)


def test_a_matrix_is_carried_on() -> None:
    positions_BS = torch.arange(50).expand(2, -1)
    tensors = drawn(3, 2, 50)
    whole, at_end = continued(None, *tensors, positions_BS, 8)
    state, parts = None, []
    for start, stop in ((0, 20), (20, 21), (21, 22), (22, 50)):
        here = [each[:, start:stop] for each in tensors]
        out, state = continued(state, *here, positions_BS[:, start:stop], 8)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(state, at_end, rtol=0.0, atol=1e-6)


def test_a_second_run_gives_the_same_gradients_bit_for_bit() -> None:
    def function(left: Tensor, right: Tensor, times: int) -> Tensor:
        return (left * right.exp()).tanh() * times

    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(5, 3, generator=generator, requires_grad=True) for _ in range(2)]
    outs = [function(*tensors, 3), rerun(function, *tensors, 3)]
    assert torch.equal(*outs)
    first, second = (torch.autograd.grad(out.square().sum(), tensors) for out in outs)
    assert all(map(torch.equal, first, second))
    (alone,) = torch.autograd.grad(rerun(function, tensors[0].detach(), tensors[1], 3).square().sum(), tensors[1:])
    assert torch.equal(alone, first[1])


def test_gradients_go_by_pieces_and_by_what_is_wanted() -> None:
    positions_BS, documents_BS = places(LENGTHS)
    context = Context(positions_BS, documents_BS)
    tensors = [each.requires_grad_() for each in drawn(4, *positions_BS.shape)]
    _, k, v, *_ = tensors
    n_pieces = [len(cuts_of(k, v, RuleSizes(8, n_bytes)).pieces) for n_bytes in (1, 2 * 4 * 20 * 8, 2 * 2 * 4 * 20 * 8)]
    assert n_pieces == [6, 6, 3]  # three rows of two key heads, each with two value heads
    whole = gated_delta(*tensors, context, RuleSizes(8))
    wanted = torch.autograd.grad(whole.square().sum(), tensors)
    for frozen in (0, 2, 4):
        given_tensors = [each.detach() if number == frozen else each for number, each in enumerate(tensors)]
        pieces = gated_delta(*given_tensors, context, RuleSizes(8, 1))
        kept = [each for number, each in enumerate(tensors) if number != frozen]
        found = torch.autograd.grad(pieces.square().sum(), kept)
        for mine, theirs in zip(found, [each for n, each in enumerate(wanted) if n != frozen], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    halves = [each.detach().bfloat16().requires_grad_() for each in tensors[:3]]
    found = torch.autograd.grad(gated_delta(*halves, *tensors[3:], context).float().square().sum(), halves)
    assert [each.dtype for each in found] == [torch.bfloat16] * 3


def test_vectors_without_length_have_gradients() -> None:
    """Of zeros, and of ones so short that what is added to their squared length decides: as in fp64, token by token."""
    positions_BS, documents_BS = places(LENGTHS)
    q, k, v, fading, writing = drawn(8, *positions_BS.shape)
    for each in (q, k):
        each[:, ::3] *= 1e-3
        each[:, ::5] = 0
    given_tensors = [each.requires_grad_() for each in (q, k, v, fading, writing)]
    out = gated_delta(*given_tensors, Context(positions_BS, documents_BS), RuleSizes(8))
    expected = gated_delta_reference(*given_tensors, positions_BS)
    found, wanted = (torch.autograd.grad(each.square().sum(), given_tensors) for each in (out, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        assert_near(mine, theirs.double())


def test_gradients_of_steep_fading_are_finite_and_right() -> None:
    """Where a token leaves exp(-600) of what was: to what a sum of such logarithms holds of its last place."""
    positions_BS, documents_BS = places(LENGTHS)
    q, k, v, fading, writing = drawn(6, *positions_BS.shape)
    given_tensors = [each.requires_grad_() for each in (q, k, v, 200 * fading, writing)]
    out = gated_delta(*given_tensors, Context(positions_BS, documents_BS), RuleSizes(16))
    expected = gated_delta_reference(*given_tensors, positions_BS)
    found, wanted = (torch.autograd.grad(each.square().sum(), given_tensors) for each in (out, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        assert_near(mine, theirs.double(), TOLERANCE + 2**-23 * 200 * 3 * 16)


@pytest.mark.parametrize(
    "way", [short_convolution, *(partial(by_channels, piece_bytes=each) for each in (1, 200, 4000))]
)
@pytest.mark.parametrize("size", [1, 2, 4, 7, 30])
def test_convolutions_stay_within_their_documents(size: int, way: Callable[..., Tensor]) -> None:
    """Of each document they are torch's own of it alone; so are their gradients."""
    positions_BS, _ = places(LENGTHS)
    generator = torch.Generator().manual_seed(5)
    inputs_BSX = torch.randn(*positions_BS.shape, 6, generator=generator, requires_grad=True)
    taps_XK = torch.randn(6, size, generator=generator, requires_grad=True)
    out_BSX = way(inputs_BSX, positions_BS, taps_XK)
    rows = []
    for number, lengths in enumerate(LENGTHS):
        parts = inputs_BSX[number].split(lengths)
        alone = [F.conv1d(F.pad(part.T, (size - 1, 0)), taps_XK[:, None], groups=6).T for part in parts]
        rows.append(F.silu(torch.cat(alone)))
    expected_BSX = torch.stack(rows)
    torch.testing.assert_close(out_BSX, expected_BSX, rtol=0.0, atol=1e-6)
    along = torch.randn(out_BSX.shape, generator=generator)
    found = torch.autograd.grad(out_BSX, (inputs_BSX, taps_XK), along)
    for mine, theirs in zip(found, torch.autograd.grad(expected_BSX, (inputs_BSX, taps_XK), along), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def layer() -> LinearAttention:
    """A layer with weights of some size."""
    found = LinearAttention(CONFIG, SMALL, 0)
    generator = torch.Generator().manual_seed(6)
    for weight in found.parameters():
        nn.init.normal_(weight.data, std=0.5, generator=generator)
    return found


def test_a_layer_with_a_cache_is_the_layer_without() -> None:
    """Token by token, and in parts shorter than what its convolutions see."""
    attention = layer()
    hidden_BSD = torch.randn(2, 30, 12, generator=torch.Generator().manual_seed(7))
    positions_BS = torch.arange(30).expand(2, -1)
    whole_BSD = attention(hidden_BSD, Context(positions_BS, torch.zeros_like(positions_BS)))
    cache, parts = LayerCache(), []
    bounds = [0, 1, 2, 13, 15, *range(16, 31)]
    with torch.no_grad():
        for start, stop in itertools.pairwise(bounds):
            here_BS = positions_BS[:, start:stop]
            parts.append(attention(hidden_BSD[:, start:stop], Context(here_BS, torch.zeros_like(here_BS)), cache))
    assert cache.length == 30
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_BSD, rtol=0.0, atol=1e-5)


def test_planted_documents_that_flow_into_each_other_are_seen() -> None:
    attention = layer()
    hidden_BSD = torch.randn(1, 20, 12, generator=torch.Generator().manual_seed(8))
    positions_BS, documents_BS = places([[9, 11]])
    apart_BSD = attention(hidden_BSD, Context(positions_BS, documents_BS))
    joined_BSD = attention(hidden_BSD, Context(torch.arange(20)[None], torch.zeros_like(documents_BS)))
    assert torch.equal(apart_BSD[:, :9], joined_BSD[:, :9])
    assert (apart_BSD[:, 9:] - joined_BSD[:, 9:]).abs().max() > 1e-2


def test_first_numbers_are_mambas_and_parts_of_them_are_the_wholes() -> None:
    """Rates from 0.01 to 16, steps from 0.001 to 0.1, taps up to 1 / sqrt(K); a rank draws its part."""
    config = replace(CONFIG, linear_attention=replace(SMALL, n_v_heads=400))
    rates = initial_tensor(config, 1, "layers.0.attention.log_rates.weight", (400,)).exp()
    assert 0.01 <= rates.min() < 0.5 and 15.5 < rates.max() <= 16.0
    steps = F.softplus(initial_tensor(config, 1, "layers.0.attention.step_biases.weight", (400,)))
    assert 0.00099 < steps.min() < 0.00105 and 0.095 < steps.max() < 0.10001
    assert 0.008 < steps.median() < 0.0125  # their logarithms go evenly
    taps = initial_tensor(config, 1, "layers.0.attention.v_taps.weight", (4000, 4))
    assert 0.49 < taps.abs().max() <= 0.5 and abs(taps.mean()) < 0.01
    part = initial_box(config, 1, "layers.0.attention.log_rates.weight", (100,), (50,), (400,))
    assert torch.equal(part.exp(), rates[100:150])


def test_weights_are_told_and_counted() -> None:
    """Projections are matrices, which decay, are made orthogonal and take 8 bits; what heads have is not."""
    config = replace(CONFIG, full_attention_layers=(1, 3), tie_embeddings=True)
    tensors = logical_tensors(config)
    own = {name.partition("attention.")[2]: each for name, each in tensors.items() if each.layer == 0}
    mixing = {name: each for name, each in own.items() if name.startswith(("in_", "out"))}
    matrices = {name for name, each in mixing.items() if each.weight.is_hidden_matrix}
    assert matrices == {f"{each}.weight" for each in ("in_q", "in_k", "in_v", "in_z", "in_a", "in_b", "out")}
    assert not any(own[f"{each}.weight"].weight.is_matrix for each in ("q_taps", "v_taps", "log_rates", "step_biases"))
    assert not own["in_a.weight"].weight.takes_8_bits and own["in_v.weight"].weight.takes_8_bits
    assert "layers.1.attention.q.weight" in tensors and "layers.2.attention.in_q.weight" in tensors
    linear = 12 * (2 * 12 + 2 * 40 + 2 * 4) + 40 * 12 + (12 + 12 + 40) * 4 + 2 * 4 + 10
    full = 4 * 12 * 12
    others = 4 * (3 * 12 * config.d_ff + 2 * 12) + config.vocab_size * 12 + 12
    assert count_parameters(config).total == 2 * linear + 2 * full + others
    plain = replace(config, linear_attention=None, full_attention_layers=())
    products = 2 * 2 * (12 * (2 * 12 + 2 * 40 + 2 * 4) + 40 * 12 - full) + 2 * 3 * 2 * 4 * 6 * 10
    scores = 2 * 2 * 2 * 64 * 12  # two layers' queries times keys, and weights times values, of 64 tokens
    assert forward_flops_per_token(config, 64) - forward_flops_per_token(plain, 64) == products - scores
    assert {dim: unit.count for dim, unit in units_of(config).items() if "linear" in dim} == {
        "linear_k_heads": 2, "linear_v_heads": 4, "per_linear_head": 4,
    }  # fmt: skip


def test_in_bf16_it_is_rounded_as_its_class_is() -> None:
    """What the convolutions put out is rounded, and the rule is computed in fp32 from there."""
    positions_BS, documents_BS = places(LENGTHS)
    tensors = drawn(9, *positions_BS.shape)
    halves = [each.bfloat16() for each in tensors[:3]]
    out = gated_delta(*halves, *tensors[3:], Context(positions_BS, documents_BS))
    assert out.dtype == torch.bfloat16
    exact = gated_delta_reference(*halves, *tensors[3:], positions_BS)
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()
    inputs = halves[0].flatten(2)
    taps_XK = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounded = short_convolution(inputs, positions_BS, taps_XK)
    assert rounded.dtype == torch.bfloat16
    wide = short_convolution(inputs.float(), positions_BS, taps_XK)
    assert torch.equal(rounded, wide.bfloat16())
    assert torch.equal(by_channels(inputs, positions_BS, taps_XK, piece_bytes=100), rounded)
    leaves = [inputs.clone().requires_grad_(), taps_XK.clone().requires_grad_()]
    ways = (
        (lambda x, taps: by_channels(x, positions_BS, taps, piece_bytes=100)),
        (lambda x, taps: short_convolution(x, positions_BS, taps)),
    )
    mine, theirs = (torch.autograd.grad(way(*leaves).sum(), leaves) for way in ways)
    for one, two in zip(mine, theirs, strict=True):
        assert one.dtype == torch.bfloat16 and (one - two).abs().max() <= 2**-6 * two.abs().max()
    config = Qwen3NextConfig(hidden_size=12, linear_value_head_dim=10)
    norm, ours = Qwen3NextRMSNormGated(10, eps=config.rms_norm_eps).bfloat16(), GatedNorm(10, config.rms_norm_eps)
    ours.weight = nn.Parameter(torch.nn.init.normal_(norm.weight))
    out, gate = (torch.randn(50, 10, generator=torch.Generator().manual_seed(2)).bfloat16() for _ in range(2))
    assert torch.equal(ours(out, gate), norm(out, gate))


def test_the_packages_kernels_get_documents_by_their_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for flash-linear-attention's function, with its arguments, which computes document by document."""

    seen: list[tuple[Tensor, Tensor]] = []

    def rule(
        *given: Tensor, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor
    ) -> tuple[Tensor, None]:
        q, k, v, g, beta = given
        assert use_qk_l2norm_in_kernel and cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64 and len(q) == 1
        seen.append((cu_seqlens, cu_seqlens_cpu))
        bounds = cu_seqlens_cpu.tolist()
        parts = []
        for start, stop in itertools.pairwise(bounds):
            here = [each[:, start:stop] for each in (q, k, v, g, beta)]
            parts.append(by_chunks(*here, torch.arange(stop - start)[None]))
        return torch.cat(parts, dim=1), None

    monkeypatch.setattr(fused_delta, "fused_rule", lambda: rule)
    positions_BS, documents_BS = places(LENGTHS)
    tensors, context = drawn(11, *positions_BS.shape), Context(positions_BS, documents_BS)
    expected = gated_delta(*tensors, context)
    for _ in range(2):
        torch.testing.assert_close(fused_delta.fused_delta(*tensors, context), expected, rtol=0.0, atol=1e-6)
    first, second = seen  # the package keeps its chunks by the very tensors that it is given
    assert first[0] is second[0] and first[1] is second[1]
    assert not fused_delta.takes_fused(tensors[2].bfloat16())  # no CUDA
    half, full = (cast(Tensor, SimpleNamespace(device=CUDA, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert fused_delta.takes_fused(half) and not fused_delta.takes_fused(full)  # no values, as in a plan
    monkeypatch.setattr(fused_delta, "fused_rule", lambda: None)
    assert fused_delta.takes_fused(half) is (torch.version.cuda is None)  # where a plan can tell, it does
    monkeypatch.setattr(fused_delta, "REAL", (SimpleNamespace,))
    assert not fused_delta.takes_fused(half)
    monkeypatch.setattr(fused_delta, "fused_rule", lambda: rule)
    assert fused_delta.takes_fused(half) and not fused_delta.takes_fused(full)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not fused_delta.takes_fused(half)


def test_no_operation_lacks_a_fixed_order_on_cuda() -> None:
    """Those that torch refuses there under train.deterministic: sums along a row, and writing into several places."""
    refused = {"aten.cumsum", "aten.put_", "aten._index_put_impl_", "aten.scatter_reduce", "aten.scatter_add_"}
    seen: set[str] = set()

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func.overloadpacket)
            if name != "aten.cumsum" or args[0].is_floating_point():  # of whole numbers each order gives the same
                seen.add(name)
            return func(*args, **(kwargs or {}))

    attention, (positions_BS, documents_BS) = layer(), places(LENGTHS)
    with Seeing():
        hidden_BSD = torch.randn(*positions_BS.shape, 12, requires_grad=True)
        attention(hidden_BSD, Context(positions_BS, documents_BS)).sum().backward()
    assert "aten.bmm" in seen and not seen & refused


def test_what_is_computed_again_belongs_to_the_layer() -> None:
    """An estimate's parts: the rule's backward pass makes nodes of its own, of which no module knows."""
    config = replace(CONFIG, full_attention_layers=(1, 3), vocab_size=32)
    model = build(config, 1)
    positions_BS, documents_BS = places(LENGTHS)
    tokens_BS = torch.randint(32, positions_BS.shape, generator=torch.Generator().manual_seed(3))
    with Regions().of(model) as regions, Recorder(regions, Axes()) as recorder:
        out = model(tokens_BS, Context(positions_BS, documents_BS), tokens_BS)
        out.loss.backward()
    found = Counter((op.part, op.work.name) for op in recorder.ops)
    solved = {part for part, name in found if name == "linalg_solve_triangular"}
    assert solved == {"linear attention: rest"}
    assert found["linear attention: rest", "exp"] and found["linear attention: products", "bmm"]
    assert not {name for part, name in found if part == "other"} & {"mul", "exp", "bmm", "sum", "clone"}


def test_a_broken_package_is_told_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import fails where triton is missing, say: torch's operations compute the same."""

    def fails(name: str) -> None:
        raise ImportError(f"{name}: no module named triton")

    monkeypatch.setattr(fused_delta, "version", lambda name: "0.6.0")
    monkeypatch.setattr(fused_delta.importlib, "import_module", fails)
    with pytest.warns(UserWarning, match="torch's operations: fla.ops.gated_delta_rule: no module named triton"):
        assert fused_delta.fused_rule.__wrapped__() is None
    monkeypatch.setattr(fused_delta, "version", lambda name: "0.5.2")
    with pytest.warns(UserWarning, match="version 0.5.2 is older than 0.6"):
        assert fused_delta.fused_rule.__wrapped__() is None


def test_a_plan_is_told_of_shapes_and_of_the_kernels_work() -> None:
    """Fake tensors through the rule's operators: shapes, dtypes and gradients as of real ones, and what is counted."""
    told: list[tuple[str, float, int]] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            work = work_of(func, args, kwargs or {}, out)
            if work is not None and "gated_delta" in work.name:
                told.append((work.name, work.flops, work.bytes))
            return out

    with FakeTensorMode():
        shapes = [(1, 128, 2, 6), (1, 128, 2, 6), (1, 128, 4, 10), (1, 128, 4), (1, 128, 4)]
        dtypes = [torch.bfloat16] * 3 + [torch.float32] * 2
        given = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        for each in given:
            each.requires_grad_()
        with Counting():
            out = fused_delta.told_alone(*given)
            grads = torch.autograd.grad(out, given, torch.empty_like(out))
    assert (out.shape, out.dtype) == (given[2].shape, torch.bfloat16)
    assert [(each.shape, each.dtype) for each in grads] == [(each.shape, each.dtype) for each in given]
    # Of a token and value head, of n = 64, C = 6, W = 10: forward 6 CW + n (6C + 4W), backward 16 CW + n (18C + 10W).
    forward, backward = 360 + 64 * 76, 960 + 64 * 208
    assert [(name, flops) for name, flops, _ in told] == [
        ("gated_delta", 128 * 4 * forward),
        ("gated_delta_backward", 128 * 4 * backward),
    ]
    moved = 2 * 128 * (4 * 2 * 6 + 4 * (6 * 6 + 6 * 10 + 64 + 2 * 60 / 64))
    assert told[0][2] == moved


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_run_without_the_kernels_says_so(monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    lines: list[str] = []
    run = RunConfig(model=CONFIG, train=TrainConfig(precision=precision))
    monkeypatch.setattr(linear, "fused_rule", lambda: None)
    linear.tell_of_missing_package(run, torch.device("cpu"), lines.append)
    linear.tell_of_missing_package(replace(run, train=replace(run.train, deterministic=True)), CUDA, lines.append)
    assert not lines
    linear.tell_of_missing_package(run, CUDA, lines.append)
    assert [line.partition(": steps")[0] for line in lines] == (
        ["model.linear_attention: package fla-core is not installed, or does not work"] if precision == "bf16" else []
    )
