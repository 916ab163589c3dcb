"""StarCoder2 (arXiv:2402.19173): grouped queries, a layer norm, no gates, biases everywhere or nowhere."""

from modeling.families.family import Family, Key
from modeling.families.shared import (
    ACTIVATION,
    ATTENTION,
    DECODER,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    FEED_FORWARD_KEYS,
    NORM_BIAS,
    O_BIAS,
    QKV_BIAS,
    WINDOW,
    with_bias,
)

OURS, THEIRS = "layers.{layer}", "model.layers.{layer}"

FAMILY = Family(
    architecture="Starcoder2ForCausalLM",
    weights={
        **DECODER,
        **ATTENTION,
        **QKV_BIAS,
        **O_BIAS,
        **NORM_BIAS,
        **with_bias(f"{OURS}.feed_forward.up", f"{THEIRS}.mlp.c_fc"),
        f"{OURS}.feed_forward.down.weight": f"{THEIRS}.mlp.c_proj.weight",
        f"{OURS}.feed_forward.down_bias.bias": f"{THEIRS}.mlp.c_proj.bias",
    },
    keys={
        **{key: ours for key, ours in DECODER_KEYS.items() if key != "rms_norm_eps"},
        **FEED_FORWARD_KEYS,
        "embedding_dropout": "embedding_dropout",
        "hidden_act": ACTIVATION,
        "norm_epsilon": "norm_eps",
        "residual_dropout": "residual_dropout",
        "sliding_window": "sliding_window",
        "use_bias": Key(
            ours=("qkv_bias", "o_bias", "ff_bias"),
            write=lambda config: config.qkv_bias,
            read=lambda has: {"qkv_bias": has, "o_bias": has, "ff_bias": has},
        ),
    },
    constants={},
    ignored={},
    defaults={
        **DECODER_DEFAULTS,
        "embedding_dropout": 0.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072,
        "initializer_range": 0.018042,
        "intermediate_size": 12288,
        "norm_epsilon": 1e-5,
        "num_attention_heads": 24,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "residual_dropout": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_bias": True,
        "vocab_size": 49152,
    },
    equal=(*EQUAL_BIASES, ("qkv_bias", "ff_bias")),
    # models/starcoder2: d_model / n_heads channels a head; one mask for all layers; the norms always have biases.
    allowed={"d_head": (None,), "ff_gated": (False,), "norm": ("layer",)},
    at_least=WINDOW,
    published={},
)
