"""Which dim of each weight lies on which axis: one table for the decoder, and the boxes that follow from it."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from parallel.checkpoint.boxes import Box
from parallel.mesh import Axis, Mesh

# First match counts. A weight that no row names is held whole by every rank of tp; its gradient is summed over tp,
# since each of them sees other positions or heads.
CUT: tuple[tuple[str, int, Literal["tp", "ep"]], ...] = (
    ("*.experts.*", 0, "ep"),  # experts
    ("embed.weight", 0, "tp"),  # vocabulary
    ("head.weight", 0, "tp"),
    ("*.attention.q.weight", 0, "tp"),  # heads
    ("*.attention.k.weight", 0, "tp"),
    ("*.attention.v.weight", 0, "tp"),
    ("*.attention.o.weight", 1, "tp"),
    ("*.gate.weight", 0, "tp"),  # d_ff, of dense and shared feed-forward layers
    ("*.up.weight", 0, "tp"),
    ("*.down.weight", 1, "tp"),
)


@dataclass(frozen=True)
class Place:
    """Where a weight lies: the dim that is cut and the axis that cuts it; None: whole on every rank of the stage."""

    dim: int | None
    axis: Literal["tp", "ep"] | None

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to the experts, which are replicated over edp instead of dp x cp."""
        return self.axis == "ep"


def place_of(name: str) -> Place:
    """The table's row for a logical tensor."""
    for pattern, dim, axis in CUT:
        if fnmatchcase(name, pattern):
            return Place(dim, axis)
    return Place(None, None)


def held_box(name: str, shape: tuple[int, ...], mesh: Mesh) -> Box:
    """The elements of the logical tensor (of ``shape``) that this rank holds."""
    place = place_of(name)
    start, size = [0] * len(shape), list(shape)
    if place.dim is not None and place.axis is not None:
        axis: Axis = getattr(mesh, place.axis)
        assert shape[place.dim] % axis.degree == 0, (name, shape, axis.degree)
        size[place.dim] //= axis.degree
        start[place.dim] = axis.rank * size[place.dim]
    return Box(tuple(start), tuple(size))


def replicas_of(name: str, mesh: Mesh) -> Axis:
    """The ranks over which ZeRO shards this tensor's state: dp x cp, or edp for experts."""
    return mesh.edp if place_of(name).is_expert else mesh.replicas


def is_owner(name: str, mesh: Mesh) -> bool:
    """Whether this rank counts and writes its part of the tensor: where tp replicates it, only tp rank 0 does."""
    return place_of(name).axis is not None or mesh.tp.rank == 0
