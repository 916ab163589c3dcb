"""Attention over packed documents on one device: causal within each document, optionally within a sliding window.

Shape letters: B batch, S keys, Q queries, H heads, G key-value heads, C d_head.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import current_flash_attention_impl

from modeling.context import Context
from modeling.kernels.sink_attention import sink_attention
from modeling.kernels.slope_channels import fits_slopes, with_slopes
from modeling.kernels.terms import Bands, RowPairs, Whole, term_attention
from modeling.kernels.varlen import fits_flash, fits_pieces
from modeling.kernels.widths import FLASH_UNIT, widened
from modeling.pieces import QUERY_BLOCK, query_pieces
from modeling.score_terms import NO_TERMS, ScoreTerms

ROW_CHANNELS = 128  # of a head, at most, in cuDNN's kernel for whole rows; a head has whole FLASH_UNITs there
# Tokens. That kernel is used only for lengths that are a multiple of this: it builds a graph for each length of rows,
# and evaluation has hundreds of lengths.
ROW_MULTIPLE = 128
ROW_SCORES = 2**26  # scores at once: 256 MiB in fp32, about six of which exist in the backward pass
ROW_UNIT = 128  # queries
ROW_GENERATIONS = (9, 10)  # of compute capability: Hopper and Blackwell in data centers


def attend(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    context: Context,
    window: int | None,
    terms: ScoreTerms = NO_TERMS,
    *,
    block: int = QUERY_BLOCK,
) -> Tensor:
    """Attention's output (B, S, H, C), by the fastest kernel for the device, the dtype and the scores' ``terms``.

    - On a CPU each document is attended to by itself, in pieces of at most ``block`` queries.
    - CUDA in half precision takes variable-length FlashAttention, for heads of up to ``FLASH_CHANNELS``; and since
      Hopper cuDNN's kernel where each row is one document (``fits_rows``). Sinks are added through FlashAttention's
      log-sum-exp, and ALiBi's slopes as further channels (``with_slopes``).
    - Everything else takes ``masked_attention``. Its mask of B * S * S numbers is made once for all layers of one
      window. Terms that need the plain formula make fp32 scores in each layer; where these would be more than
      ``ROW_SCORES``, rows are cut into pieces, which need no mask of a whole row and leave out keys that none of a
      piece's queries sees.
    """
    if q_BSHC.is_cpu:
        return document_attention(q_BSHC, k_BSGC, v_BSGC, context, window, terms, block)
    if terms.sinks_H is not None and fits_pieces(terms) and fits_flash(q_BSHC):
        return sink_attention(q_BSHC, k_BSGC, v_BSGC, context, window, terms.sinks_H)
    if terms.is_plain and fits_flash(q_BSHC):
        return plain_attention(q_BSHC, k_BSGC, v_BSGC, context, window)
    has_slopes_alone = terms._replace(alibi=None).is_plain
    if terms.alibi is not None and has_slopes_alone and fits_flash(q_BSHC) and fits_slopes(q_BSHC):
        scale, n_channels = q_BSHC.shape[-1] ** -0.5, v_BSGC.shape[-1]
        channels = context.slope_channels(terms.alibi, q_BSHC.shape[-1], q_BSHC.dtype)
        q_BSHC, k_BSGC = with_slopes(q_BSHC, k_BSGC, channels)
        wide_BSGC = widened(v_BSGC, q_BSHC.shape[-1])
        return plain_attention(q_BSHC, k_BSGC, wide_BSGC, context, window, scale)[..., :n_channels]
    takes_formula = terms.sinks_H is not None or terms.needs_formula
    block = row_block(q_BSHC, q_BSHC.shape[1])
    if takes_formula and block < q_BSHC.shape[1]:
        return row_formula(q_BSHC, k_BSGC, v_BSGC, context, window, terms, block)
    mask = context.mask_BSS(window) if terms.alibi is None else context.mask_BHSS(window, terms.alibi)
    buckets_BSS = None if terms.buckets is None else context.buckets_BSS(terms.buckets)
    return masked_attention(q_BSHC, k_BSGC, v_BSGC, mask, terms, buckets_BSS)


def plain_attention(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, context: Context, window: int | None, scale: float | None = None
) -> Tensor:
    """Attention's output (B, S, H, C) on CUDA in half precision, where nothing is done to scores but scaling."""
    sees_all = window is None or window >= q_BSHC.shape[1]
    if sees_all and context.rows_are_documents and fits_rows(q_BSHC, v_BSGC):
        return row_attention(q_BSHC, k_BSGC, v_BSGC, scale)
    return varlen_attention(q_BSHC, k_BSGC, v_BSGC, context, window, scale)


