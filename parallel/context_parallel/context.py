"""The context that layers see under context parallelism, where a rank holds only a part of each sequence."""

from dataclasses import dataclass, field
from typing import Self

import torch

from modeling.context import Context
from parallel.context_parallel.part import held_positions, take_share
from parallel.context_parallel.pieces import PiecePlan, plan_pieces
from parallel.context_parallel.plan import RingPlan
from parallel.mesh import Axis


@dataclass
class HeldContext(Context):
    """The Context of the positions that this cp rank holds, together with that of the whole sequences.

    ``positions_BS``, ``documents_BS`` and everything derived from them (rotary tables, tokens to route) are those of
    the positions that this cp rank holds, in held order. The attention cores use ``whole``: all positions in natural
    order, the same on every cp rank, so its masks and boundaries are built once for all layers.
    """

    whole: Context = field(kw_only=True)
    # Sliding window -> what ring attention computes, by tiles or by pieces of documents.
    plans: dict[int | None, RingPlan] = field(default_factory=dict)
    piece_plans: dict[int | None, PiecePlan] = field(default_factory=dict)

    def pieces(self, window: int | None, axis: Axis) -> PiecePlan:
        """Ring attention's plan by pieces of documents, for variable-length kernels. Made once for all layers."""
        if window not in self.piece_plans:
            places = (self.whole.positions_BS.shape[1], window, axis.rank, axis.degree)
            self.piece_plans[window] = plan_pieces(self.whole.bounds, *places, self.positions_BS.device)
        return self.piece_plans[window]

    def to(self, device: torch.device) -> Self:
        """This context and ``whole``, copied from the CPU to the device."""
        if device.type == "cpu":
            return self
        moved = super().to(device)
        moved.whole = self.whole.to(device)
        return moved


def split_context(whole: Context, axis: Axis) -> HeldContext:
    """This cp rank's part of a Context of whole sequences (natural order; 2 * cp divides their length).

    The scales are unchanged; ``choices`` starts empty, since it would hold the held tokens' experts only. No
    communication.
    """
    documents_BS, draws = take_share(whole.documents_BS, axis), whole.draws
    if draws is not None:
        draws = draws.at(
            draws.places_S[held_positions(len(draws.places_S), axis.rank, axis.degree, documents_BS.device)]
        )
    return HeldContext(
        positions_BS=take_share(whole.positions_BS, axis),
        documents_BS=documents_BS,
        balance_scale=whole.balance_scale,
        z_scale=whole.z_scale,
        draws=draws,
        bound=whole.bound,
        has_padding=whole.has_padding,  # also on ranks that hold no padding: all ranks' graphs must be the same
        whole=whole,
    )
