"""Arcee (AFM): Llama with feed-forward layers that have no gate, and the square of ReLU."""

from dataclasses import replace

from modeling.families.llama import FAMILY as LLAMA
from modeling.families.shared import ACTIVATION, ATTENTION, DECODER, O_BIAS, QKV_BIAS, UNGATED

FAMILY = replace(
    LLAMA,
    architecture="ArceeForCausalLM",
    model_types={},
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **O_BIAS, **UNGATED},
    keys={**LLAMA.keys, "hidden_act": ACTIVATION},
    constants={},
    beside={},
    defaults={
        **LLAMA.defaults,
        "hidden_act": "relu2",
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "rms_norm_eps": 1e-5,
    },
    # models/arcee: NemotronMLP; ArceeConfig itself demands hidden_size % num_attention_heads == 0.
    allowed={"ff_gated": (False,)},
    published={},
)
