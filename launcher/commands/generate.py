"""`roundtable generate`: continuing a prompt with a trained model."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from data.tokenizer import after_bos, making_tokens
from launcher.commands.trained import (
    bos_id,
    end_ids,
    load_decoder,
    load_tokenizer,
    open_trained,
    refusing_spoiled_weights,
)
from launcher.console import readable, say
from launcher.errors import UserError
from launcher.sampling import sampling_rules
from modeling.decoder import Decoder
from modeling.generate import new_tokens
from parallel.processes.stop import undoing

MOST_NEW_TOKENS = 1_000_000  # each token looks at all before it: more would never come to an end


@undoing()
def generate_from_checkpoint(
    checkpoint: Path | str,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> str:
    """Prints and returns ``prompt`` and its continuation by ``checkpoint`` (a run directory or one checkpoint's).

    Computes in bf16 on a GPU where there is one, else in fp32 on the CPU. Raises UserError where an argument is wrong,
    or the model's logits are not finite.
    """
    prompt, problems = readable(prompt, "--prompt")
    problems += argument_problems(max_new_tokens, temperature, top_k, top_p, seed)
    if problems:
        raise UserError(problems)
    trained = open_trained(checkpoint)
    if not prompt and not trained.config.data.add_bos:
        rule = "must not be empty: the model has only seen how texts go on"
        raise UserError([f'--prompt="" {rule}; try --prompt "def "'])
    if trained.tokenizer is None:
        raise UserError(
            [f"CHECKPOINT={checkpoint} holds no tokenizer, so text cannot be made; set data.tokenizer and train on"]
        )
    tokenizer = load_tokenizer(trained)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with refusing_spoiled_weights(trained):
        return generate_text(
            load_decoder(trained, device, dtype),
            tokenizer,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            out=sys.stdout,
            ends=end_ids(trained, tokenizer),
            begin=bos_id(trained),
        )


def argument_problems(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> list[str]:
    """What is wrong with the options, one line each."""
    problems = []
    if max_new_tokens < 1:
        problems.append(f"--max-new-tokens={max_new_tokens} must be at least 1; try 200")
    if max_new_tokens > MOST_NEW_TOKENS:
        problems.append(f"--max-new-tokens={max_new_tokens} must be at most {MOST_NEW_TOKENS}; try 200")
    for name, value, rule in sampling_rules(temperature, top_k, top_p):
        problems.append(f"--{name.replace('_', '-')}={value} {rule}")
    if not 0 <= seed < 2**63:
        problems.append(f"--seed={seed} must lie between 0 and 2^63 - 1; try 0")
    return problems


def generate_text(
    model: Decoder,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    out: TextIO,
    ends: Sequence[int] | None = None,
    begin: int | None = None,
) -> str:
    """``prompt`` and its continuation, also written to ``out``; on a terminal, token by token.

    Generation stops at one of the ids ``ends`` (None: the tokenizer's EOS), or after ``max_new_tokens``. ``begin``: the
    BOS id that is put before the prompt's tokens unless the prompt begins with it; None: no BOS.
    """
    with making_tokens(f"--prompt={prompt!r}"):
        prompt_ids = after_bos(tokenizer.encode(prompt, add_special_tokens=False), begin)
    if not prompt_ids:
        rule = "must have a token, and this tokenizer makes none of it"
        raise UserError([f"--prompt={prompt!r} {rule}; give other text"])
    check_length(len(prompt_ids), max_new_tokens, model.max_positions)
    tokens_BS = torch.tensor([prompt_ids], device=model.embed.weight.device)
    shown = ""
    new_ids: list[int] = []
    for token_B in new_tokens(
        model,
        tokens_BS,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_id=tokenizer.eos_token_id if ends is None else ends,
        seed=seed,
    ):
        new_ids.append(int(token_B))
        if out.isatty():
            shown = write_rest(out, shown, settled(tokenizer.decode(prompt_ids + new_ids, skip_special_tokens=True)))
    text = tokenizer.decode(prompt_ids + new_ids, skip_special_tokens=True)
    write_rest(out, shown, text + "\n")
    return text


def check_length(prompt_length: int, max_new_tokens: int, max_positions: int | None) -> None:
    """Raises UserError where the text would exceed the learned positions; the last new token needs no position."""
    if max_positions is None or prompt_length + max_new_tokens - 1 <= max_positions:
        return
    rows = f"model.max_positions={max_positions}"
    if prompt_length > max_positions:
        raise UserError([f"--prompt has {prompt_length} tokens, and must have at most {rows}; shorten it"])
    fitting = max_positions - prompt_length + 1
    told = f"--max-new-tokens={max_new_tokens} after a prompt of {prompt_length} tokens must stay within {rows}"
    raise UserError([f"{told}; try {fitting}"])


def settled(text: str) -> str:
    """``text`` without a last character that is still incomplete, as tokens may end within a character's bytes."""
    return text.rstrip("\ufffd")


def write_rest(out: TextIO, shown: str, text: str) -> str:
    """Writes what ``text`` adds to the text already ``shown``; returns all that is shown now."""
    say(text[len(shown) :], file=out, end="", raw=not out.isatty())
    return max(shown, text, key=len)
