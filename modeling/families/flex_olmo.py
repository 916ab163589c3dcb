"""FlexOlmo (arXiv:2507.07024): OLMo 2's blocks, whose outputs are normed, with OLMoE's experts in every layer."""

from modeling.families.family import Family
from modeling.families.olmo2 import POST_NORMS
from modeling.families.olmoe import FAMILY as OLMOE
from modeling.families.shared import DECODER_CONSTANTS, DECODER_DEFAULTS

FAMILY = Family(
    architecture="FlexOlmoForCausalLM",
    weights={**OLMOE.weights, **POST_NORMS},
    keys=OLMOE.keys,
    constants=DECODER_CONSTANTS,
    ignored=OLMOE.ignored,
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "norm_topk_prob": False,
        "num_attention_heads": 32,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "rope_theta": 500000.0,
        "vocab_size": 100352,
    },
    aliases=OLMOE.aliases,
    equal=OLMOE.equal,
    # models/flex_olmo: FlexOlmoDecoderLayer norms the outputs of attention and mlp; all else is as in models/olmoe.
    allowed={**OLMOE.allowed, "norm_placement": ("post",)},
    published={},
)
