"""The weights of this rank's model, each with what its layout says of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from modeling.decoder import Decoder
from modeling.dims import Weight
from modeling.logical import LogicalTensor
from parallel.checkpoint.boxes import Box
from parallel.layout import Layout, Place
from parallel.mesh import Axis, Mesh

TIED = "embed.weight"  # the embedding's name, which the copy beside the head on another stage bears too


@dataclass(frozen=True, eq=False)
class HeldWeight:
    """One weight that this rank computes with. Of several ranks of tp or pp with the same elements, one ``is_owner``.

    The owner's elements are counted in norms and written to checkpoints.
    """

    name: str
    parameter: nn.Parameter
    weight: Weight  # what the logical tensor is
    place: Place  # where it lies
    held: Box  # the part of it that this rank computes with
    replicas: Axis  # the ranks that compute with the same part: over them ZeRO shards its state
    is_owner: bool


def describe_weights(
    model: Decoder, tensors: Mapping[str, LogicalTensor], layout: Layout, mesh: Mesh, *, holds_second_copy: bool
) -> dict[nn.Parameter, HeldWeight]:
    """Every weight of the model, in its order.

    ``holds_second_copy``: the embedding is here beside the head only, and another rank of pp owns it.
    """
    return {
        parameter: HeldWeight(
            name,
            parameter,
            tensors[name].weight,
            layout[name],
            layout[name].held_box(mesh),
            layout[name].replicas(mesh),
            layout[name].is_owner(mesh) and not (name == TIED and holds_second_copy),
        )
        for name, parameter in model.named_parameters()
    }
