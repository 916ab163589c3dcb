"""Blocks of keys: the kernels against each other and against attention to all keys at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modeling.context import Context
from modeling.kernels.attention import masked_attention, varlen_attention, varlen_kernel
from modeling.kernels.blocks import attend_block, attend_block_backward, attend_plain, attend_plain_backward
from parallel.context_parallel.ring import merge

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def heads(n_queries: int, n_keys: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """grad, q, k, v."""
    torch.manual_seed(n_queries * 100 + n_keys)
    shapes = [(2, n_queries, 6, 8), (2, n_queries, 6, 8), (2, n_keys, 2, 8), (2, n_keys, 2, 8)]
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def some_mask(n_queries: int, n_keys: int) -> Tensor:
    """Half of the keys seen; one query sees none."""
    mask_BQS = torch.rand(2, n_queries, n_keys, generator=torch.Generator().manual_seed(0)) < 0.5
    mask_BQS[0, n_queries // 2] = False
    return mask_BQS


def close(ours: Tensor, theirs: Tensor, bound: float) -> bool:
    """Within ``bound`` of the second one's norm; infinities must lie at the same places."""
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    if not torch.equal(ours.isinf(), theirs.isinf()):
        return False
    ours, theirs = (tensor.masked_fill(tensor.isinf(), 0) for tensor in (ours, theirs))
    return float((ours - theirs).norm()) <= bound * float(theirs.norm())


def masks(kind: str, n_queries: int, n_keys: int) -> Tensor | None:
    """None, a bool mask, or one that is added to each of six heads' scores."""
    match kind:
        case "none":
            return None
        case "seen":
            return some_mask(n_queries, n_keys)
        case _:
            added_BHQS = torch.randn(2, 6, n_queries, n_keys, generator=torch.Generator().manual_seed(1))
            return added_BHQS.masked_fill(~some_mask(n_queries, n_keys)[:, None], float("-inf"))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["none", "seen", "added"])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (5, 9), (33, 70), (600, 40)])
def test_flash_equals_plain(n_queries: int, n_keys: int, kind: str, dtype: torch.dtype) -> None:
    grad, q, k, v = heads(n_queries, n_keys, dtype)
    mask = masks(kind, n_queries, n_keys)
    bound = TOLERANCES[dtype]
    flash, plain = attend_block(q, k, v, mask), attend_plain(q, k, v, mask)
    assert all(close(ours, theirs, bound) for ours, theirs in zip(flash, plain, strict=True))
    # Of attention to more keys than these. With one key, this block's own output would make the scores' gradients zero,
    # and both sides rounding noise.
    out, lse = (plain[0] + torch.randn_like(plain[0])).to(dtype), torch.randn_like(plain[1]) + 4
    gradients = (backward(grad, q, k, v, out, lse, mask) for backward in (attend_block_backward, attend_plain_backward))
    assert all(close(ours, theirs, bound) for ours, theirs in zip(*gradients, strict=True))


@pytest.mark.parametrize("kernels", [(attend_block, attend_block_backward), (attend_plain, attend_plain_backward)])
def test_blocks_merge_to_the_whole(kernels: tuple) -> None:
    """Three blocks of keys, forward and backward, as attention to all of them."""
    attend, backward = kernels
    grad, q, k, v = heads(12, 30)
    mask = some_mask(12, 30)
    mask[:, :, 0] = True
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    whole = masked_attention(q, k, v, mask)
    exact = torch.autograd.grad(whole, [q, k, v], grad)
    with torch.no_grad():
        out, lse = torch.zeros_like(q), torch.full((2, 6, 12), float("-inf"), dtype=torch.float64)
        parts = [slice(0, 7), slice(7, 8), slice(8, 30)]
        for keys in parts:
            merge(out, lse, *attend(q, k[:, keys], v[:, keys], mask[:, :, keys]))
        assert close(out, whole.detach(), 1e-6)
        blocks = [backward(grad, q, k[:, keys], v[:, keys], out, lse.float(), mask[:, :, keys]) for keys in parts]
    assert close(sum(block[0] for block in blocks), exact[0], 1e-6)
    assert close(torch.cat([block[1] for block in blocks], 1), exact[1], 1e-6)
    assert close(torch.cat([block[2] for block in blocks], 1), exact[2], 1e-6)


