"""The pieces of optimizer state that this rank owns, as flat ranges of tensors, whatever the ZeRO stage.

DeepSpeed keeps fp32 masters and optimizer states in flat partitions; a fragment says which elements of which tensor lie
where in them. Checkpoints, initial weights and gradient comparisons all go through fragments.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from parallel.checkpoint.boxes import Box, boxes_of_range
from parallel.layout import Layout
from parallel.mesh import Axis, Mesh


@dataclass
class Fragment:
    """Elements [start, start + numel) of the flattened part ``held`` of the logical tensor ``name``.

    ``flat`` is the fp32 tensor that the optimizer updates and ``offset`` the fragment's place in it. Of fragments with
    the same elements on several ranks of tp, one ``is_owner``: it is counted and written.
    """

    name: str
    shape: tuple[int, ...]  # of the logical tensor
    held: Box  # the part of it that this rank's model computes with
    start: int
    numel: int
    flat: Tensor
    offset: int
    is_owner: bool

    def view(self, flat: Tensor) -> Tensor:
        """This fragment's elements of ``flat``, a tensor laid out as the masters are: one flat view."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)

    def boxes(self) -> list[Box]:
        """The fragment's elements in order, as boxes of the logical tensor."""
        local = boxes_of_range(self.held.shape, self.start, self.start + self.numel)
        return [Box(tuple(map(add, box.start, self.held.start)), box.shape) for box in local]

    def cut(self, logical: Tensor) -> Tensor:
        """The fragment's elements of the whole logical tensor: a flat tensor."""
        return logical[self.held.slices].reshape(-1).narrow(0, self.start, self.numel)


def owned_fragments(
    model: nn.Module,
    optimizer: Any,
    zero: int,
    mesh: Mesh,
    layout: Layout,
    owns: Callable[[str], bool],
) -> list[Fragment]:
    """This rank's fragments, in the model's order. Those of owners cover each logical tensor exactly once.

    ``optimizer`` is what deepspeed.initialize returned for this ZeRO stage, and ``owns`` says which of several ranks
    with the same elements counts and writes them.
    """
    fragments = []
    for name, parameter in model.named_parameters():
        place = layout[name]
        found = _find(parameter, optimizer, zero, place.replicas(mesh))
        if found is not None:
            fragments.append(Fragment(name, place.shape, place.held_box(mesh), *found, is_owner=owns(name)))
    return fragments


def _find(parameter: Any, optimizer: Any, zero: int, axis: Axis) -> tuple[int, int, Tensor, int] | None:
    """The parameter's start, numel, flat tensor and offset in it; None where nothing of it lies on this rank."""
    match zero:
        case 0:
            start, numel = _share(parameter.numel(), axis)
            return (start, numel, parameter, start) if numel > 0 else None
        case 1 | 2:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None or mapping.lp_fragment_address.numel == 0:
                return None
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = mapping.hp_fragment._base if mapping.hp_fragment._base is not None else mapping.hp_fragment
            return low.start, low.numel, flat, high.start
        case _:
            start, numel = _share(parameter.ds_numel, axis)
            if numel <= 0:
                return None
            group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            return start, numel, optimizer.fp32_partitioned_groups_flat[group], offset


def _share(numel: int, axis: Axis) -> tuple[int, int]:
    """The rank's even share of ``numel`` elements: start and length."""
    size = -(-numel // axis.degree)
    start = min(axis.rank * size, numel)
    return start, min(size, numel - start)


def _zeros(flat: Tensor, old: Tensor | None, *, keeps: bool) -> Tensor:
    """Zeros of the flat tensor's kind; in the memory that the state had before, if it had one."""
    if old is not None and (old.shape, old.dtype, old.device) == (flat.shape, flat.dtype, flat.device):
        return old if keeps else old.zero_()
    return torch.zeros_like(flat, requires_grad=False)


def make_states(
    base: torch.optim.Optimizer,
    flats: Sequence[Tensor],
    state_names: tuple[str, ...],
    step: int,
    kept: Collection[str] = (),
) -> None:
    """Gives the torch optimizer zeroed state for every flat tensor, as its own first step would, at ``step``.

    States of ``kept`` that are there already stay as they are.

    DeepSpeed's stages make states lazily or by a dummy step; here they exist, known, before anything is restored.
    """
    for flat in flats:
        old = base.state.get(flat, {})
        state: dict[str, Any] = {name: _zeros(flat, old.get(name), keeps=name in kept) for name in state_names}
        if (
            "exp_avg" in state
        ):  # Adam's bias correction counts steps; a tensor, on the device where fused kernels need it
            fused = base.defaults.get("fused")
            state = {"step": torch.tensor(float(step), device=flat.device if fused else "cpu"), **state}
        base.state[flat] = state
