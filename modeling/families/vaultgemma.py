"""VaultGemma (Google, 2025): Gemma 2 with norms before blocks alone."""

from modeling.families.family import Family
from modeling.families.gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from modeling.families.gemma2 import FAMILY as GEMMA2
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    EQUAL_BIASES,
    FEED_FORWARD,
    O_BIAS,
    QKV_BIAS,
    WINDOW,
)

FAMILY = Family(
    architecture="VaultGemmaForCausalLM",
    weights={
        **DECODER,
        "layers.{layer}.feed_forward_norm.weight": "model.layers.{layer}.pre_feedforward_layernorm.weight",
        **ATTENTION,
        **QKV_BIAS,
        **O_BIAS,
        **FEED_FORWARD,
    },
    keys={**GEMMA2.keys, "attention_bias": ATTENTION_BIAS},
    constants={"hidden_activation": "gelu_pytorch_tanh"},
    ignored={},
    defaults={**GEMMA2_DEFAULTS, "attention_bias": False},
    completed=GEMMA2.completed,
    heads_divide_d_model=True,
    equal=EQUAL_BIASES,
    whole=GEMMA2.whole,
    derived=GEMMA2.derived,
    # models/vaultgemma: VaultGemmaRMSNorm adds one to its weights.
    allowed={"activation": ("gelu_tanh",), "norm_adds_one": (True,)},
    at_least=WINDOW,
    published={},
)
