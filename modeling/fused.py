"""Sets how a model's modules compute their chains of elementwise operations: plainly, or compiled."""

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
    """Has ``fuse`` compute the model's elementwise chains. Router scores, which decide choices, stay as they are."""
    for module in model.modules():
        if isinstance(module, Norm | GatedNorm | Mixer | FeedForward | Experts | MoE | Head):
            module.fuse = fuse
        elif isinstance(module, Router):
            module.fuse_weights = fuse
