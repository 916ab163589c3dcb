"""The weights of this rank's part of the model, each with its placement, its replicas and its owner."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from modeling.decoder import Decoder
from modeling.dims import Weight
from modeling.logical import LogicalTensor
from parallel.checkpoint.boxes import Box
from parallel.layout import Layout, Place
from parallel.mesh import Axis, Mesh

TIED = "embed.weight"  # the embedding's name, also of its copy on the stage of the head


@dataclass(frozen=True, eq=False)
class HeldWeight:
    """One weight with which this rank computes. Of several ranks of tp or pp with the same elements, one ``is_owner``.

    The owner's elements are counted in norms and written to checkpoints.
    """

    name: str
    parameter: nn.Parameter
    weight: Weight  # the description of the logical tensor
    place: Place  # its placement on the ranks
    held: Box  # the part of it with which this rank computes
    replicas: Axis  # the ranks that compute with the same part: ZeRO shards its state over them
    is_owner: bool


def describe_weights(
    model: Decoder, tensors: Mapping[str, LogicalTensor], layout: Layout, mesh: Mesh, *, holds_second_copy: bool
) -> dict[nn.Parameter, HeldWeight]:
    """The description of every weight of this rank's part of the model, by parameter, in the model's order.

    ``holds_second_copy``: this rank has the embedding only as the copy for the head, and another rank of pp owns it.
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
