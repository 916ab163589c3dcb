"""What layers need besides hidden states: positions, documents, attention masks, and the scales of auxiliary losses.

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
    """What the layers of one forward pass share besides hidden states. There is one object for each micro-batch.

    ``balance_scale`` and ``z_scale`` are the weights of one sequence's balance loss and of one token's router z-loss in
    the total that is differentiated, before the coefficients: 1 / sequences of the global batch and 1 / tokens of the
    global batch, times whatever multiplies the loss itself (the loss scale, dp). ``choices`` has experts that routers
    take instead of choosing them, to replay another run's choices. A pass writes nothing to its context but cached
    values.
    """

    positions_BS: Tensor  # int, restarting at each document
    documents_BS: Tensor  # int, the number of the document within the row; PADDING where there is no token
    balance_scale: float = 0.0
    z_scale: float = 0.0
    has_padding: bool = False
    # the context of the positions that this rank holds between layers; None: all of these
    part: "Context | None" = None
    choices: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> indices_TK
    draws: Draws | None = None  # what dropout's masks are drawn from; None: nothing is dropped, as outside training
    bound: int | None = None  # all positions of whole sequences are below it; None: not known

    @property
    def between_layers(self) -> "Context":
        """The context of the positions that this rank holds between layers, which routers and dropout use."""
        return self if self.part is None else self.part

    def to(self, device: torch.device) -> Self:
        """This context on the device. It must lie on the CPU and have cached nothing yet.

        Whatever depends on where documents lie is computed here, before the tensors are copied: on a CUDA device its
        size or value would make the host wait.
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
        """This context with ``choices`` (layer -> indices_TK) for the routers of these layers.

        Cached masks are shared.
        """
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
        """Bool: which keys (last dim) each query may see. Built once for all layers with this window."""
        if window not in self.masks:
            self.masks[window] = attention_mask(
                self.positions_BS, self.documents_BS, self.positions_BS, self.documents_BS, window
            )
        return self.masks[window]

    @cached_property
    def sloping_masks(self) -> dict[tuple[int | None, Alibi], Tensor]:
        """Masks with ALiBi's slopes already built, by sliding window and slopes."""
        return {}

    def mask_BHSS(self, window: int | None, alibi: Alibi) -> Tensor:
        """The fp32 mask added to the scores under ALiBi: minus slope times distance, -inf where a key is hidden.

        Built once for all layers with this window.
        """
        key = (window, alibi)
        if key not in self.sloping_masks:
            mask_BSS, positions_BS = self.mask_BSS(window), self.positions_BS
            self.sloping_masks[key] = alibi.mask(mask_BSS, positions_BS, positions_BS)
        return self.sloping_masks[key]

    @cached_property
    def sloping_channels(self) -> dict[tuple[Alibi, int, torch.dtype], SlopeChannels]:
        """Extra channels for ALiBi already made, by slopes, number of channels and dtype."""
        return {}

    def slope_channels(self, alibi: Alibi, n_channels: int, dtype: torch.dtype) -> SlopeChannels:
        """The extra channels of queries and keys by which fused kernels compute ALiBi's slopes.

        Made once for all layers.

        ``n_channels`` is the number of a head's own channels.
        """
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

        As in variable-length kernels, masks within a piece follow from the tokens' places in the row: the positions
        within a document are taken to be consecutive.
        """
        key = (window, block)
        if key not in self.cuts:
            self.cuts[key] = cut_documents(self.documents_BS, window, block)
        return self.cuts[key]

    @cached_property
    def bands(self) -> dict[tuple[int | None, int, Alibi | None, Buckets | None], tuple[Tensor, Tensor | None]]:
        """Masks and buckets already made by ``band``."""
        return {}

    def band(
        self, window: int | None, block: int, alibi: Alibi | None, buckets: Buckets | None
    ) -> tuple[Tensor, Tensor | None]:
        """One mask of which each of ``document_pieces`` uses a corner, and the buckets of its distances. Built once.

        The mask is fp32 (1, 1 or H, Q, K) to be added to the scores, -inf where a key is hidden; with ``buckets`` it is
        bool (1, Q, K), and the second tensor is int64 (1, Q, K), otherwise None. Q is at most ``block``, and K at most
        the longest document's length.
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
        """Buckets of distances (T5) already computed."""
        return {}

    def buckets_BSS(self, buckets: Buckets) -> Tensor:
        """The bucket of each query's distance to each key, int64. Computed once for all layers."""
        if buckets not in self.buckets:
            self.buckets[buckets] = buckets.of(self.positions_BS, self.positions_BS)
        return self.buckets[buckets]

    @cached_property
    def rope(self) -> dict[Rotary, tuple[Tensor, Tensor]]:
        """Cosines and sines already computed."""
        return {}

    def rope_tables(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions' angles, fp32 (B, S, R/2).

        Computed once for all layers with this ``rotary``.
        """
        if rotary not in self.rope:
            self.rope[rotary] = rotary.tables(self.positions_BS, self.bound)
        return self.rope[rotary]

    @cached_property
    def growths(self) -> dict[Rotary, Tensor | None]:
        """Factors of queries already computed."""
        return {}

    def query_factors(self, rotary: Rotary) -> Tensor | None:
        """The factors of the positions' queries, fp32 (B, S, 1), or None (``Rotary.query_factors``).

        Computed once for all layers with this ``rotary``.
        """
        if rotary not in self.growths:
            self.growths[rotary] = rotary.query_factors(self.positions_BS, self.bound)
        return self.growths[rotary]

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
        """The boundaries of ``cu_seqlens`` as a list on the host."""
        return self.cu_seqlens[0].tolist()

    @cached_property
    def wide_boundaries(self) -> tuple[Tensor, Tensor]:
        """The boundaries of ``cu_seqlens`` as int64: on the tokens' device, and on the host.

        Made once for all layers.
        """
        on_host = torch.tensor(self.bounds)
        return to_device(on_host, self.documents_BS.device), on_host

    def row_pieces(self, window: int | None, block: int) -> list[Piece]:
        """All rows together in pieces of at most ``block`` queries (``cut_rows``). Cut once for all layers."""
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
        """Whether each row is one document from end to end. The host of a CUDA device need not wait for the answer."""
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
    """Bool mask_BQS: a query sees the keys of its own document at its own position and up to window - 1 before it.

    Without a window it sees all keys before it. Padding sees padding, so that no row of the softmax is empty.
    """
    distance_BQS = query_positions_BQ[:, :, None] - key_positions_BS[:, None, :]
    mask_BQS = (query_documents_BQ[:, :, None] == key_documents_BS[:, None, :]) & (distance_BQS >= 0)
    if window is not None:
        mask_BQS &= distance_BQS < window
    return mask_BQS
