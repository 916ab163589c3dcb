"""Which of a model's modules have chains of elementwise work, and how these are computed from now on."""

from torch import nn

from modeling.feed_forward import FeedForward
from modeling.kernels.fuse import Fuse
from modeling.linear_attention import GatedNorm
from modeling.loss import Head
from modeling.mixer import Mixer
from modeling.moe import Experts, MoE
from modeling.norm import Norm
from modeling.router import Router


def fuse_chains(model: nn.Module, fuse: Fuse) -> None:
    """Has the model's chains of elementwise work computed by ``fuse``; what ends in a router's choice stays plain."""
    for module in model.modules():
        if isinstance(module, Norm | GatedNorm | Mixer | FeedForward | Experts | MoE | Head):
            module.fuse = fuse
        elif isinstance(module, Router):
            module.fuse_weights = fuse
