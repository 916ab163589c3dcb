"""Which axis cuts which dim of a weight: one table, from which every weight's placement on the ranks follows."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from modeling.config import ModelConfig
from modeling.dims import Dim, Weight, units_of
from parallel.checkpoint.boxes import Box

if TYPE_CHECKING:
    from parallel.mesh import Axis, Mesh

AXIS_OF: Mapping[Dim, Literal["tp", "ep"] | None] = {
    "vocab": "tp",
    "d_model": None,
    "positions": None,
    "heads": "tp",
    "per_head": "tp",
    "buckets": None,
    "kv_heads": "tp",
    "d_head": None,
    "linear_k_heads": "tp",
    "linear_v_heads": "tp",
    "linear_d_v": None,
    "per_linear_head": "tp",
    "taps": None,
    "q_latent": None,
    "kv_latent": None,
    "kv_latent_rope": None,
    "d_ff": "tp",
    "shared_d_ff": "tp",
    "experts": "ep",
    "expert_d_ff": None,
    "one": None,
    "token_and_hidden": None,
    "scores": None,
}


@dataclass(frozen=True)
class Place:
    """How a logical tensor of ``shape`` is placed on the ranks: the dim that is cut, and the axis that cuts it.

    Where both are None, every rank of the stage holds it whole. Each rank of tp then computes with other positions or
    other heads, so its gradient is a summand that must be summed over tp (``is_summed_over_tp``).
    """

    shape: tuple[int, ...]
    dim: int | None
    axis: Literal["tp", "ep"] | None

    @property
    def is_expert(self) -> bool:
        """Whether the tensor belongs to experts, which are replicated over edp instead of dp x cp."""
        return self.axis == "ep"

    @property
    def is_summed_over_tp(self) -> bool:
        """Whether the ranks of tp hold the tensor whole, so that their gradients of it must be summed."""
        return self.axis is None

    def held_box(self, mesh: "Mesh") -> Box:
        """The box of elements that this rank holds. The axis's degree must divide the dim's size."""
        start, size = [0] * len(self.shape), list(self.shape)
        if self.dim is not None and self.axis is not None:
            axis: Axis = getattr(mesh, self.axis)
            assert self.shape[self.dim] % axis.degree == 0, (self, axis.degree)
            size[self.dim] //= axis.degree
            start[self.dim] = axis.rank * size[self.dim]
        return Box(tuple(start), tuple(size))

    def replicas(self, mesh: "Mesh") -> "Axis":
        """The ranks over which ZeRO shards this tensor's state: dp x cp, or edp for experts."""
        return mesh.edp if self.is_expert else mesh.replicas

    def is_owner(self, mesh: "Mesh") -> bool:
        """Whether this rank counts and writes its part. A tensor that no axis cuts is counted by tp rank 0 alone."""
        return self.axis is not None or mesh.tp.rank == 0


Layout = Mapping[str, Place]


def place_of(weight: Weight, shape: tuple[int, ...]) -> Place:
    """The placement of a weight of this shape. Raises TypeError if the table cuts two of its dims, or lacks one."""
    unknown = [dim for dim in weight.dims if dim not in AXIS_OF]
    if unknown:
        raise TypeError(f"parallel.layout.AXIS_OF has no row for the dims {unknown}")
    cut = [Place(shape, number, AXIS_OF[dim]) for number, dim in enumerate(weight.dims) if AXIS_OF[dim] is not None]
    if len(cut) > 1:
        raise TypeError(f"parallel.layout.AXIS_OF cuts more than one dim of {weight.dims}")
    return cut[0] if cut else Place(shape, None, None)


@lru_cache(maxsize=64)
def layout_of(config: ModelConfig) -> Layout:
    """The placement of every logical parameter, by its name, in the model's order.

    Raises TypeError where a dim that an axis cuts is not made of units: no rule would then say which degrees divide
    it.
    """
    from modeling.logical import logical_parameters  # with torch, which the table above does without

    units, layout = units_of(config), {}
    for name, tensor in logical_parameters(config).items():
        place = layout[name] = place_of(tensor.weight, tensor.shape)
        if place.dim is None:
            continue
        dim, size = tensor.weight.dims[place.dim], tensor.shape[place.dim]
        cut = f"{name}: {place.axis} cuts its dim {dim}={size}"
        if dim not in units:
            raise TypeError(f"{cut}, of which modeling.dims.units_of has no units; state them there")
        if size % units[dim].count:
            told = f"the {units[dim].count} units that modeling.dims.units_of has of it ({units[dim].key})"
            raise TypeError(f"{cut}, which {told} do not divide; give it a dim of its own")
    return layout
