"""The seam at which an optimizer that needs whole matrices gets them."""

from torch import Tensor, nn


class Matrices:
    """On one device every matrix is whole. ``parallel.matrices`` has the version that communicates."""

    def gather(self, weight: nn.Parameter, part: Tensor) -> Tensor:
        """The whole matrices of which ``part``, of the shape of ``weight``, is held here."""
        return part

    def own_part(self, weight: nn.Parameter, whole: Tensor) -> Tensor:
        """What of ``whole`` lies where ``weight`` does."""
        return whole
