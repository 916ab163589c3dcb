"""Fragments: the parts of fp32 masters and optimizer states that this rank owns, in one form for every ZeRO stage.

DeepSpeed keeps fp32 masters and optimizer states in flat partitions; a fragment says which elements of which logical
tensor lie where in them. Checkpoints, initial weights and gradient comparisons all use fragments.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from torch import Tensor

from modeling.dims import Weight
from modeling.optimizers.rule import UpdateRule
from parallel.checkpoint.boxes import Box, boxes_of_range
from parallel.mesh import Axis
from parallel.zero.weights import HeldWeight


@dataclass
class Fragment:
    """Elements [start, start + numel) of the flattened part ``held`` of the logical tensor ``name``.

    ``flat`` is the fp32 tensor that the optimizer updates, and ``offset`` the fragment's place in it. Of fragments with
    the same elements on several ranks (of tp, or of pp for tied embeddings), one has ``is_owner``: it is counted in
    norms and written to checkpoints.
    """

    name: str
    weight: Weight  # the description of the logical tensor
    shape: tuple[int, ...]  # of the logical tensor
    held: Box  # the part of it that this rank's model computes with
    start: int
    numel: int
    flat: Tensor
    offset: int
    is_owner: bool

    def view(self, flat: Tensor) -> Tensor:
        """A flat view of this fragment's elements of ``flat``, a tensor with the layout of the masters."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)

    def boxes(self) -> list[Box]:
        """The fragment's elements in order, as boxes of the logical tensor."""
        local = boxes_of_range(self.held.shape, self.start, self.start + self.numel)
        return [Box(tuple(map(add, box.start, self.held.start)), box.shape) for box in local]

    def around(self) -> Box:
        """The smallest box of the logical tensor that is whole rows of ``held`` and holds the fragment's elements."""
        if not self.held.shape:
            return self.held
        row = self.held.numel // self.held.shape[0]
        first, last = self.start // row, (self.start + self.numel - 1) // row
        start, shape = self.held.start, self.held.shape
        return Box((start[0] + first, *start[1:]), (last + 1 - first, *shape[1:]))

    def cut(self, rows: Tensor) -> Tensor:
        """The fragment's elements, flat, from ``rows``, a tensor with the elements of the box ``around()``."""
        before = (self.around().start[0] - self.held.start[0]) * (rows.numel() // len(rows)) if rows.ndim else 0
        return rows.reshape(-1).narrow(0, self.start - before, self.numel)


@dataclass(frozen=True)
class Share:
    """The elements [start, start + numel) of the flattened part of a weight that a rank computes with.

    Their fp32 masters lie in ``flat``, from ``offset`` on.
    """

    start: int
    numel: int
    flat: Tensor
    offset: int


def owned_fragments(weights: Iterable[HeldWeight], share_of: Callable[[HeldWeight], Share | None]) -> list[Fragment]:
    """This rank's fragments, in the model's order. All ranks' owned fragments cover each logical tensor exactly once.

    ``share_of`` returns the elements of a weight whose master this rank holds, and where it lies.
    """
    fragments = []
    for weight in weights:
        share = share_of(weight)
        if share is not None:
            place = (share.start, share.numel, share.flat, share.offset)
            fragments.append(
                Fragment(
                    weight.name,
                    weight.weight,
                    weight.place.shape,
                    weight.held,
                    *place,
                    is_owner=weight.is_owner,
                )
            )
    return fragments


def even_share(numel: int, axis: Axis) -> tuple[int, int]:
    """This rank's even share of ``numel`` elements over the axis, as start and length; later ranks may have fewer."""
    size = -(-numel // axis.degree)
    start = min(axis.rank * size, numel)
    return start, min(size, numel - start)


def mapped_share(parameter: Any) -> Share | None:
    """This rank's share of a weight, from DeepSpeed's own mapping of weights to fp32 masters (ZeRO 1 and 2).

    None where this rank's master has no element of the weight.
    """
    mapping = parameter._hp_mapping
    if mapping is None or mapping.lp_fragment_address.numel == 0:
        return None
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    flat = mapping.hp_fragment._base if mapping.hp_fragment._base is not None else mapping.hp_fragment
    return Share(low.start, low.numel, flat, high.start)


def position(flats: Sequence[Any], flat: Tensor) -> int:
    """The index among ``flats`` of the tensor that is ``flat`` or shares its memory."""
    return next(number for number, other in enumerate(flats) if other is flat or other.data_ptr() == flat.data_ptr())


def concatenated(parts: Sequence[Tensor], flat: Tensor) -> Tensor:
    """DeepSpeed's list of gradient slices as one flat fp32 tensor, in the layout of ``flat``."""
    gradient = torch.cat([part.detach().reshape(-1).float() for part in parts])
    assert gradient.numel() == flat.numel(), (gradient.shape, flat.shape)
    return gradient


def _zeros(flat: Tensor, old: Tensor | None, *, keeps: bool) -> Tensor:
    """Zeros like the flat tensor, in the memory of the old state if that fits; with ``keeps``, the old state itself."""
    if old is not None and (old.shape, old.dtype, old.device) == (flat.shape, flat.dtype, flat.device):
        return old if keeps else old.zero_()
    return torch.zeros_like(flat, requires_grad=False)


def make_states(
    base: torch.optim.Optimizer,
    flats: Sequence[tuple[Tensor, Weight]],
    rule: UpdateRule,
    step: int,
    kept: Collection[str] = (),
) -> None:
    """Gives the torch optimizer zeroed state for every flat tensor, as its own first step would, at update ``step``.

    ``flats``: each flat tensor with one of the weights in it, which stands for all, since the weights of one group have
    the same states. States of the kinds in ``kept`` that are there already stay as they are.

    DeepSpeed's stages make states lazily or by a dummy step; here they exist before anything is restored into them.
    """
    for flat, weight in flats:
        old = base.state.get(flat, {})
        state: dict[str, Any] = {
            name: _zeros(flat, old.get(name), keeps=name in kept) for name in rule.states_of(weight)
        }
        if rule.counts_updates:  # the count is a tensor; fused kernels need it on the device
            fused = base.defaults.get("fused")
            state = {"step": torch.tensor(float(step), device=flat.device if fused else "cpu"), **state}
        base.state[flat] = state
