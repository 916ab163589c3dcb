"""Llama (arXiv:2302.13971): the dense decoder."""

from modeling.config import ModelConfig
from modeling.families.family import Family, OtherName
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    FEED_FORWARD,
    FEED_FORWARD_BIAS,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    O_BIAS,
    QKV_BIAS,
)
from modeling.rope_scaling import Llama3Scaling

# Both have a config class in transformers, which takes Llama's class for their models.
INTERNLM3 = OtherName(
    architecture="InternLM3ForCausalLM",
    defaults={
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10240,
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128512,
    },
    aliases={"bias": "mlp_bias", "qkv_bias": "attention_bias"},
    same={"attention_bias": "mlp_bias"},  # in the files' own code mlp_bias is that of attention's output too
)
IQUESTCODER = OtherName(
    architecture="IQuestCoderForCausalLM",
    defaults={
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "max_position_embeddings": 131072,
        "num_attention_heads": 40,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "pad_token_id": None,
        "rms_norm_eps": 1e-5,
        "vocab_size": 76800,
    },
    constants={"clip_qkv": None, "sliding_window": None, "use_sliding_window": False},
)

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_types={"internlm3": INTERNLM3, "iquestcoder": IQUESTCODER},
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **O_BIAS, **FEED_FORWARD, **FEED_FORWARD_BIAS},
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": "ff_bias",
    },
    constants=DECODER_CONSTANTS,
    ignored={},
    beside={"is_llama_config": True, "rope_interleaved": False},  # SmolLM2's files have them
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "vocab_size": 32000,
    },
    # models/llama: LlamaConfig itself demands hidden_size % num_attention_heads == 0.
    allowed={"qk_norm": (False,), "sliding_window": (None,)},
    heads_divide_d_model=True,
    equal=EQUAL_BIASES,
    published={
        "Llama-2-7B": ModelConfig(
            family="llama",
            vocab_size=32000,
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=32,
            d_ff=11008,
            norm_eps=1e-5,
        ),
        "Llama-3-8B": ModelConfig(
            family="llama",
            vocab_size=128256,
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14336,
            rope_theta=500000.0,
            norm_eps=1e-5,
        ),
        "Llama-3.1-405B": ModelConfig(
            family="llama",
            vocab_size=128256,
            d_model=16384,
            n_layers=126,
            n_heads=128,
            n_kv_heads=8,
            d_ff=53248,
            rope_theta=500000.0,
            rope_scaling=Llama3Scaling(),
            norm_eps=1e-5,
        ),
        "Llama-3.2-1B": ModelConfig(
            family="llama",
            vocab_size=128256,
            d_model=2048,
            n_layers=16,
            n_heads=32,
            n_kv_heads=8,
            d_head=64,
            d_ff=8192,
            tie_embeddings=True,
            rope_theta=500000.0,
            rope_scaling=Llama3Scaling(factor=32.0),
            norm_eps=1e-5,
        ),
    },
)
