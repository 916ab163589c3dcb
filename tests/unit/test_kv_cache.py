"""What a cache holds: no more than a later query can see, and of latent attention the latents."""

from dataclasses import replace

import pytest
import torch

import modeling.kv_cache
from modeling.attention import Attention
from modeling.config import FAMILIES, AttentionGate, FamilyName, ModelConfig
from modeling.context import Context
from modeling.decoder import Decoder
from modeling.families.family import family_of
from modeling.generate import generate, next_logits
from modeling.kv_cache import KVCache, LayerCache
from small_models import build, example_config, expressible

B, FP32, INT64 = 2, 4, 8
PLACES = 2 * INT64  # bytes of a token's position and document
MLA_FAMILIES = [name for name in FAMILIES if family_of(name).has("mla")]
WINDOW_FAMILIES = [name for name in FAMILIES if expressible(name, "sliding_window", [5])]
PATTERN_FAMILIES = [name for name in WINDOW_FAMILIES if expressible(name, "full_attention_layers", [(0,)])]


def held_bytes(layer: LayerCache) -> int:
    """Of the memory that a layer's tensors keep alive, of which they may be a part alone."""
    assert layer.held is not None
    tensors = (*layer.held.kept, layer.held.positions_BP, layer.held.documents_BP)
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def held_tokens(layer: LayerCache) -> int:
    """Of each sequence."""
    assert layer.held is not None
    (length,) = {tensor.shape[1] for tensor in layer.held.kept}
    return length


def after(model: Decoder, config: ModelConfig, prompt: int, new: int) -> KVCache:
    """The cache after a prompt of so many tokens and so many more, one by one."""
    tokens_BS = torch.randint(config.vocab_size, (B, prompt + new), generator=torch.Generator().manual_seed(0))
    cache = KVCache(config.n_layers)
    with torch.no_grad():
        next_logits(model, tokens_BS[:, :prompt], cache)
        for place in range(prompt, prompt + new):
            next_logits(model, tokens_BS[:, place : place + 1], cache)
    return cache