@given(st.lists(st.tuples(st.floats(-80, 80) | st.just(float("-inf")), st.floats(-5, 5)), min_size=1, max_size=6))
def test_merge_is_a_weighted_mean(blocks: list[tuple[float, float]]) -> None:
    """Of blocks with any normalizers, the first one's finite; 1e-5: exp of a rounded difference of 160."""
    blocks[0] = (max(blocks[0][0], -80.0), blocks[0][1])
    out, lse = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), float("-inf"), dtype=torch.float64)
    for block_lse, value in blocks:
        merge(out, lse, torch.full((1, 1, 1, 1), value), torch.full((1, 1, 1), block_lse))
    lses, values = (torch.tensor(column, dtype=torch.float64) for column in zip(*blocks, strict=True))
    torch.testing.assert_close(out.double().flatten()[0], (lses.softmax(0) * values).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double().flatten()[0], lses.logsumexp(0), rtol=1e-5, atol=1e-5)


def test_many_merges_lose_nothing() -> None:
    """256 blocks: the weights' error stays that of one rounding of a log-sum-exp near 10 (ulp 9.5e-7)."""
    torch.manual_seed(0)
    lses, values = torch.randn(256, 1, 1, 1000) + 5, torch.randn(256, 1, 1000, 1, 1)
    out, lse = torch.zeros(1, 1000, 1, 1), torch.full((1, 1, 1000), float("-inf"), dtype=torch.float64)
    for value, block_lse in zip(values, lses, strict=True):
        merge(out, lse, value, block_lse)
    exact = lses.double().logsumexp(0)
    assert float((lse - exact).abs().max()) < 1e-7
    weights = (lses.double() - exact).exp().transpose(2, 3)[..., None]
    assert close(out, (weights.reshape(values.shape) * values.double()).sum(0), 1e-6)


@pytest.mark.parametrize(("knows", "options"), [(True, {"enable_gqa": True}), (False, {})])
def test_flash_attention_is_told_of_grouped_heads_where_it_asks(monkeypatch, knows, options):
    """As in torch 2.12 and later, and as in 2.11, which would raise TypeError in every step."""

    def later(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        return query

    def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", later if knows else of_2_11)
    assert varlen_kernel(grouped=True)[1] == options
    rows = torch.randn(1, 6, 4, 12), torch.randn(1, 6, 2, 12), torch.randn(1, 6, 2, 10)
    context = Context(torch.arange(6)[None], torch.zeros(1, 6, dtype=torch.int64))
    out_BSHC = varlen_attention(*rows, context, None)
    assert out_BSHC.shape == (1, 6, 4, 10)  # heads of 12 channels, filled up to 16, and cut to the values' width


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["none", "seen", "added"])
def test_blocks_on_cuda(kind: str, dtype: torch.dtype) -> None:
    """The same numbers as on the CPU (TF32 is off by default)."""
    on_cpu, on_cuda = heads(33, 70, dtype), heads(33, 70, dtype, "cuda")
    mask = masks(kind, 33, 70)
    cuda_mask = None if mask is None else mask.cuda()
    plain = attend_plain(*on_cpu[1:], mask)
    assert all(
        close(ours, theirs, TOLERANCES[dtype])
        for ours, theirs in zip(attend_block(*on_cuda[1:], cuda_mask), plain, strict=True)
    )
    out, lse = plain[0].to(dtype), torch.randn_like(plain[1]) + 4
    ours = attend_block_backward(*on_cuda, out.cuda(), lse.cuda(), cuda_mask)
    theirs = attend_plain_backward(*on_cpu, out, lse, mask)
    assert all(close(mine, other, TOLERANCES[dtype]) for mine, other in zip(ours, theirs, strict=True))
