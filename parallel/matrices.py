"""Whole matrices for optimizers that need them (such as Muon), gathered from the parts into which tp cuts them."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from modeling.optimizers.matrices import AT_ONCE, Function, Matrices, Read, Write
from parallel.collectives import gather_parts
from parallel.layout import Place
from parallel.mesh import Axis


class CutMatrices(Matrices):
    """Applies an optimizer's function to whole matrices, which are gathered over tp where tp cuts them.

    ``places``: each weight's placement. Experts' matrices are whole already, since ep cuts a stack between matrices.
    """

    def __init__(self, places: Mapping[Tensor, Place], tp: Axis, at_once: int = AT_ONCE) -> None:
        super().__init__(at_once)
        self.places = places
        self.tp = tp

    def transform(self, weight: Tensor, read: Read, function: Function, write: Write) -> None:
        """Writes ``function`` of the whole matrices that ``read`` has this rank's parts of. All ranks of tp call it."""
        super().transform(weight, read, partial(self.of_whole, weight, function=function), write)

    def of_whole(self, weight: Tensor, part: Tensor, function: Function) -> Tensor:
        """This rank's part of ``function``'s result on the whole matrices, of which it holds ``part``.

        Where tp cuts the matrices, they are all-gathered, and every rank of tp computes the same function of them: a
        rank sends (n-1)/n of the whole matrices' bytes. All ranks of tp call it.
        """
        place = self.places[weight]
        if place.axis != "tp" or place.dim is None:
            return function(part)
        return function(gather_parts(part, place.dim, self.tp)).chunk(self.tp.degree, place.dim)[self.tp.rank]
