"""Keys and values of the tokens already seen, for generation.

Shape letters: B batch, S sequence (new tokens), P past and new tokens, H heads, G key-value heads, C d_head.
"""

import torch
from torch import Tensor

from modeling.context import Context, attention_mask
from modeling.kernels.attention import masked_attention
from modeling.score_terms import NO_TERMS, ScoreTerms


class LayerCache:
    """One layer's keys and values, with the position and document of each."""

    def __init__(self) -> None:
        self.entries: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def attend(
        self,
        q_BSHC: Tensor,
        k_BSGC: Tensor,
        v_BSGC: Tensor,
        context: Context,
        window: int | None,
        terms: ScoreTerms = NO_TERMS,
    ) -> Tensor:
        """Appends the new keys and values, and returns the new queries' attention over all of them (B, S, H, C)."""
        new = [k_BSGC, v_BSGC, context.positions_BS, context.documents_BS]
        if self.entries is not None:
            new = [torch.cat([old, entry], dim=1) for old, entry in zip(self.entries, new, strict=True)]
        k_BPGC, v_BPGC, positions_BP, documents_BP = new
        self.entries = (k_BPGC, v_BPGC, positions_BP, documents_BP)
        mask_BSP = attention_mask(context.positions_BS, context.documents_BS, positions_BP, documents_BP, window)
        mask = terms.mask(mask_BSP, context.positions_BS, positions_BP)
        return masked_attention(q_BSHC, k_BPGC, v_BPGC, mask, terms.sinks_H)


class KVCache:
    """The caches of all layers, and the number of tokens they hold."""

    def __init__(self, n_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Tokens held for each sequence."""
        entries = self.layers[0].entries
        return 0 if entries is None else entries[0].shape[1]
