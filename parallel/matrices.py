"""Whole matrices for optimizers that need them, from the parts into which tp cuts them."""

from collections.abc import Mapping

from torch import Tensor, nn

from modeling.optimizers.matrices import Matrices
from parallel.collectives import gather_parts
from parallel.layout import Place
from parallel.mesh import Axis


class CutMatrices(Matrices):
    """Gathers what lies on several ranks of tp. Experts' matrices are whole already: ep cuts stacks between them."""

    def __init__(self, places: Mapping[nn.Parameter, Place], tp: Axis) -> None:
        self.places = places
        self.tp = tp

    def gather(self, weight: nn.Parameter, part: Tensor) -> Tensor:
        """The same matrix on every rank of tp, from what is laid out as the ranks' weights are. All of them call it."""
        dim = self._cut_dim(weight)
        return part if dim is None else gather_parts(part, dim, self.tp)

    def own_part(self, weight: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's elements."""
        dim = self._cut_dim(weight)
        return whole if dim is None else whole.chunk(self.tp.degree, dim)[self.tp.rank]

    def _cut_dim(self, weight: nn.Parameter) -> int | None:
        place = self.places[weight]
        return place.dim if place.axis == "tp" else None
