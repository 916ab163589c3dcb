"""Moves the routers' selection biases after a step, for models balanced by bias."""

from typing import assert_never

import torch
from torch import Tensor

from modeling.balance import updated_bias
from modeling.config import ModelConfig
from modeling.decoder import Decoder, DecoderLayer
from modeling.moe import MoE
from modeling.moe_config import BiasBalance, NoBalance, SequenceAuxBalance


@torch.no_grad()
def move_router_biases(model: Decoder, config: ModelConfig, counts: dict[int, Tensor]) -> None:
    """Moves each router's selection bias towards an even load, if the config balances by bias; otherwise does nothing.

    ``counts`` are, by layer, the token-expert pairs sent to each expert (E,), summed over the whole global batch.
    """
    if config.moe is None:
        return
    match config.moe.balance:
        case BiasBalance(rate=rate):
            for layer in model.layers.values():
                assert isinstance(layer, DecoderLayer)
                moe = layer.feed_forward
                if isinstance(moe, MoE) and moe.router.bias is not None:
                    moe.router.bias = updated_bias(moe.router.bias, counts[layer.layer], rate)
        case SequenceAuxBalance() | NoBalance():
            pass
        case _:
            assert_never(config.moe.balance)
