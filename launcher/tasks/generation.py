"""Generates texts for a task's generate_until requests, each up to the first of its stop strings.

Shape letters: B batch, S sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from launcher.errors import UserError
from launcher.sampling import sampling_rules
from modeling.decoder import Decoder
from modeling.generate import new_tokens

MAX_NEW_TOKENS = 256  # the default of the harness
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # synonyms; the first given wins
NUMBERS = ("temperature", "top_k", "top_p", *LENGTHS)
KNOWN = {"until", "do_sample", *NUMBERS}


@dataclass(frozen=True)
class Wanted:
    """How to sample a text, and where to end it: after a stop string or ``max_new_tokens`` tokens."""

    until: tuple[str, ...]
    max_new_tokens: int
    temperature: float  # 0: greedy
    top_k: int | None
    top_p: float | None


def wanted_of(options: Mapping[str, Any], end_of_text: str, max_length: int, request: Any) -> Wanted:
    """The sampling options in a task's generation_kwargs.

    ``end_of_text`` is added to the stop strings; ``max_length`` is the model's longest input, in tokens. Raises
    UserError for options that are unknown, malformed or out of range.
    """
    told = f"task {request.task_name}: generation_kwargs"
    unknown = sorted(set(options) - KNOWN)
    if unknown:
        raise UserError([f"{told} has {unknown[0]!r}, which is not known here; known are {', '.join(sorted(KNOWN))}"])
    until = options.get("until") or []
    if not isinstance(until, str | list | tuple):
        raise UserError([f"{told}: until={until!r:.50} must be a text, or a list of them; mend the task"])
    until = [until] if isinstance(until, str) else [str(each) for each in until]
    given = ((name, options[name]) for name in NUMBERS if options.get(name) is not None)
    numbers = {name: _number(told, name, value) for name, value in given}
    samples, temperature = options.get("do_sample"), numbers.get("temperature", 0.0)
    if samples and temperature == 0.0:
        temperature = 1.0
    lengths = [int(numbers[name]) for name in LENGTHS if name in numbers]
    n = lengths[0] if lengths else MAX_NEW_TOKENS
    if not 1 <= n < max_length:
        rule = f"must be at least 1 and below the {max_length} tokens that the model sees at once"
        raise UserError([f"{told}: max_gen_toks={n} {rule}; try {max(1, max_length // 2)}"])
    top_k = int(numbers.get("top_k", 0)) or None  # transformers' 0 means no limit, too
    broken = [
        f"{told}: {name}={value} {rule}"
        for name, value, rule in sampling_rules(temperature, top_k, numbers.get("top_p"))
    ]
    if broken:
        raise UserError(broken)
    return Wanted(
        until=tuple(dict.fromkeys([*filter(None, until), end_of_text])),
        max_new_tokens=n,
        temperature=0.0 if samples is False else temperature,
        top_k=top_k,
        top_p=numbers.get("top_p"),
    )


def _number(told: str, name: str, value: Any) -> float:
    """The value, which may be text, as a number; a whole one except for temperature and top_p. Raises UserError."""
    try:
        number = float(value)
        if name not in ("temperature", "top_p") and not number.is_integer():
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        kind = "a number" if name in ("temperature", "top_p") else "a whole number"
        raise UserError([f"{told}: {name}={value!r:.50} must be {kind}; mend the task, or leave it out"]) from None
    return number


def generate_all(
    model: Decoder,
    tokenizer: Any,
    wanted: Sequence[tuple[list[int], Wanted]],
    batch_size: int,
    seed: int,
    advance: Callable[[int], None] = lambda n: None,
    ends: Sequence[int] | None = None,
) -> list[str]:
    """The text generated after each prompt, in order; prompts of equal length and options are batched together.

    ``advance`` is called with the number of texts after each batch. ``ends`` are the tokens that end a text; None: the
    tokenizer's EOS.
    """
    alike: dict[tuple[int, Wanted], list[int]] = {}
    for number, (ids, each) in enumerate(wanted):
        alike.setdefault((len(ids), each), []).append(number)
    texts = [""] * len(wanted)
    for (_, each), numbers in alike.items():
        for start in range(0, len(numbers), batch_size):
            own = numbers[start : start + batch_size]
            found = generate_alike(model, tokenizer, [wanted[number][0] for number in own], each, seed, ends)
            for number, text in zip(own, found, strict=True):
                texts[number] = text
            advance(len(own))
    return texts


def generate_alike(
    model: Decoder,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    wanted: Wanted,
    seed: int,
    ends: Sequence[int] | None,
) -> list[str]:
    """The text generated after each of ``prompts``, which must be of one length, as one batch.

    Stops as soon as every text has a stop string.
    """
    tokens_BS = torch.tensor(prompts, device=model.embed.weight.device)
    made: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    tail = 1 + sum(len(stop.encode()) for stop in wanted.until)  # tokens to search; a token has at least one byte
    for token_B in new_tokens(
        model,
        tokens_BS,
        wanted.max_new_tokens,
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        eos_id=tokenizer.eos_token_id if ends is None else ends,
        seed=seed,
    ):
        for number, token in enumerate(token_B.tolist()):
            made[number].append(token)
            ended[number] = ended[number] or has_ended(tokenizer.decode(made[number][-tail:]), wanted.until)
        if all(ended):
            break
    return [cut(tokenizer.decode(ids, skip_special_tokens=True), wanted.until) for ids in made]


def has_ended(text: str, until: Sequence[str]) -> bool:
    """Whether the text contains one of the stop strings ``until``."""
    return any(stop in text for stop in until)


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    for stop in until:
        text = text.split(stop)[0]
    return text
