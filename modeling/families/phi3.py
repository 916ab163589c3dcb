"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): queries, keys and values from one matrix in the files."""

from modeling.config import ModelConfig
from modeling.families.family import Family, Key
from modeling.families.packed import packed
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    GATE_UP,
    WINDOW,
    whole_number,
)
from modeling.rope_scaling import LongRopeScaling

PHI_4_MINI_LONG = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
    16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
    32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)  # fmt: skip


def original_length(config: ModelConfig) -> int:
    """The class's length of the sequences first trained on, which matters where frequencies are scaled."""
    scaling = config.rope_scaling
    return scaling.original_seq_len if isinstance(scaling, LongRopeScaling) else 4096


FAMILY = Family(
    architecture="Phi3ForCausalLM",
    weights={
        **DECODER,
        **ATTENTION,
        **FEED_FORWARD,
        **packed(
            "model.layers.{layer}.self_attn.qkv_proj.weight",
            "layers.{layer}.attention.q.weight",
            "layers.{layer}.attention.k.weight",
            "layers.{layer}.attention.v.weight",
        ),
        **GATE_UP,
    },
    keys={
        **DECODER_KEYS,
        **FEED_FORWARD_KEYS,
        "resid_pdrop": "residual_dropout",
        "sliding_window": "sliding_window",
        "original_max_position_embeddings": Key(ours=(), write=original_length, read=whole_number),
    },
    constants={**DECODER_CONSTANTS, "attention_bias": False},
    ignored={"embd_pdrop": 0.0},  # the class ignores it
    passed_over=frozenset(
        {"full_attn_mod", "interpolate_factor", "lm_head_bias", "mlp_bias"}
    ),  # Phi-4-mini's file has them
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "vocab_size": 32064,
    },
    turns_a_part=True,
    rope_scalings=("longrope",),
    rope_aliases={"su": "longrope", "yarn": "longrope"},  # as its first versions called it
    # models/phi3: d_model / n_heads channels a head; one mask for all layers, sliding where sliding_window is set.
    allowed={"d_head": (None,)},
    at_least=WINDOW,
    published={
        "Phi-3-mini-4k": ModelConfig(
            family="phi3",
            vocab_size=32064,
            d_model=3072,
            n_layers=32,
            n_heads=32,
            n_kv_heads=32,
            d_ff=8192,
            sliding_window=2047,
            norm_eps=1e-5,
        ),
        "Phi-4-mini": ModelConfig(
            family="phi3",
            vocab_size=200064,
            d_model=3072,
            n_layers=32,
            n_heads=24,
            n_kv_heads=8,
            d_ff=8192,
            tie_embeddings=True,
            sliding_window=262144,
            rope_fraction=0.75,
            rope_scaling=LongRopeScaling(
                original_seq_len=4096, longest_seq_len=131072, short_factor=(1.0,) * 48, long_factor=PHI_4_MINI_LONG
            ),
            norm_eps=1e-5,
        ),
        "Phi-4": ModelConfig(
            family="phi3",
            vocab_size=100352,
            d_model=5120,
            n_layers=40,
            n_heads=40,
            n_kv_heads=10,
            d_ff=17920,
            rope_theta=250000.0,
            norm_eps=1e-5,
        ),
    },
)