def document_attention(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    context: Context,
    window: int | None,
    terms: ScoreTerms = NO_TERMS,
    block: int = QUERY_BLOCK,
) -> Tensor:
    """Attention's output (B, S, H, C), piece by piece of each document, so that its cost is that of the documents.

    Padding attends to the padding before it; its output is not used.
    """
    band = context.band(window, block, terms.alibi, terms.buckets)
    wide_BSGC = widened(v_BSGC, k_BSGC.shape[-1])
    out_BSHC = term_attention(q_BSHC, k_BSGC, wide_BSGC, context.document_pieces(window, block), terms, Bands(*band))
    return out_BSHC[..., : v_BSGC.shape[-1]]


def row_block(q_BQHC: Tensor, n_keys: int) -> int:
    """The number of queries in one piece of rows: at most ROW_SCORES scores, in whole ROW_UNITs, at least one unit."""
    batch, _, n_heads, _ = q_BQHC.shape
    return max(ROW_UNIT, ROW_SCORES // (batch * n_heads * n_keys) // ROW_UNIT * ROW_UNIT)


def row_formula(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    context: Context,
    window: int | None,
    terms: ScoreTerms,
    block: int,
) -> Tensor:
    """Attention's output (B, S, H, C) by the plain formula, in pieces of all rows with at most ``block`` queries."""
    wide_BSGC = widened(v_BSGC, k_BSGC.shape[-1])
    pieces, pairs = context.row_pieces(window, block), RowPairs(context, window, terms)
    return term_attention(q_BSHC, k_BSGC, wide_BSGC, pieces, terms, pairs)[..., : v_BSGC.shape[-1]]


def masked_attention(
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    mask: Tensor,
    terms: ScoreTerms = NO_TERMS,
    buckets_BQS: Tensor | None = None,
) -> Tensor:
    """Attention's output (B, Q, H, C) to the keys that ``mask`` shows, and to the sinks where there are any.

    ``mask`` is bool (B, Q, S), or fp32 (B, H, Q, S), added to the scores, -inf where a key is hidden, and including the
    slopes of ``terms``. ``buckets_BQS`` are the buckets of these pairs' distances (``terms.buckets_of``).
    """
    if terms.sinks_H is not None or terms.needs_formula:
        wide_BSGC = widened(v_BSGC, k_BSGC.shape[-1])
        n_queries, n_keys = mask.shape[-2:]
        pieces = query_pieces(len(mask), n_queries, n_keys, row_block(q_BQHC, n_keys))
        pairs = Whole(mask, buckets_BQS)
        return term_attention(q_BQHC, k_BSGC, wide_BSGC, pieces, terms, pairs)[..., : v_BSGC.shape[-1]]
    groups = q_BQHC.shape[2] // k_BSGC.shape[2]
    if groups > 1:
        k_BSGC, v_BSGC = (heads.repeat_interleave(groups, dim=2) for heads in (k_BSGC, v_BSGC))
    q_BHQC, k_BHSC, v_BHSC = (heads.transpose(1, 2) for heads in (q_BQHC, k_BSGC, v_BSGC))
    mask_BHQS = mask[:, None] if mask.dtype == torch.bool else mask.to(q_BQHC.dtype) if mask.is_cuda else mask
    return F.scaled_dot_product_attention(q_BHQC, k_BHSC, v_BHSC, attn_mask=mask_BHQS).transpose(1, 2)


def fits_rows(q_BSHC: Tensor, v_BSGC: Tensor) -> bool:
    """Whether to use cuDNN's kernel for whole rows: it takes these heads and rows on this GPU, and is wanted.

    On an H200 (torch 2.11, cuDNN 9.19, one row of 8,192 tokens, 32 heads of 128 channels) it reached 589 and 481
    TFLOP/s forward and backward, FlashAttention 2 313 and 284. It is not wanted where results must be deterministic,
    since its backward pass sums in an order that varies, nor where the user has replaced torch's own FlashAttention by
    another.
    """
    seq_len, width = q_BSHC.shape[1], q_BSHC.shape[-1]
    knows = width == v_BSGC.shape[-1] and width <= ROW_CHANNELS and width % FLASH_UNIT == 0
    knows = knows and seq_len % ROW_MULTIPLE == 0
    is_unwanted = torch.are_deterministic_algorithms_enabled() or current_flash_attention_impl() is not None
    return knows and not is_unwanted and has_fast_rows(q_BSHC.device)


@functools.cache
def has_fast_rows(device: torch.device) -> bool:
    """Whether there are cuDNN and a GPU whose tensor cores FlashAttention 2 does not fully use.

    True without CUDA, where only fake tensors come here.
    """
    if not torch.cuda.is_available():
        return True
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device)[0] in ROW_GENERATIONS


