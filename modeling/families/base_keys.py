"""Keys of config.json that all config classes share: those of their base class, and settings of generation.

Old versions of transformers 4 wrote all of them to each file. They do not change what a decoder computes, or do not at
one value.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from modeling.families.values import shown

# Keys of the base class that are ignored at any value.
PASSED_OVER = frozenset(
    {
        *("decoder_start_token_id", "finetuning_task", "gradient_checkpointing", "is_decoder", "num_labels"),
        *("sep_token_id", "task_specific_params", "tf_legacy_loss", "use_bfloat16", "xla_device"),
    }
)
# Keys of the base class, with the only value that changes nothing.
DEFAULTS: dict[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "prefix": None,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "torchscript": False,
}
# Settings of generation, with transformers' defaults. Version 5 does not read them here.
GENERATION: dict[str, Any] = {
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_scores": False,
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict_in_generate": False,
    "suppress_tokens": None,
    "target_lookbehind": 10,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
}
MOST_LISTED = 6


def settings_beside(content: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    """A line where a config.json has settings of generation that change something and are not in ``kept``.

    ``kept`` is the content of generation_config.json; an empty one where there is none. A setting that is null means
    its default.
    """
    told = {key: content[key] for key in GENERATION if content.get(key) is not None}
    others = [key for key, value in told.items() if value != GENERATION[key] and kept.get(key) != value]
    if others:
        listed = [f"{key}={shown(content[key])}" for key in others[:MOST_LISTED]]
        more = [f"{len(others) - MOST_LISTED} more"] if len(others) > MOST_LISTED else []
        yield f"settings of generation are not kept from here ({', '.join([*listed, *more])})"
