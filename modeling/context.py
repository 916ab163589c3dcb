"""What every layer may look at besides its hidden states: where documents lie, and how auxiliary losses weigh.

Shape letters: B batch, S sequence, Q queries, T tokens, K top_k.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from modeling.dropout import Draws
from modeling.rope import Rotary
from modeling.score_terms import Alibi, Buckets

PADDING = -1  # the document number of a position that holds no token


@dataclass
class Context:
    """One forward pass's surroundings; one object for each micro-batch.

    ``balance_scale`` and ``z_scale`` are what one sequence's balance loss and one token's z-loss weigh in the total
    that is differentiated, before their coefficients: 1 / sequences of the batch and 1 / tokens of the batch, times
    whatever the loss itself is multiplied by (loss scale, dp). ``choices`` holds experts that routers take instead of
    choosing, by layer: to replay somebody else's choices. A pass writes nothing into its context but what is cached.
    """

    positions_BS: Tensor  # int, restarting at each document
    documents_BS: Tensor  # int, the number of the document within the row; PADDING where there is no token
    balance_scale: float | Tensor = 0.0
    z_scale: float | Tensor = 0.0
    has_padding: bool = False
    part: "Context | None" = None  # of the positions that this rank holds between layers, where it holds fewer there
    choices: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> indices_TK
    draws: Draws | None = None  # what dropout's masks follow from; None: nothing is dropped, as outside training

    @property
    def between_layers(self) -> "Context":
        """The context of the positions that this rank holds between layers: what routers see."""
        return self if self.part is None else self.part

    def to(self, device: torch.device) -> Self:
        """This context, which lies on the CPU and has cached nothing, on the device.

        What a CUDA device's host would have to wait for, since its size or value depends on where documents lie, is
        told here, before the tensors go.
        """
        if device.type == "cpu":
            return self
        moved = copy.copy(self)
        moved.positions_BS, moved.documents_BS = (
            each.to(device, non_blocking=True) for each in (self.positions_BS, self.documents_BS)
        )
        boundaries, longest = self.cu_seqlens
        moved.cu_seqlens = (boundaries.to(device, non_blocking=True), longest)
        moved.valid_T = None if self.valid_T is None else self.valid_T.to(device, non_blocking=True)
        moved.part = None if self.part is None else self.part.to(device)
        moved.draws = None if self.draws is None else self.draws.to(device)
        return moved

    def replaying(self, choices: Mapping[int, Tensor]) -> "Context":
        """This context with ``choices`` for the routers of the layers that it names; masks are shared."""
        if not choices:
            return self
        again = copy.copy(self)
        again.choices = {**self.choices, **choices}
        again.part = None if self.part is None else self.part.replaying(choices)
        return again

    @cached_property
    def valid_T(self) -> Tensor | None:
        """Indices of the real tokens in the flattened batch, or None where every token is real."""
        if not self.has_padding:
            return None
        return (self.documents_BS.flatten() != PADDING).nonzero().squeeze(-1)

    @cached_property
    def masks(self) -> dict[int | None, Tensor]:
        """Attention masks already built, by sliding window."""
        return {}

    def mask_BSS(self, window: int | None) -> Tensor:
        """Which keys (last dim) each query may see; bool. Built once for all layers of one window."""
        if window not in self.masks:
            self.masks[window] = attention_mask(
                self.positions_BS, self.documents_BS, self.positions_BS, self.documents_BS, window
            )
        return self.masks[window]

    @cached_property
    def sloping_masks(self) -> dict[tuple[int | None, Alibi], Tensor]:
        """Masks with slopes already built, by sliding window."""
        return {}

    def mask_BHSS(self, window: int | None, alibi: Alibi) -> Tensor:
        """What is added to the scores of scores that fall with the distance within a document; fp32. Built once."""
        key = (window, alibi)
        if key not in self.sloping_masks:
            mask_BSS, positions_BS = self.mask_BSS(window), self.positions_BS
            self.sloping_masks[key] = alibi.mask(mask_BSS, positions_BS, positions_BS)
        return self.sloping_masks[key]

    @cached_property
    def buckets(self) -> dict[Buckets, Tensor]:
        """Buckets of distances already told."""
        return {}

    def buckets_BSS(self, buckets: Buckets) -> Tensor:
        """The bucket of each query's distance to each key; int64. Told once for all layers."""
        if buckets not in self.buckets:
            self.buckets[buckets] = buckets.of(self.positions_BS, self.positions_BS)
        return self.buckets[buckets]

    @cached_property
    def rope(self) -> dict[Rotary, tuple[Tensor, Tensor]]:
        """Cosines and sines already computed."""
        return {}

    def rope_tables(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions' angles, fp32 (B, S, R/2). Once for all layers that turn alike."""
        if rotary not in self.rope:
            self.rope[rotary] = rotary.tables(self.positions_BS)
        return self.rope[rotary]

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, int]:
        """Boundaries of the documents in the flattened batch (int32, from 0 to B*S), and the longest document's length.

        Used by variable-length kernels; every run of padding counts as a document of its own.
        """
        documents_BS = self.documents_BS
        first_BS = torch.ones_like(documents_BS, dtype=torch.bool)
        first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        starts = first_BS.flatten().nonzero().squeeze(-1)
        end = torch.tensor([documents_BS.numel()], device=starts.device)
        boundaries = torch.cat([starts, end]).to(torch.int32)
        return boundaries, int(boundaries.diff().max())


def attention_mask(
    query_positions_BQ: Tensor,
    query_documents_BQ: Tensor,
    key_positions_BS: Tensor,
    key_documents_BS: Tensor,
    window: int | None,
) -> Tensor:
    """Bool mask_BQS: a query sees the keys of its own document at its position and up to window - 1 before it.

    Padding sees padding, so that no row of the softmax is empty.
    """
    distance_BQS = query_positions_BQ[:, :, None] - key_positions_BS[:, None, :]
    mask_BQS = (query_documents_BQ[:, :, None] == key_documents_BS[:, None, :]) & (distance_BQS >= 0)
    if window is not None:
        mask_BQS &= distance_BQS < window
    return mask_BQS
