"""How a model's layers multiply under each precision of the config."""

from torch import nn

from modeling.kernels.fp8 import Fp8Products
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.products import AS_THEY_ARE, Products
from modeling.linear import Linear
from modeling.moe import Experts
from modeling.precision_config import Precision


def products_of(precision: Precision, fuse: Fuse = plainly, *, keeps_weights: bool = False) -> Products:
    """How layers multiply by their weights under ``precision``. ``fuse`` says how elementwise chains are computed.

    With ``keeps_weights``, weights that were quantized to 8 bits are kept until they change
    (modeling.kernels.cuts.Cuts).
    """
    return Fp8Products(fuse, keeps_weights=keeps_weights) if precision == "fp8" else AS_THEY_ARE


def multiply_by(model: nn.Module, products: Products) -> None:
    """Sets how attention's projections, feed-forward layers and experts multiply to ``products``.

    The head, the routers, and projections to one gate in all or one for each head are left out: their products are few,
    and rounding matters most in them.
    """
    for module in model.modules():
        if isinstance(module, Experts) or (isinstance(module, Linear) and module.stated["weight"].takes_8_bits):
            module.products = products
