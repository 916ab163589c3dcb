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
from modeling.kernels.slope_channels import SlopeChannels
from modeling.pieces import Piece, band_of, cut_documents, cut_rows
from modeling.rope import Rotary
from modeling.score_terms import Alibi, Buckets
from modeling.transfer import to_device

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
    balance_scale: float = 0.0
    z_scale: float = 0.0
    has_padding: bool = False
    part: "Context | None" = None  # of the positions that this rank holds between layers, where it holds fewer there
    choices: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> indices_TK
    draws: Draws | None = None  # what dropout's masks follow from; None: nothing is dropped, as outside training
    bound: int | None = None  # of whole sequences: no position reaches it; None: not known

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
            to_device(each, device) for each in (self.positions_BS, self.documents_BS)
        )
        boundaries, longest = self.cu_seqlens
        moved.cu_seqlens, moved.bounds = (to_device(boundaries, device), longest), self.bounds
        moved.valid_T = None if self.valid_T is None else to_device(self.valid_T, device)
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
    def sloping_channels(self) -> dict[tuple[Alibi, int, torch.dtype], SlopeChannels]:
        """Channels with slopes already made."""
        return {}

    def slope_channels(self, alibi: Alibi, n_channels: int, dtype: torch.dtype) -> SlopeChannels:
        """What queries and keys of ``n_channels`` have besides, as kernels take slopes. Made once for all layers."""
        key = (alibi, n_channels, dtype)
        if key not in self.sloping_channels:
            self.sloping_channels[key] = SlopeChannels.of(alibi, self.positions_BS, n_channels, dtype)
        return self.sloping_channels[key]

    @cached_property
    def cuts(self) -> dict[tuple[int | None, int], list[Piece]]:
        """Pieces already cut, by sliding window and block."""
        return {}

    def document_pieces(self, window: int | None, block: int) -> list[Piece]:
        """The documents in pieces of at most ``block`` queries (``cut_documents``). Cut once for all layers.

        As in kernels for various lengths, what tokens of a document see of each other follows from their places in the
        row: their positions are taken to be consecutive.
        """
        key = (window, block)
        if key not in self.cuts:
            self.cuts[key] = cut_documents(self.documents_BS, window, block)
        return self.cuts[key]

    @cached_property
    def bands(self) -> dict[tuple[int | None, int, Alibi | None, Buckets | None], tuple[Tensor, Tensor | None]]:
        """What ``band`` has already made."""
        return {}

    def band(
        self, window: int | None, block: int, alibi: Alibi | None, buckets: Buckets | None
    ) -> tuple[Tensor, Tensor | None]:
        """The mask of which each of ``document_pieces`` has a corner, and the buckets of its distances. Built once.

        fp32 (1, 1 or H, Q, K), added to the scores, -inf where a key is not seen; with ``buckets`` bool (1, Q, K), and
        the second one int64 (1, Q, K). Q is at most ``block``, and K the longest document's length, or less.
        """
        key = (window, block, alibi, buckets)
        if key not in self.bands:
            positions = band_of(self.document_pieces(window, block), self.documents_BS.device)
            queries_1Q, keys_1K = positions
            mask_1QK = attention_mask(queries_1Q, queries_1Q * 0, keys_1K, keys_1K * 0, window)
            if buckets is not None:
                self.bands[key] = mask_1QK, buckets.of(*positions)
            elif alibi is not None:
                self.bands[key] = alibi.mask(mask_1QK, *positions), None
            else:
                self.bands[key] = torch.zeros(mask_1QK.shape).masked_fill_(~mask_1QK, float("-inf"))[:, None], None
        return self.bands[key]

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
            self.rope[rotary] = rotary.tables(self.positions_BS, self.bound)
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

    @cached_property
    def bounds(self) -> list[int]:
        """``cu_seqlens`` on the host."""
        return self.cu_seqlens[0].tolist()

    @cached_property
    def wide_boundaries(self) -> tuple[Tensor, Tensor]:
        """The boundaries of ``cu_seqlens`` as int64, where the tokens are and on the host. Made once for all layers."""
        on_host = torch.tensor(self.bounds)
        return to_device(on_host, self.documents_BS.device), on_host

    def row_pieces(self, window: int | None, block: int) -> list[Piece]:
        """All rows in pieces of at most ``block`` queries (``cut_rows``). Cut once for all layers."""
        key = (window, block)
        if key not in self.row_cuts:
            self.row_cuts[key] = cut_rows(self.bounds, self.documents_BS.shape[1], window, block)
        return self.row_cuts[key]

    @cached_property
    def row_cuts(self) -> dict[tuple[int | None, int], list[Piece]]:
        """Pieces of rows already cut, by sliding window and block."""
        return {}

    @property
    def rows_are_documents(self) -> bool:
        """Whether each row is one document from end to end; no CUDA device's host waits for the answer."""
        boundaries, longest = self.cu_seqlens
        n_rows, seq_len = self.documents_BS.shape
        return longest == seq_len and len(boundaries) == n_rows + 1


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
