"""Ring attention's plan by tiles: which queries meet which keys, decided once for all layers of one sliding window.

Shape letters: B batch, Q queries, S keys.
"""

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from modeling.context import Context, attention_mask
from modeling.score_terms import ScoreTerms, biased
from parallel.context_parallel.part import held_position, held_positions
from parallel.mesh import Axis

TILE = (
    1024  # queries, and keys, of one kernel call at most: no mask or matrix of scores is larger than its square a head
)


@dataclass(frozen=True)
class Tile:
    """Some of this rank's queries and some of one rank's keys, as slices of the held positions, with their positions.

    It holds O(Q + S) numbers; masks are built when they are needed.
    """

    queries: slice
    keys: slice
    query_positions_BQ: Tensor
    query_documents_BQ: Tensor
    key_positions_BS: Tensor
    key_documents_BS: Tensor
    window: int | None
    query_places_Q: Tensor  # in the sample; the keys' places are consecutive from ``first_key_place``
    first_key_place: int
    sees_all: bool = False  # every query sees every key

    def mask_BQS(self) -> Tensor | None:
        """Which keys each query sees (bool, from ``modeling.context.attention_mask``); None: every query sees all."""
        return None if self.sees_all else self._mask_BQS()

    def mask(self, terms: ScoreTerms) -> Tensor | None:
        """The mask (None: every query sees every key), or, with position terms, what is added to the scores."""
        if terms.alibi is not None:
            return terms.alibi.mask(self._mask_BQS(), self.query_positions_BQ, self.key_positions_BS)
        if terms.bias_HN is None:
            return self.mask_BQS()
        return biased(self.mask_BQS(), terms.bias_HN, self.buckets_BQS(terms))

    def buckets_BQS(self, terms: ScoreTerms) -> Tensor:
        """The relative-position bucket of each query and key (B, Q, S). ``terms`` must have a bias."""
        buckets_BQS = terms.buckets_of(self.query_positions_BQ, self.key_positions_BS)
        assert buckets_BQS is not None
        return buckets_BQS

    def factors(self, terms: ScoreTerms) -> Tensor | None:
        """Attention dropout's factor for each query and key; None without dropout."""
        return terms.factors(self.query_places_Q, self.first_key_place, self.key_positions_BS.shape[1])

    def _mask_BQS(self) -> Tensor:
        return attention_mask(
            self.query_positions_BQ, self.query_documents_BQ, self.key_positions_BS, self.key_documents_BS, self.window
        )


RingPlan = list[list[Tile]]  # by the cp rank whose keys they are


def plan_ring(whole: Context, window: int | None, axis: Axis, tile: int = TILE) -> RingPlan:
    """The tiles that this rank computes, of ``tile`` queries and keys at most, by the rank that holds the keys.

    Tiles in which no query sees a key are left out: the future, other documents, and what lies outside the window.
    Among a rank's own keys, each query's tile with itself comes first. No communication; on CUDA the host waits for the
    device once.
    """
    plan = [_all_tiles(whole, window, axis, key_rank, tile) for key_rank in range(axis.degree)]
    verdicts = torch.stack([torch.stack([_how_much(each) for each in tiles]) for tiles in plan]).tolist()
    return [
        [
            replace(each, sees_all=sees_all)
            for each, (sees_any, sees_all) in zip(tiles, tile_verdicts, strict=True)
            if sees_any
        ]
        for tiles, tile_verdicts in zip(plan, verdicts, strict=True)
    ]


def _all_tiles(whole: Context, window: int | None, axis: Axis, key_rank: int, tile: int) -> list[Tile]:
    """The tiles of this rank's queries and ``key_rank``'s keys, those on the diagonal first."""
    seq_len, device = whole.positions_BS.shape[1], whole.positions_BS.device
    mine, theirs = (held_positions(seq_len, rank, axis.degree, device) for rank in (axis.rank, key_rank))
    tiles = [
        Tile(
            queries,
            keys,
            whole.positions_BS[:, mine[queries]],
            whole.documents_BS[:, mine[queries]],
            whole.positions_BS[:, theirs[keys]],
            whole.documents_BS[:, theirs[keys]],
            window,
            mine[queries],
            held_position(keys.start, seq_len, key_rank, axis.degree),
        )
        for queries, keys in product(_slices(len(mine), tile), repeat=2)
    ]
    return sorted(tiles, key=lambda each: each.queries != each.keys)


def _slices(n_held: int, tile: int) -> list[slice]:
    """The held positions as slices of at most ``tile``, none of which spans the two chunks."""
    chunk = n_held // 2
    starts = [half + start for half in (0, chunk) for start in range(0, chunk, tile)]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], n_held], strict=True)]


def _how_much(tile: Tile) -> Tensor:
    """Two bools on the device: whether any query sees any key, and whether every query sees every key."""
    mask_BQS = tile.mask_BQS()
    assert mask_BQS is not None
    return torch.stack([mask_BQS.any(), mask_BQS.all()])
