"""Weights that are kept in 8 bits, told apart from what passes make besides."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from modeling.kernels.fp8 import Fp8Products
from modeling.kernels.products import Products

Sort = Callable[[Mapping[str, Iterable[Tensor]]], None]  # says of tensors that are there what they are for


def sort_kept(products: Products, sort: Sort) -> None:
    """From now on weights that are cut anew, and kept, are told as weights: any module may be the first to cut one."""
    if isinstance(products, Fp8Products):
        products.cuts.kept_anew = lambda made: sort({"weights": made})
