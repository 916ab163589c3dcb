"""Text generation, one token at a time, with a cache of the keys and values of earlier tokens.

Shape letters: B batch, S sequence, V vocab_size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from modeling.context import Context
from modeling.decoder import Decoder
from modeling.kv_cache import KVCache


@torch.no_grad()
def generate(
    model: Decoder,
    tokens_BS: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | Sequence[int] | None = None,
    seed: int = 0,
) -> Tensor:
    """The prompts with the generated tokens appended: int64 (B, S + n). The arguments are those of ``new_tokens``."""
    new = new_tokens(
        model, tokens_BS, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, eos_id=eos_id, seed=seed
    )
    return torch.cat([tokens_BS, *(token_B[:, None] for token_B in new)], dim=1)


@torch.no_grad()
def new_tokens(
    model: Decoder,
    tokens_BS: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | Sequence[int] | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yields each sequence's next token, int64 (B,), until all have met ``eos_id`` or there are ``max_new_tokens``.

    The prompts (B, S) have one length of at least 1 and each is one document. ``temperature`` 0 takes the likeliest
    token. ``top_k`` keeps that many tokens, then ``top_p`` the fewest whose probabilities sum to it (nucleus sampling,
    Holtzman et al. 2020, arXiv:1904.09751). Any of several ``eos_id`` ends a sequence, which then repeats the first of
    them. Tokens are drawn on the CPU from ``seed``.

    Raises ValueError where the table of learned positions is too short for the sequence, and FloatingPointError where a
    sequence's largest logit is NaN or infinite.
    """
    last = tokens_BS.shape[1] + max_new_tokens - 1
    if model.max_positions is not None and last > model.max_positions:
        raise ValueError(f"{last} positions are needed, and the table has {model.max_positions}")
    generator = torch.Generator().manual_seed(seed)
    cache, seen = KVCache(len(model.own_layers)), [tokens_BS]
    ended_B = torch.zeros(tokens_BS.shape[0], dtype=torch.bool, device=tokens_BS.device)
    eos_ids = [eos_id] if isinstance(eos_id, int) else [*(eos_id or ())]
    for _ in range(max_new_tokens):
        if is_stale(cache, tokens_BS.shape[1], model.cached_up_to):
            cache, tokens_BS = KVCache(len(model.own_layers)), torch.cat(seen, dim=1)
        logits_BV = next_logits(model, tokens_BS, cache)
        if not logits_BV.amax(-1).isfinite().all():
            raise FloatingPointError(f"the logits after token {cache.length} are NaN or infinite")
        token_B = choose(logits_BV, temperature, top_k, top_p, generator)
        if eos_ids:
            token_B = torch.where(ended_B, eos_ids[0], token_B)
        for each in eos_ids:
            ended_B |= token_B == each
        yield token_B
        if ended_B.all():
            return
        tokens_BS = token_B[:, None]
        seen.append(tokens_BS)


def is_stale(cache: KVCache, n_new: int, cached_up_to: int | None) -> bool:
    """Whether with ``n_new`` more tokens the sequences are so long that cached keys are no longer valid (LongRoPE)."""
    return cached_up_to is not None and cache.length <= cached_up_to < cache.length + n_new


def next_logits(model: Decoder, tokens_BS: Tensor, cache: KVCache) -> Tensor:
    """The fp32 logits (B, V) after the last of ``tokens_BS``, which continue the sequences in ``cache``."""
    positions_S = torch.arange(cache.length, cache.length + tokens_BS.shape[1], device=tokens_BS.device)
    context = Context(positions_S.expand_as(tokens_BS), torch.zeros_like(tokens_BS))
    logits_BSV = model(tokens_BS, context, cache=cache).logits_BSV
    assert logits_BSV is not None
    return logits_BSV[:, -1].float()


def choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """One token for each row of logits: int64 (B,)."""
    if temperature == 0.0:
        return logits_BV.argmax(-1)
    device = logits_BV.device
    logits_BV = logits_BV.cpu() / temperature
    if top_k is not None and top_k < logits_BV.shape[1]:
        smallest_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, float("-inf"))
    probabilities_BV = logits_BV.softmax(-1)
    if top_p is not None:
        probabilities_BV = nucleus(probabilities_BV, top_p)
    return torch.multinomial(probabilities_BV, 1, generator=generator).squeeze(1).to(device)


def nucleus(probabilities_BV: Tensor, top_p: float) -> Tensor:
    """``probabilities_BV`` with zeros outside the fewest tokens whose sum reaches ``top_p``, at least one."""
    ranked_BV, order_BV = probabilities_BV.sort(-1, descending=True)
    before_BV = ranked_BV.cumsum(-1) - ranked_BV
    ranked_BV = ranked_BV.masked_fill((before_BV >= top_p) & (before_BV > 0), 0.0)
    return torch.zeros_like(probabilities_BV).scatter(-1, order_BV, ranked_BV)
