"""Parameters and matrix-product FLOPs in closed form.

The conventions are those of PaLM (arXiv:2204.02311, appendix B): a multiply-add is two FLOPs, only matrix products
count (no softmax, norm or embedding look-up), recomputation does not count, and attention counts every key of the
sequence though half are masked, so that MFU compares with published figures. With a sliding window of W a token counts
W keys.
"""

from dataclasses import dataclass

from modeling.config import ModelConfig, MoEConfig


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters. Router biases are buffers and do not count; a tied matrix counts once."""

    total: int
    active: int  # what one token passes through: all but the experts that it is not sent to
    embedding: int  # of the total: embedding and head


def count_parameters(config: ModelConfig) -> Counts:
    """The numbers of the model's parameters."""
    embedding = config.vocab_size * config.d_model * (1 if config.tie_embeddings else 2)
    norms = 2 * config.d_model + (2 * config.head_dim if config.qk_norm else 0)  # of one layer
    total = active = embedding + config.d_model + config.n_layers * (attention_matrices(config) + norms)
    dense = (config.n_layers - config.n_moe_layers) * 3 * config.d_model * config.d_ff
    total, active = total + dense, active + dense
    if config.moe is not None:
        total += config.n_moe_layers * moe_matrices(config, config.moe, config.moe.n_experts)
        active += config.n_moe_layers * moe_matrices(config, config.moe, config.moe.top_k)
    return Counts(total, active, embedding)


def attention_matrices(config: ModelConfig) -> int:
    """Parameters of one layer's four attention projections."""
    return 2 * config.d_model * config.head_dim * (config.n_heads + config.n_kv_heads)


def moe_matrices(config: ModelConfig, moe: MoEConfig, n_experts: int) -> int:
    """Parameters of one MoE layer's router, shared experts and ``n_experts`` of its experts."""
    return config.d_model * (moe.n_experts + 3 * moe.d_ff * (n_experts + moe.n_shared_experts))


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of one token's forward pass in a sequence of ``seq_len`` tokens, head included."""
    keys = seq_len if config.sliding_window is None else min(seq_len, config.sliding_window)
    scores_and_sums = 4 * keys * config.n_heads * config.head_dim  # q k^T and probabilities times v
    multiplied = config.vocab_size * config.d_model + config.n_layers * attention_matrices(config)
    multiplied += (config.n_layers - config.n_moe_layers) * 3 * config.d_model * config.d_ff
    if config.moe is not None:
        multiplied += config.n_moe_layers * moe_matrices(config, config.moe, config.moe.top_k)
    return float(2 * multiplied + config.n_layers * scores_and_sums)


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of training on one token: the forward pass, and twice as many in the backward. What MFU is made of."""
    return 3 * forward_flops_per_token(config, seq_len)
