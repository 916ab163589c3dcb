"""Each rank's part of a batch: dp divides its micro-batches, cp their positions, and tp the positions between layers.

Shape letters: B micro-batch, S sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from modeling.context import Context
from modeling.dropout import Draws
from modeling.mtp import Ahead, following
from modeling.transfer import to_device
from parallel.context_parallel.context import split_context
from parallel.context_parallel.part import take_share
from parallel.mesh import Mesh


@dataclass
class MicroBatch:
    """Tokens, targets and context of one micro-batch. Every pp rank has the same, so only hidden states are sent."""

    tokens_BS: Tensor
    targets_BS: Tensor
    context: Context
    ahead: list[Ahead] = field(default_factory=list)  # for multi-token prediction, by depth; empty without it

    def to(self, device: torch.device) -> "MicroBatch":
        """This micro-batch, copied from the CPU to the device. The host does not wait for the copy."""
        tokens_BS, targets_BS = (to_device(each, device) for each in (self.tokens_BS, self.targets_BS))
        return MicroBatch(tokens_BS, targets_BS, self.context.to(device), [each.to(device) for each in self.ahead])


def share_of_batch(indices: np.ndarray, micro_batch_size: int, mesh: Mesh) -> np.ndarray:
    """This rank's samples of a batch (n, micro_batch_size): dp rank r gets micro-batches r, r + dp, r + 2 dp, ..."""
    return indices.reshape(-1, micro_batch_size)[mesh.dp.rank :: mesh.dp.degree]


def part_of_sequence(seq_len: int, mesh: Mesh) -> slice:
    """The slice of ``seq_len`` positions that this rank of tp holds between layers."""
    part = seq_len // mesh.tp.degree
    return slice(mesh.tp.rank * part, (mesh.tp.rank + 1) * part)


def cut_micro_batch(
    tokens_BS: Tensor,
    targets_BS: Tensor,
    positions_BS: Tensor,
    documents_BS: Tensor,
    mesh: Mesh,
    balance_scale: float = 0.0,
    z_scale: float = 0.0,
    *,
    has_padding: bool,
    draws: Draws | None = None,
    ahead_scales: Sequence[float] = (),
    next_BS: Tensor | None = None,
) -> MicroBatch:
    """This rank's share of a micro-batch of whole sequences (B, S). No communication.

    The tensors hold integers of any width, and ranks of cp, tp and pp pass the same ones. cp cuts the tokens and
    targets here; tp cuts positions only between layers, for which ``context.part`` is made. ``balance_scale`` and
    ``z_scale`` weigh the auxiliary losses. ``ahead_scales``: for multi-token prediction, one weight of the loss for
    each depth; the further tokens are found here, since a rank of cp does not hold its last position's neighbour.
    ``has_padding``: the sequences may hold padding; looking for it here would make a CUDA device's host wait.
    ``draws``: what dropout's masks follow from, for the whole sequences. ``next_BS``: each position's next token, where
    not all of these are targets.
    """
    depth = len(ahead_scales)
    further = following(targets_BS, depth) if next_BS is None else following(next_BS, depth, targets_BS)
    ahead = [Ahead(*each, scale) for each, scale in zip(further, ahead_scales, strict=True)]
    bound = positions_BS.shape[1]  # positions restart at each document
    context = Context(positions_BS, documents_BS, balance_scale, z_scale, has_padding, draws=draws, bound=bound)
    if mesh.cp.degree > 1:
        context = split_context(context, mesh.cp)
        tokens_BS, targets_BS = take_share(tokens_BS, mesh.cp), take_share(targets_BS, mesh.cp)
        for each in ahead:
            each.tokens_BS, each.targets_BS = take_share(each.tokens_BS, mesh.cp), take_share(each.targets_BS, mesh.cp)
    if mesh.tp.degree > 1:
        part = part_of_sequence(tokens_BS.shape[1], mesh)
        positions_BS, documents_BS = context.positions_BS[:, part], context.documents_BS[:, part]
        draws = None if context.draws is None else context.draws.at(context.draws.places_S[part])
        context.part = Context(positions_BS, documents_BS, balance_scale, z_scale, has_padding, draws=draws)
    return MicroBatch(tokens_BS, targets_BS, context, ahead)
