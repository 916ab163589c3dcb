"""Whole matrices for optimizers that need them, from the parts into which tp cuts them."""

from collections.abc import Callable, Mapping

from torch import Tensor

from modeling.optimizers.matrices import Matrices
from parallel.collectives import gather_parts
from parallel.layout import Place
from parallel.mesh import Axis


class CutMatrices(Matrices):
    """Gathers what lies on several ranks of tp. Experts' matrices are whole already: ep cuts stacks between them."""

    def __init__(self, places: Mapping[Tensor, Place], tp: Axis) -> None:
        self.places = places
        self.tp = tp

    def of_whole(self, weight: Tensor, part: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Every rank of tp computes the same of the gathered matrix and keeps its own elements. All of them call it."""
        place = self.places[weight]
        if place.axis != "tp" or place.dim is None:
            return function(part)
        return function(gather_parts(part, place.dim, self.tp)).chunk(self.tp.degree, place.dim)[self.tp.rank]
