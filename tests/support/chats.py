"""Chats, templates and a tokenizer for them, small enough for tests."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data.config import ChatConfig, DataConfig, SourceConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pre>", "<mid>", "<suf>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (  # no special tokens, no prompt for an answer: as the earliest templates were
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # earlier answers are written otherwise once another message follows
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if not loop.last and m['role'] == 'assistant' %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CALLING = CHATML.replace(  # tools and calls are written as JSON
    "m['content'] +", "m['content'] }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{{"
).replace("{% for m", "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m", 1)


def messages(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages with these contents, alternately of user and assistant, after a ``system`` message if given."""
    roles = ("user", "assistant") * len(contents)
    said = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return said if system is None else [{"role": "system", "content": system}, *said]


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    """A chat record in which the assistant calls the tool ``name`` with these arguments."""
    properties = {each: {"type": "string"} for each in arguments}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    rest = [{"role": "tool", "content": "so"}, {"role": "assistant", "content": "it is"}]
    return {"messages": [*messages("what is it?"), call, *rest], "tools": [{"function": function}]}


def save_chat_tokenizer(folder: Path, template: str | None = CHATML) -> int:
    """Saves a tokenizer of the bytes, some merges and SPECIAL; returns its vocabulary's size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["what is the answer to this? the answer is that it is"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    fast.chat_template = template
    fast.save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Writes these records to a jsonl file; returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_config(folder: Path, path: Path | str, **more: Any) -> DataConfig:
    """A data config with one source of chats, ``path``, and the tokenizer in ``folder``/tokenizer."""
    source = {name: more.pop(name) for name in ("max_bad_share",) if name in more}
    data = {name: more.pop(name) for name in ("packing", "seq_len", "shard_bytes", "workers") if name in more}
    return DataConfig(
        **{"seq_len": 24, "workers": 1, **data},
        sources=(SourceConfig(path=str(path), chat=ChatConfig(**more), **source),),
        tokenizer=str(folder / "tokenizer"),
        token_dir=str(folder / "tokens"),
        heldout_fraction=0.0,
    )
