"""The pieces of optimizer state that this rank owns, as flat ranges of tensors, whatever the ZeRO stage.

DeepSpeed keeps fp32 masters and optimizer states in flat partitions; a fragment says which elements of which tensor lie
where in them. Checkpoints, initial weights and gradient comparisons all go through fragments.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Fragment:
    """Elements [start, start + numel) of the flattened tensor ``name``, owned by this rank.

    ``flat`` is the fp32 tensor that the optimizer updates and ``offset`` the fragment's place in it.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    numel: int
    flat: Tensor
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        """This fragment's elements of ``flat``, a tensor laid out as the masters are: one flat view."""
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)


def owned_fragments(model: nn.Module, optimizer: Any, zero: int, dp_rank: int, dp: int) -> list[Fragment]:
    """This rank's fragments, in the model's order. Across the ranks of dp they cover each tensor exactly once.

    ``optimizer`` is what deepspeed.initialize returned for this ZeRO stage.
    """
    fragments = []
    for name, parameter in model.named_parameters():
        match zero:
            case 0:
                fragment = _replicated(name, parameter, dp_rank, dp)
            case 1 | 2:
                fragment = _flat_partition(name, parameter)
            case _:
                fragment = _parameter_partition(name, parameter, optimizer, dp_rank, dp)
        if fragment is not None and fragment.numel > 0:
            fragments.append(fragment)
    return fragments


def _share(numel: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rank's even share of ``numel`` elements: start and length."""
    size = -(-numel // ranks)
    start = min(rank * size, numel)
    return start, min(size, numel - start)


def _replicated(name: str, parameter: nn.Parameter, dp_rank: int, dp: int) -> Fragment:
    start, numel = _share(parameter.numel(), dp_rank, dp)
    return Fragment(name, tuple(parameter.shape), start, numel, parameter, start)


def _flat_partition(name: str, parameter: nn.Parameter) -> Fragment | None:
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:  # nothing of this tensor lies in this rank's partition
        return None
    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
    flat = mapping.hp_fragment._base if mapping.hp_fragment._base is not None else mapping.hp_fragment
    return Fragment(name, tuple(parameter.shape), low.start, low.numel, flat, high.start)


def _parameter_partition(name: str, parameter: Any, optimizer: Any, dp_rank: int, dp: int) -> Fragment | None:
    start, numel = _share(parameter.ds_numel, dp_rank, dp)
    if numel <= 0:
        return None
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return Fragment(name, tuple(parameter.ds_shape), start, numel, flat, offset)


def make_states(base: torch.optim.Optimizer, flats: list[Tensor], state_names: tuple[str, ...], step: int) -> None:
    """Gives the torch optimizer zeroed state for every flat tensor, as its own first step would, at ``step``.

    DeepSpeed's stages make states lazily or by a dummy step; here they exist, known, before anything is restored.
    """
    for flat in flats:
        state: dict[str, Any] = {name: torch.zeros_like(flat, requires_grad=False) for name in state_names}
        if (
            "exp_avg" in state
        ):  # Adam's bias correction counts steps; a tensor, on the device where fused kernels need it
            fused = base.defaults.get("fused")
            state = {"step": torch.tensor(float(step), device=flat.device if fused else "cpu"), **state}
        base.state[flat] = state
