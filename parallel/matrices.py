"""Whole matrices for optimizers that need them, from the parts into which tp cuts them."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from modeling.optimizers.matrices import AT_ONCE, Function, Matrices, Read, Write
from parallel.collectives import gather_parts
from parallel.layout import Place
from parallel.mesh import Axis


class CutMatrices(Matrices):
    """Gathers what lies on several ranks of tp. Experts' matrices are whole already: ep cuts stacks between them."""

    def __init__(self, places: Mapping[Tensor, Place], tp: Axis, at_once: int = AT_ONCE) -> None:
        super().__init__(at_once)
        self.places = places
        self.tp = tp

    def transform(self, weight: Tensor, read: Read, function: Function, write: Write) -> None:
        """All ranks of tp call it."""
        super().transform(weight, read, partial(self.of_whole, weight, function=function), write)

    def of_whole(self, weight: Tensor, part: Tensor, function: Function) -> Tensor:
        """``function`` of matrices of which ``part`` is this rank's, and of its result this rank's part.

        Every rank of tp computes the same of the gathered matrices. All of them call it.
        """
        place = self.places[weight]
        if place.axis != "tp" or place.dim is None:
            return function(part)
        return function(gather_parts(part, place.dim, self.tp)).chunk(self.tp.degree, place.dim)[self.tp.rank]
