"""What a precision means for a model: the dtype of its weights and activations, and how its layers multiply."""

from torch import nn

from modeling.kernels.fp8 import Fp8Products
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.products import AS_THEY_ARE, Products
from modeling.linear import Linear
from modeling.moe import Experts
from modeling.precision_config import Precision


def products_of(precision: Precision, fuse: Fuse = plainly, *, keeps_weights: bool = False) -> Products:
    """How layers multiply by their weights. ``fuse``: how chains of elementwise work are computed.

    ``keeps_weights``: weights that were cut to 8 bits stay until they change (modeling.kernels.cuts.Cuts).
    """
    return Fp8Products(fuse, keeps_weights=keeps_weights) if precision == "fp8" else AS_THEY_ARE


def multiply_by(model: nn.Module, products: Products) -> None:
    """Gives ``products`` to attention's projections, feed-forward layers and experts.

    Not to the head, the routers, gates of one channel and gates of a head each: their products are few, and their
    rounding tells most.
    """
    for module in model.modules():
        if isinstance(module, Experts) or (isinstance(module, Linear) and module.stated["weight"].takes_8_bits):
            module.products = products
