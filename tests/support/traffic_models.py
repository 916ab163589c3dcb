"""Small models with every kind of layer, for tests that count the bytes and gathers of a step."""

import dataclasses

from layout_runs import MOE_MODEL
from modeling.config import MLAConfig

LATENT = dataclasses.replace(
    MOE_MODEL,
    family="deepseek_v3",
    n_kv_heads=MOE_MODEL.n_heads,
    d_head=None,
    qk_norm=False,
    mla=MLAConfig(kv_lora_rank=10, q_lora_rank=14, d_nope=6, d_rope=4, d_v=7),
)
POST_NORM = dataclasses.replace(  # norms over all heads, whose means are summed over tp
    MOE_MODEL, family="olmo2", moe=None, d_head=None, norm_placement="post", qk_norm_over="all_heads", o_bias=True
)
PLAIN = dataclasses.replace(  # weights before the layers besides the embedding, biases everywhere, parallel blocks
    MOE_MODEL,
    family="gpt2",
    moe=None,
    d_head=None,
    n_layers=4,
    n_kv_heads=MOE_MODEL.n_heads,
    qk_norm=False,
    norm="layer",
    embedding_norm=True,
    parallel_block=True,
    qkv_bias=True,
    o_bias=True,
    ff_gated=False,
    ff_bias=True,
    positions="learned",
    max_positions=27,
)
