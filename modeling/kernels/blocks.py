"""Attention of queries to one block of keys, with the log-sum-exp by which blocks are merged; forward and backward.

Shape letters: B batch, Q queries, S keys, H heads, G key-value heads, R heads that share one of them (H / G), C d_head.
"""

import torch
from torch import Tensor


def attend_block(
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    mask: Tensor | None,
    cap: float | None = None,
    factors_BHQS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The queries' attention to this block alone, out_BQHC, and the log of its normalizer, lse_BHQ (fp32).

    ``mask`` says which keys each query sees: bool (B, Q, S), or fp32 (B, H, Q, S), which is added to the scores and is
    -inf where a key is hidden (1 instead of B or H: for all); None: all. A query that sees no key gets zeros and -inf.

    On a CPU this is torch's flash kernel, and the output has the queries' dtype. Elsewhere, or where scores are capped
    or weights multiplied by ``factors_BHQS`` (dropout), it is the plain formula, in fp32. The normalizer is that of the
    weights before dropout.
    """
    if q_BQHC.is_cpu and cap is None and factors_BHQS is None:
        return _attend_flash(q_BQHC, k_BSGC, v_BSGC, mask)
    return attend_plain(q_BQHC, k_BSGC, v_BSGC, mask, cap, factors_BHQS)


def attend_block_backward(
    grad_BQHC: Tensor,
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    out_BQHC: Tensor,
    lse_BHQ: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's contributions to (dq_BQHC, dk_BSGC, dv_BSGC), in the dtype that the kernel returns.

    ``out_BQHC`` (the queries' dtype) and ``lse_BHQ`` (fp32, finite) are those of the queries' attention to all their
    keys, not of this block: exp(score - lse) is then the true weight of a key (FlashAttention-2, arXiv:2307.08691,
    section 3.1).
    """
    backward = _attend_flash_backward if q_BQHC.is_cpu else attend_plain_backward
    return backward(grad_BQHC, q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, mask)


def _attend_flash(q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    q_BHQC, k_BGSC, v_BGSC = (heads.transpose(1, 2) for heads in (q_BQHC, k_BSGC, v_BSGC))
    out_BHQC, lse_BHQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHQC, k_BGSC, v_BGSC, attn_mask=None if mask is None else additive(mask, q_BQHC.dtype)
    )
    if mask is not None:  # the kernel returns 0 where a query sees no key
        lse_BHQ = lse_BHQ.masked_fill(_sees_nothing(mask), float("-inf"))
    return out_BHQC.transpose(1, 2), lse_BHQ


def _attend_flash_backward(
    grad_BQHC: Tensor,
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    out_BQHC: Tensor,
    lse_BHQ: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_BHQC, q_BHQC, k_BGSC, v_BGSC, out_BHQC = (
        heads.transpose(1, 2) for heads in (grad_BQHC, q_BQHC, k_BSGC, v_BSGC, out_BQHC)
    )
    mask_BHQS = None if mask is None else additive(mask, q_BQHC.dtype)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_BHQC, q_BHQC, k_BGSC, v_BGSC, out_BHQC, lse_BHQ, 0.0, False, attn_mask=mask_BHQS
    )
    dq_BQHC, dk_BSGC, dv_BSGC = (grad.transpose(1, 2) for grad in grads)
    return dq_BQHC, dk_BSGC, dv_BSGC


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as kernels on a CPU take it: (B, 1 or H, Q, S), added to the scores, -inf where a key is hidden."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))[:, None]


def _sees_nothing(mask: Tensor) -> Tensor:
    """Which queries see no key: bool (B, 1 or H, Q)."""
    return ~mask.any(-1)[:, None] if mask.dtype == torch.bool else mask.isneginf().all(-1)


def attend_plain(
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    mask: Tensor | None,
    cap: float | None = None,
    factors_BHQS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``attend_block`` by the plain formula, in fp32 whatever the dtype.

    Only on CUDA in 16 bits the factors of products keep 16 bits: tensor cores multiply rounded weights and sum in fp32,
    as FlashAttention does.
    """
    scores_BGRQS = _seen(_scores(q_BQHC, k_BSGC, cap), mask)
    lse_BGRQ = scores_BGRQS.logsumexp(-1)
    weights_BGRQS = torch.exp(scores_BGRQS - lse_BGRQ.masked_fill(lse_BGRQ.isneginf(), 0)[..., None])
    if factors_BHQS is not None:
        weights_BGRQS *= factors_BHQS.unflatten(1, weights_BGRQS.shape[1:3])
    out_BGRQC = _by_keys(weights_BGRQS, v_BSGC)
    return _in_rows(out_BGRQC), lse_BGRQ.flatten(1, 2)


def attend_plain_backward(
    grad_BQHC: Tensor,
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    out_BQHC: Tensor,
    lse_BHQ: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_block_backward`` by the plain formula, in the precision of ``attend_plain``."""
    return attend_scored_backward(grad_BQHC, q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, mask)[:3]


def attend_scored_backward(
    grad_BQHC: Tensor,
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    out_BQHC: Tensor,
    lse_BHQ: Tensor,
    mask: Tensor | None,
    cap: float | None = None,
    factors_BHQS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq_BQHC, dk_BSGC, dv_BSGC, dscores_BHQS), fp32. The last is the gradient by the scores after the cap.

    Where ``factors_BHQS`` multiplied the weights (dropout), the gradient by a weight is multiplied by its factor too.
    The mean over all keys that is subtracted from it is, as without dropout, computed from the output, which has the
    factors in it.
    """
    n_kv_heads = k_BSGC.shape[2]
    grad_BGRQC, out_BGRQC = (_by_group(heads, n_kv_heads) for heads in (grad_BQHC, out_BQHC))
    scores_BGRQS = _scores(q_BQHC, k_BSGC, cap)
    weights_BGRQS = torch.exp(_seen(scores_BGRQS, mask) - lse_BHQ.unflatten(1, (n_kv_heads, -1))[..., None])
    dweights_BGRQS = _with_keys(grad_BQHC, v_BSGC)
    multiplied_BGRQS = weights_BGRQS
    if factors_BHQS is not None:
        factors_BGRQS = factors_BHQS.unflatten(1, weights_BGRQS.shape[1:3])
        multiplied_BGRQS = weights_BGRQS * factors_BGRQS
        dweights_BGRQS *= factors_BGRQS
    dv_BSGC = _over_queries(multiplied_BGRQS, grad_BQHC)
    mean_BGRQ = (grad_BGRQC.float() * out_BGRQC.float()).sum(-1)
    dscores_BGRQS = weights_BGRQS * (dweights_BGRQS - mean_BGRQ[..., None])
    slopes_BGRQS = dscores_BGRQS if cap is None else dscores_BGRQS * (1 - (scores_BGRQS / cap).square())
    slopes_BGRQS = slopes_BGRQS * q_BQHC.shape[-1] ** -0.5
    dq_BGRQC, dk_BSGC = _by_keys(slopes_BGRQS, k_BSGC), _over_queries(slopes_BGRQS, q_BQHC)
    return _in_rows(dq_BGRQC), dk_BSGC, dv_BSGC, dscores_BGRQS.flatten(1, 2)


def _scores(q_BQHC: Tensor, k_BSGC: Tensor, cap: float | None) -> Tensor:
    """The fp32 scores (B, G, R, Q, S) of all pairs, capped if there is a cap."""
    scores_BGRQS = _with_keys(q_BQHC, k_BSGC).mul_(q_BQHC.shape[-1] ** -0.5)
    return scores_BGRQS if cap is None else scores_BGRQS.div_(cap).tanh_().mul_(cap)


def _with_keys(heads_BQHC: Tensor, keys_BSGC: Tensor) -> Tensor:
    """Each query's product with each key of its group (B, G, R, Q, S), fp32."""
    heads_BGRQC = _by_group(heads_BQHC, keys_BSGC.shape[2])
    found_NPS = _product(heads_BGRQC.flatten(2, 3).flatten(0, 1), keys_BSGC.permute(0, 2, 3, 1).flatten(0, 1))
    return found_NPS.view(*heads_BGRQC.shape[:-1], -1)


def _by_keys(weights_BGRQS: Tensor, keys_BSGC: Tensor) -> Tensor:
    """The keys, or values, summed by each query's weights (B, G, R, Q, C), fp32."""
    weights_NPS = _as_factor(weights_BGRQS, keys_BSGC).flatten(2, 3).flatten(0, 1)
    found_NPC = _product(weights_NPS, keys_BSGC.transpose(1, 2).flatten(0, 1))
    return found_NPC.view(*weights_BGRQS.shape[:-1], -1)


def _over_queries(weights_BGRQS: Tensor, heads_BQHC: Tensor) -> Tensor:
    """For each key, the sum over all queries of its group, times their weights for it (B, S, G, C), fp32."""
    batch, n_kv_heads = weights_BGRQS.shape[:2]
    weights_NPS = _as_factor(weights_BGRQS, heads_BQHC).flatten(2, 3).flatten(0, 1)
    heads_NPC = _by_group(heads_BQHC, n_kv_heads).flatten(2, 3).flatten(0, 1)
    return _product(weights_NPS.mT, heads_NPC).view(batch, n_kv_heads, -1, heads_NPC.shape[-1]).transpose(1, 2)


def _by_group(heads_BQHC: Tensor, n_kv_heads: int) -> Tensor:
    """heads_BQHC -> heads_BGRQC: the R query heads of each of G key-value heads."""
    return heads_BQHC.unflatten(2, (n_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _in_rows(heads_BGRQC: Tensor) -> Tensor:
    """heads_BGRQC -> heads_BQHC."""
    return heads_BGRQC.flatten(1, 2).transpose(1, 2)


def _as_factor(weights: Tensor, other: Tensor) -> Tensor:
    """fp32 weights in the dtype in which they are multiplied with ``other``: its own on CUDA."""
    return weights.to(other.dtype) if other.is_cuda else weights


def _product(left_NIJ: Tensor, right_NJK: Tensor) -> Tensor:
    """The products (N, I, K), summed in fp32."""
    if left_NIJ.is_cuda and left_NIJ.dtype == right_NJK.dtype != torch.float32:
        return torch.bmm(left_NIJ, right_NJK, out_dtype=torch.float32)
    return torch.bmm(left_NIJ.float(), right_NJK.float())


def _seen(scores_BGRQS: Tensor, mask: Tensor | None) -> Tensor:
    """The scores plus the mask; -inf where a key is hidden."""
    if mask is None:
        return scores_BGRQS
    if mask.dtype == torch.bool:
        return scores_BGRQS.masked_fill(~mask[:, None, None], float("-inf"))
    return scores_BGRQS + (mask[:, None] if mask.shape[1] == 1 else mask.unflatten(1, scores_BGRQS.shape[1:3]))
