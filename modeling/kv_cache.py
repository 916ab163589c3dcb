"""What generation keeps of earlier tokens: keys and values, or the latents from which these are expanded.

Linear attention keeps a state of fixed size instead, however many tokens there were.

Shape letters: B batch, S sequence (new tokens), P past and new tokens, H heads, G key-value heads, C d_head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.context import Context, attention_mask
from modeling.kernels.attention import masked_attention
from modeling.score_terms import NO_TERMS, ScoreTerms


@dataclass(frozen=True)
class Held:
    """What one layer's new queries attend to: the kept tensors of past and new tokens, and the tokens' positions."""

    kept: tuple[Tensor, ...]  # each (B, P, ...)
    positions_BP: Tensor
    documents_BP: Tensor

    def attend(
        self,
        q_BSHC: Tensor,
        k_BPGC: Tensor,
        v_BPGC: Tensor,
        context: Context,
        window: int | None,
        terms: ScoreTerms = NO_TERMS,
    ) -> Tensor:
        """The new queries' attention (B, S, H, C) over past and new tokens.

        It takes the place of ``Attention.core``.
        """
        mask_BSP = attention_mask(
            context.positions_BS, context.documents_BS, self.positions_BP, self.documents_BP, window
        )
        mask = terms.mask(mask_BSP, context.positions_BS, self.positions_BP)
        buckets_BSP = terms.buckets_of(context.positions_BS, self.positions_BP)
        return masked_attention(q_BSHC, k_BPGC, v_BPGC, mask, terms, buckets_BSP)


class LayerCache:
    """One layer's kept tensors for the tokens that a later query can see, with each token's position and document."""

    def __init__(self) -> None:
        self.held: Held | None = None
        self.carried: tuple[Tensor, ...] | None = None  # linear attention's state, which it keeps instead
        self.length = 0  # tokens seen, including those no longer held

    def extend(self, new: tuple[Tensor, ...], context: Context, window: int | None) -> Held:
        """The kept tensors of past tokens with ``new`` (each (B, S, ...)) appended, for this pass.

        For later passes all tokens are kept, or with a ``window`` the last window - 1: no later query sees more of
        them.
        """
        held = Held(new, context.positions_BS, context.documents_BS)
        if self.held is not None:
            held = joined(self.held, held)
        self.length += context.positions_BS.shape[1]
        self.held = held if window is None else last(held, window - 1)
        return held

    def carry(self, carried: tuple[Tensor, ...], n_tokens: int) -> None:
        """Stores linear attention's state after ``n_tokens`` more tokens."""
        self.carried, self.length = carried, self.length + n_tokens


def joined(past: Held, new: Held) -> Held:
    """The kept tensors of the past with the new ones appended."""
    kept = tuple(torch.cat(pair, dim=1) for pair in zip(past.kept, new.kept, strict=True))
    positions_BP = torch.cat([past.positions_BP, new.positions_BP], dim=1)
    return Held(kept, positions_BP, torch.cat([past.documents_BP, new.documents_BP], dim=1))


def last(held: Held, count: int) -> Held:
    """The last ``count`` tokens of ``held``, in memory of their own, so that the memory of the others is freed."""
    first = held.positions_BP.shape[1] - count
    if first <= 0:
        return held
    kept = tuple(tensor[:, first:].clone() for tensor in held.kept)
    return Held(kept, held.positions_BP[:, first:].clone(), held.documents_BP[:, first:].clone())


class KVCache:
    """The caches of all layers, for one batch of sequences."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """The number of tokens seen of each sequence."""
        return self.layers[0].length
