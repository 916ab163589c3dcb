"""Counts of parameters and of matrix-product FLOPs, from the logical tensors' shapes and dims.

The conventions are those of PaLM (arXiv:2204.02311, appendix B): a multiply-add is two FLOPs, only matrix products
count (no softmax, norm or embedding look-up), recomputation does not count, and attention counts every key of the
sequence though half are masked, so that MFU compares with published figures. With a sliding window of W a token counts
W keys. In linear attention the three products of a token with its head's matrix count: reading under the key, writing,
and reading under the query.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modeling.config import ModelConfig

if TYPE_CHECKING:
    from modeling.logical import LogicalTensor


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters. Router biases are buffers and do not count; a tied matrix counts once."""

    total: int
    active: int  # what one token passes through: all but the experts that it is not sent to
    embedding: int  # of the total: embedding, learned positions and head


def count_parameters(config: ModelConfig) -> Counts:
    """The numbers of the model's parameters."""
    tensors = _parameters(config)
    return Counts(
        total=sum(tensor.numel for tensor in tensors),
        active=sum(active_elements(config, tensor) for tensor in tensors),
        embedding=sum(tensor.numel for tensor in tensors if tensor.weight.is_embedding),
    )


def _parameters(config: ModelConfig) -> "list[LogicalTensor]":
    from modeling.logical import logical_parameters  # imports torch, which reading a config should not need

    return list(logical_parameters(config).values())


def active_elements(config: ModelConfig, tensor: "LogicalTensor") -> int:
    """The elements of a tensor that one token passes through: of experts, top_k of n_experts."""
    if config.moe is None or not tensor.is_expert:
        return tensor.numel
    return tensor.numel // config.moe.n_experts * config.moe.top_k


def multiplied_by_layer(config: ModelConfig) -> list[int]:
    """For each layer, the number of elements of the matrices by which one token's hidden state is multiplied.

    The layers of multi-token prediction come last, with their projections.
    """
    sums = [0] * len(config.all_layers)
    for tensor in _parameters(config):
        if tensor.layer is not None and tensor.weight.is_matrix:
            sums[tensor.layer] += active_elements(config, tensor)
    return sums


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of one token's forward pass in training, in a sequence of ``seq_len`` tokens, the head included.

    The modules of multi-token prediction count, each with one more pass through the head.
    """
    linear = config.linear_attention
    to_keys = [layer for layer in config.all_layers if not config.is_linear_layer(layer)]
    keys = sum(min(seq_len, config.window_of(layer) or seq_len) for layer in to_keys)
    # Queries times keys, and probabilities times values.
    scores_and_sums = 2 * keys * config.n_heads * (config.qk_head_dim + config.v_head_dim)
    heads = (1 + len(config.mtp_layers)) * config.vocab_size * config.d_model
    multiplied = heads + sum(multiplied_by_layer(config))
    n_linear = len(config.all_layers) - len(to_keys)
    states = 0 if linear is None else n_linear * 3 * 2 * linear.n_v_heads * linear.d_k * linear.d_v
    return float(2 * multiplied + scores_and_sums + states)


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of training on one token: the forward pass, and twice as many in the backward pass.

    MFU is based on these.
    """
    return 3 * forward_flops_per_token(config, seq_len)
