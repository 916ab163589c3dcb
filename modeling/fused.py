"""Which of a model's modules have chains of elementwise work, and how these are computed from now on."""

from torch import nn

from modeling.attention import Attention
from modeling.feed_forward import FeedForward
from modeling.kernels.fuse import Fuse
from modeling.loss import Head
from modeling.moe import Experts
from modeling.norm import LayerNorm, RMSNorm


def fuse_chains(model: nn.Module, fuse: Fuse) -> None:
    """Has the model's chains of elementwise work computed by ``fuse``; the router's stays plain."""
    for module in model.modules():
        if isinstance(module, RMSNorm | LayerNorm | Attention | FeedForward | Experts | Head):
            module.fuse = fuse