def greedy_alone(model: Decoder, tokens_BS: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens that follow where each is computed anew from all before it."""
    for _ in range(count):
        positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        with torch.no_grad():
            logits_BSV = model(tokens_BS, Context(positions_BS, torch.zeros_like(tokens_BS))).logits_BSV
        assert logits_BSV is not None
        tokens_BS = torch.cat([tokens_BS, logits_BSV[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens_BS


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize(("prompt", "new"), [(4, 1), (3, 40), (50, 0), (50, 1), (50, 40)])
def test_a_window_holds_one_token_less_than_it_is_wide(window: int, prompt: int, new: int) -> None:
    """However long the prompt was and whatever came after it: in tokens, and in bytes of memory."""
    config = example_config("mistral", sliding_window=window)
    cache = after(build(config, 0), config, prompt, new)
    assert cache.length == prompt + new
    count = min(window - 1, prompt + new)
    for layer in cache.layers:
        assert held_tokens(layer) == count
        assert held_bytes(layer) == B * count * (2 * config.n_kv_heads * config.head_dim * FP32 + PLACES)


@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_a_window_s_memory_does_not_grow(family: FamilyName) -> None:
    """From a prompt four times as long as the window on; a layer that sees everything holds everything."""
    full = (1,) if family in PATTERN_FAMILIES else ()
    config = example_config(family, sliding_window=5, full_attention_layers=full)
    model = build(config, 0)
    first, second = (after(model, config, 20, new) for new in (0, 30))
    assert held_bytes(first.layers[0]) == held_bytes(second.layers[0])
    grown = held_bytes(second.layers[1]) / held_bytes(first.layers[1])
    assert grown > 2 if full else grown == 1
    assert (first.length, second.length) == (20, 50)


@pytest.mark.parametrize("full", [(0,), (1,)])
@pytest.mark.parametrize("family", PATTERN_FAMILIES)
@pytest.mark.parametrize("prompt", [2, 30])
def test_positions_go_on_whichever_layer_has_the_window(family: FamilyName, full: tuple[int, ...], prompt: int) -> None:
    """Greedy tokens are those of passes without a cache, after prompts shorter and longer than the window."""
    config = example_config(family, sliding_window=5, full_attention_layers=full, init_std=0.5)
    model = build(config, 1)
    tokens_BS = torch.randint(config.vocab_size, (3, prompt), generator=torch.Generator().manual_seed(4))
    expected_BS = greedy_alone(model, tokens_BS, 20)
    assert torch.equal(generate(model, tokens_BS, 20, temperature=0.0), expected_BS)
    assert len(expected_BS[:, prompt:].unique()) > 3


def test_planted_a_window_that_forgets_one_token_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = example_config("mistral", sliding_window=5, init_std=0.5)
    model = build(config, 1)
    tokens_BS = torch.randint(config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(4))
    expected_BS = greedy_alone(model, tokens_BS, 20)
    last = modeling.kv_cache.last
    monkeypatch.setattr("modeling.kv_cache.last", lambda held, count: last(held, count - 1))
    assert not torch.equal(generate(model, tokens_BS, 20, temperature=0.0), expected_BS)


@pytest.mark.parametrize("family", MLA_FAMILIES)
@pytest.mark.parametrize("window", [None, 5])
def test_latent_attention_holds_latents(family: FamilyName, window: int | None) -> None:
    """kv_lora_rank + d_rope numbers a token, however many heads there are (arXiv:2405.04434, section 2.1.2)."""
    config = example_config(family)
    assert config.mla is not None
    mla = replace(config.mla, kv_lora_rank=16, d_nope=16, d_rope=8, d_v=16)
    sizes = {}
    for n_heads in (1, 4, 16):
        changed = replace(config, n_heads=n_heads, n_kv_heads=n_heads, mla=mla, sliding_window=window)
        cache = after(build(changed, 0), changed, 7, 2)
        sizes[n_heads] = {held_bytes(layer) for layer in cache.layers}
    count = 9 if window is None else window - 1
    assert sizes == {n_heads: {B * count * ((16 + 8) * FP32 + PLACES)} for n_heads in (1, 4, 16)}
    expanded = 16 * (16 + 8 + 16) * FP32  # the keys and values of 16 heads
    assert expanded / ((16 + 8) * FP32) > 16


@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_latents_are_expanded_by_their_modules(family: FamilyName) -> None:
    """Which a sharded engine relies on: weights are used inside their own module's forward alone."""
    config = example_config(family)
    model, seen = build(config, 0), []
    for layer in model.layers.values():
        assert isinstance(layer.attention, Attention)
        layer.attention.kv_b.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    after(model, config, 6, 2)
    assert seen == [6] * config.n_layers + [7] * config.n_layers + [8] * config.n_layers


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("gate", "family"),
    [("headwise", "llama"), ("headwise", "deepseek_v3"), ("elementwise", "llama"), ("elementwise", "deepseek_v3")],
)
def test_gates_of_attention_are_those_of_the_whole_pass(
    gate: AttentionGate, family: FamilyName, window: int | None
) -> None:
    """Each token's own: the logits of each, read after a prompt one by one, are those of all at once."""
    plain = replace(example_config(family), family="none", sliding_window=window, init_std=0.5)
    config = replace(plain, attention_gate=gate)
    model = build(config, 1)
    tokens_BS = torch.randint(config.vocab_size, (B, 20), generator=torch.Generator().manual_seed(0))
    positions_BS = torch.arange(20).expand(B, 20)
    cache = KVCache(config.n_layers)
    with torch.no_grad():
        whole_BSV = model(tokens_BS, Context(positions_BS, torch.zeros_like(tokens_BS))).logits_BSV
        found = [next_logits(model, tokens_BS[:, :7], cache)]
        found += [next_logits(model, tokens_BS[:, place : place + 1], cache) for place in range(7, 20)]
        ungated_BSV = build(plain, 1)(tokens_BS, Context(positions_BS, torch.zeros_like(tokens_BS))).logits_BSV
    assert whole_BSV is not None and ungated_BSV is not None
    torch.testing.assert_close(torch.stack(found, 1), whole_BSV[:, 6:], rtol=1e-4, atol=1e-4)  # fp32, in another order
    assert not torch.allclose(whole_BSV, ungated_BSV, atol=1e-2)