def row_attention(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, scale: float | None = None) -> Tensor:
    """Attention's output (B, S, H, C) where each row is one document, by cuDNN (CUDA, bf16 or fp16).

    It calls the operator below torch's scaled_dot_product_attention, whose choice of backends is a setting of the whole
    process.
    """
    q_BHSC, k_BGSC, v_BGSC = (heads.transpose(1, 2) for heads in (q_BSHC, k_BSGC, v_BSGC))
    out_BHSC, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BHSC, k_BGSC, v_BGSC, None, torch.is_grad_enabled(), 0.0, True, False, scale=scale_of(q_BSHC, scale)
    )
    return out_BHSC.transpose(1, 2)


def varlen_attention(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, context: Context, window: int | None, scale: float | None = None
) -> Tensor:
    """Attention's output by FlashAttention over the documents' boundaries (CUDA, bf16 or fp16).

    Heads are filled up with zeros to whole units of FLASH_UNIT channels, which changes no score.
    """
    varlen_attn, options = varlen_kernel(grouped=q_BSHC.shape[2] != k_BSGC.shape[2])
    n_channels, scale = v_BSGC.shape[-1], scale_of(q_BSHC, scale)
    width = -(-q_BSHC.shape[-1] // FLASH_UNIT) * FLASH_UNIT
    q_BSHC, k_BSGC, v_BSGC = (widened(heads, width) for heads in (q_BSHC, k_BSGC, v_BSGC))

    boundaries, longest = context.cu_seqlens
    left = -1 if window is None else window - 1
    out_THC = varlen_attn(
        q_BSHC.flatten(0, 1),
        k_BSGC.flatten(0, 1),
        v_BSGC.flatten(0, 1),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
        **options,
    )
    return out_THC.view_as(q_BSHC)[..., :n_channels]


def scale_of(q_BSHC: Tensor, scale: float | None) -> float:
    """The factor of the products of queries and keys: ``scale``, or else the queries' width to the power of -1/2."""
    return q_BSHC.shape[-1] ** -0.5 if scale is None else scale


def varlen_kernel(*, grouped: bool) -> tuple[Callable[..., Tensor], dict[str, bool]]:
    """The variable-length attention of torch, and the options with which it takes ``grouped`` key-value heads.

    From torch 2.12 on grouped heads need an option, which 2.11 does not have.
    """
    from torch.nn.attention import varlen

    kernel: Any = varlen.varlen_attn
    told = "enable_gqa" in inspect.signature(kernel).parameters
    return kernel, {"enable_gqa": grouped} if told else {}
