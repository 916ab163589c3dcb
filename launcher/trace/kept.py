"""Tells fp8 copies of weights that are kept between passes apart from other tensors made in a pass."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from modeling.kernels.fp8 import Fp8Products
from modeling.kernels.products import Products

Sort = Callable[[Mapping[str, Iterable[Tensor]]], None]  # assigns existing tensors to what they are for, by name


def sort_kept(products: Products, sort: Sort) -> None:
    """From now on, each fp8 copy of a weight that is newly made and kept is assigned to "weights" by ``sort``.

    Does nothing without fp8 products. Any module may be the first to make such a copy, hence the hook.
    """
    if isinstance(products, Fp8Products):
        products.cuts.kept_anew = lambda made: sort({"weights": made})
