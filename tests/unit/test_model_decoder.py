"""The decoder as a whole: what may not influence what, and what changes no value."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from modeling import feed_forward
from modeling.config import FAMILIES, ActivationName, FamilyName, ModelConfig, PositionsName
from modeling.context import PADDING, Context
from modeling.decoder import Decoder, DecoderLayer, PositionEmbedding, SinusoidalPositions, build_decoder
from modeling.families import shared
from modeling.feed_forward import FeedForward
from modeling.kv_cache import KVCache
from modeling.loss import IGNORE
from modeling.moe_config import BiasBalance, SequenceAuxBalance
from parallel.recompute import apply_recompute
from small_models import LENGTHS, Rows, build, configs, example_config, next_tokens, packed_rows

FEW = settings(max_examples=12, deadline=None, derandomize=True)


def logits(model: Decoder, rows: Rows) -> Tensor:
    with torch.no_grad():
        return model(rows.tokens_BS, rows.context()).logits_BSV


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_do_not_see_each_other(family: FamilyName) -> None:
    """Other tokens in one document change no other document's output; 1e-5 for sums over rows placed elsewhere."""

    @FEW
    @given(config=configs(family), seed=st.integers(0, 99), row=st.integers(0, 2), data=st.data())
    def check(config: ModelConfig, seed: int, row: int, data: st.DataObject) -> None:
        model = build(config, seed)
        rows = packed_rows(config.vocab_size, seed, LENGTHS)
        before_BSV = logits(model, rows)
        document = data.draw(st.integers(0, len(LENGTHS[row]) - 1))
        changed_BS = torch.zeros_like(rows.tokens_BS, dtype=torch.bool)
        changed_BS[row] = rows.documents_BS[row] == document
        rows.tokens_BS[changed_BS] = (rows.tokens_BS[changed_BS] + 1) % config.vocab_size
        after_BSV = logits(model, rows)
        torch.testing.assert_close(after_BSV[~changed_BS], before_BSV[~changed_BS], rtol=0.0, atol=1e-5)
        assert not torch.allclose(after_BSV[changed_BS], before_BSV[changed_BS], atol=1e-3)

    check()


def packed_and_alone(positions: PositionsName) -> tuple[Tensor, Tensor]:
    """The logits of a row's second document, packed behind another and in a row of its own."""
    config = replace(example_config("llama"), family="none", positions=positions, max_positions=24)
    model = build(config, 0)
    rows = packed_rows(config.vocab_size, 0, [[11, 13]])
    alone = packed_rows(config.vocab_size, 0, [[13]])
    alone.tokens_BS = rows.tokens_BS[:, 11:]
    return logits(model, rows)[:, 11:], logits(model, alone)


@pytest.mark.parametrize("positions", get_args(PositionsName))
def test_every_kind_of_positions_begins_anew_with_a_document(positions: PositionsName) -> None:
    packed_BSV, alone_BSV = packed_and_alone(positions)
    torch.testing.assert_close(packed_BSV, alone_BSV, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_planted_positions_of_the_row_are_seen(monkeypatch, positions: PositionsName) -> None:
    kind = PositionEmbedding if positions == "learned" else SinusoidalPositions
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, own_BS: forward(self, torch.arange(own_BS.shape[1])[None]))
    packed_BSV, alone_BSV = packed_and_alone(positions)
    assert not torch.allclose(packed_BSV, alone_BSV, atol=1e-3)


def test_planted_kinds_that_nobody_builds_are_errors() -> None:
    """A word that is added to the config and forgotten in the code builds no other kind's model."""
    for change in ({"norm": "unknown"}, {"positions": "unknown"}):
        with pytest.raises(AssertionError, match="unknown"):
            build_decoder(replace(example_config("llama"), **change))  # type: ignore[arg-type]


def test_planted_document_leak_is_seen() -> None:
    config = example_config("qwen3_moe")
    model = build(config, 0)
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    rows.documents_BS = torch.zeros_like(rows.documents_BS)
    before_BSV = logits(model, rows)
    rows.tokens_BS[0, :7] = (rows.tokens_BS[0, :7] + 1) % config.vocab_size
    assert not torch.allclose(logits(model, rows)[0, 7:], before_BSV[0, 7:], atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_tokens_do_not_change_earlier_ones(family: FamilyName) -> None:
    config = example_config(family)
    model = build(config, 0)
    rows = packed_rows(config.vocab_size, 0, [[20]])
    before_BSV = logits(model, rows)
    rows.tokens_BS[0, 12:] = (rows.tokens_BS[0, 12:] + 1) % config.vocab_size
    torch.testing.assert_close(logits(model, rows)[:, :12], before_BSV[:, :12], rtol=0.0, atol=1e-5)


def padded(rows: Rows, n: int) -> Rows:
    """The same rows with ``n`` positions of padding after them."""
    shape = (rows.tokens_BS.shape[0], n)
    zeros_BS = torch.zeros(shape, dtype=torch.long)
    return Rows(
        torch.cat([rows.tokens_BS, zeros_BS], 1),
        torch.cat([rows.positions_BS, zeros_BS], 1),
        torch.cat([rows.documents_BS, zeros_BS + PADDING], 1),
    )


def gradients(model: Decoder, rows: Rows, targets_BS: Tensor, *, has_padding: bool) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    context = Context(rows.positions_BS, rows.documents_BS, 0.1, 0.01, has_padding=has_padding)
    loss = model(rows.tokens_BS, context, targets_BS).loss
    assert loss is not None
    loss.backward()
    return loss.detach(), [torch.zeros(()) if w.grad is None else w.grad.clone() for w in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family: FamilyName) -> None:
    """Loss and every gradient, auxiliary losses' too, are those of the rows without it (1e-5: other sums)."""
    config = example_config(family)
    model = build(config, 0)
    for layer in model.layers.values():
        if hasattr(layer.feed_forward, "router"):
            layer.feed_forward.balance_coefficient, layer.feed_forward.z_loss = 0.5, 0.1
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    targets_BS = next_tokens(rows)
    loss, plain = gradients(model, rows, targets_BS, has_padding=False)
    longer_BS = torch.cat([targets_BS, torch.full((3, 5), IGNORE)], 1)
    padded_loss, with_padding = gradients(model, padded(rows, 5), longer_BS, has_padding=True)
    torch.testing.assert_close(padded_loss, loss, rtol=1e-6, atol=0.0)
    whole = torch.stack([theirs.norm() for theirs in plain]).norm()  # keys' biases that do not turn have none but noise
    for mine, theirs in zip(with_padding, plain, strict=True):
        assert (mine - theirs).norm() <= max(1e-5 * theirs.norm(), 1e-7 * whole)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [None, 4])
def test_cache_in_pieces_equals_one_pass(family: FamilyName, window: int | None) -> None:
    """Tokens fed to the cache in pieces of any length see what they see in one pass."""
    config = example_config(family, sliding_window=window)
    model = build(config, 0)
    rows = packed_rows(config.vocab_size, 0, [[20], [20]])
    whole_BSV = logits(model, rows)
    cache = KVCache(config.n_layers)
    start = 0
    for length in (1, 7, 1, 1, 10):
        part = slice(start, start + length)
        context = Context(rows.positions_BS[:, part], rows.documents_BS[:, part])
        with torch.no_grad():
            piece_BSV = model(rows.tokens_BS[:, part], context, cache=cache).logits_BSV
        torch.testing.assert_close(piece_BSV, whole_BSV[:, part], rtol=0.0, atol=1e-5)
        start += length
        assert cache.length == start


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("half", [False, True])
def test_recomputation_is_exact(family: FamilyName, half: bool) -> None:
    """Gradients are bit for bit those without it, for a whole layer or its feed-forward half, in fp32 and bf16."""
    config = example_config(family)
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    for dtype in (torch.float32, torch.bfloat16):
        model = build(config, 0).to(dtype)
        loss, plain = gradients(model, rows, next_tokens(rows), has_padding=False)
        for layer in model.layers.values():
            assert isinstance(layer, DecoderLayer)
            name = "add_feed_forward" if half else "forward"
            function = getattr(layer, name)
            setattr(layer, name, lambda *args, function=function: checkpoint(function, *args, use_reentrant=False))
        again, recomputed = gradients(model, rows, next_tokens(rows), has_padding=False)
        assert torch.equal(loss, again)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(recomputed, plain, strict=True))


def test_choices_are_replayed() -> None:
    """Choices given beforehand are used, and count as made."""
    config = example_config("mixtral")
    model = build(config, 0)
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    forced = {layer: torch.tensor([[0, 5]]).expand(60, 2) for layer in range(config.n_layers)}
    with torch.no_grad():
        output = model(rows.tokens_BS, rows.context(dict(forced)))
    for stats in output.stats.values():
        assert stats.counts_E.tolist() == [60, 0, 0, 0, 0, 60]


def test_statistics_of_each_layer() -> None:
    config = example_config("qwen3_moe")
    model = build(config, 0)
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    with torch.no_grad():
        output = model(rows.tokens_BS, rows.context())
    assert output.stats.keys() == {1}  # layer 0 is dense
    stats = output.stats[1]
    assert int(stats.counts_E.sum()) == 60 * 2
    assert 0.0 < float(stats.entropy) / 60 <= torch.log(torch.tensor(6.0))
    assert float(stats.balance_loss) >= 0.0


def test_bias_balance_builds_a_buffer_and_others_do_not() -> None:
    config = example_config("glm4_moe")
    assert config.moe is not None
    assert isinstance(config.moe.balance, BiasBalance)
    assert [name for name, _ in build(config, 0).named_buffers()] == ["layers.1.feed_forward.router.bias"]
    object.__setattr__(config.moe, "balance", SequenceAuxBalance())
    assert not list(build(config, 0).named_buffers())


ACTIVATION_FORMULAS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
}


def lacking(activations: Iterable[str]) -> list[str]:
    """One line for each activation and table that has no entry of it."""
    tables = {
        "modeling.feed_forward.ACTIVATIONS": feed_forward.ACTIVATIONS,
        "modeling.families.shared.ACTIVATIONS": shared.ACTIVATIONS,
        "ACTIVATION_FORMULAS here": ACTIVATION_FORMULAS,
    }
    return [f"{table} lacks {name}" for name in activations for table, entries in tables.items() if name not in entries]


def test_every_activation_is_in_each_table() -> None:
    assert lacking(get_args(ActivationName)) == []


def test_planted_activation_without_its_entries_is_named() -> None:
    assert lacking(["silu", "mish"])[:2] == [
        "modeling.feed_forward.ACTIVATIONS lacks mish",
        "modeling.families.shared.ACTIVATIONS lacks mish",
    ]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", get_args(ActivationName))
def test_feed_forward_is_what_it_says(activation: ActivationName, gated: bool) -> None:
    layer = FeedForward(8, 20, gated=gated, bias=True, activation=activation).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_()
    hidden = torch.randn(3, 5, 8, dtype=torch.float64)
    up = hidden @ layer.up.weight.T + layer.up.bias
    inner = ACTIVATION_FORMULAS[activation](up)
    if gated:
        assert layer.gate is not None
        inner = ACTIVATION_FORMULAS[activation](hidden @ layer.gate.weight.T + layer.gate.bias) * up
    assert layer.down_bias is not None
    torch.testing.assert_close(layer(hidden), inner @ layer.down.weight.T + layer.down_bias.bias)


@pytest.mark.parametrize("parallel_block", [False, True])
def test_what_the_second_half_of_a_block_sees(parallel_block: bool) -> None:
    """In a parallel block its own input, as attention does; otherwise the sum."""
    config = example_config("llama", parallel_block=parallel_block)
    layer, context = build(config, 0).layers["0"], packed_rows(config.vocab_size, 0, LENGTHS).context()
    assert isinstance(layer, DecoderLayer)
    hidden_BSD = torch.randn(3, 20, config.d_model, generator=torch.Generator().manual_seed(0))
    sum_BSD = hidden_BSD + layer.attention(layer.attention_norm(hidden_BSD), context)
    seen_BSD = hidden_BSD if parallel_block else sum_BSD
    wanted_BSD = sum_BSD + layer.feed_forward(layer.feed_forward_norm(seen_BSD))
    assert torch.equal(layer(hidden_BSD, context)[0], wanted_BSD)


def test_sinusoidal_positions_are_the_formula() -> None:
    """As the paper has them, in fp64: 2e-6, for angles of a few dozen radians in fp32. They restart with documents."""
    config = replace(example_config("llama"), positions="sinusoidal", embedding_scale=3.0)
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    model = build(config, 0)
    ours = model.embedded(rows.tokens_BS, rows.context()) - 3 * model.embed(rows.tokens_BS)
    even_R = torch.arange(0, config.d_model, 2, dtype=torch.float64)
    angles_BSR = rows.positions_BS[..., None] / 10000 ** (even_R / config.d_model)
    torch.testing.assert_close(ours[..., ::2].double(), angles_BSR.sin(), rtol=0, atol=2e-6)
    torch.testing.assert_close(ours[..., 1::2].double(), angles_BSR.cos(), rtol=0, atol=2e-6)


def test_sinusoidal_positions_are_added_in_fp32_and_rounded_once() -> None:
    config = replace(example_config("llama"), positions="sinusoidal")
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    model = build(config, 0).bfloat16()
    hidden = model.embedded(rows.tokens_BS, rows.context())
    assert hidden.dtype == torch.bfloat16
    assert model.embed_positions is not None
    table = model.embed_positions(rows.positions_BS)
    assert torch.equal(hidden, (model.embed(rows.tokens_BS).float() + table).bfloat16())


@pytest.mark.parametrize("recompute", ["selective", "feed_forward", "full"])
@pytest.mark.parametrize("parallel_block", [False, True])
def test_recomputed_layers_are_exact(parallel_block: bool, recompute: Any) -> None:
    """Gradients are bit for bit those without it."""
    config = example_config("glm4_moe", parallel_block=parallel_block, residual_scale=0.5)
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    loss, plain = gradients(build(config, 0), rows, next_tokens(rows), has_padding=False)
    model = build(config, 0)
    apply_recompute(model, recompute)
    again, recomputed = gradients(model, rows, next_tokens(rows), has_padding=False)
    assert torch.equal(loss, again)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(recomputed, plain, strict=True))


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_layers_that_recompute_each_in_its_own_way_are_exact(family: Any) -> None:
    """As under a budget of activations: modes side by side, dense layers and ones with experts."""
    config = replace(example_config(family), n_layers=5)
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    loss, plain = gradients(build(config, 0), rows, next_tokens(rows), has_padding=False)
    model = build(config, 0)
    modes = ("full", "selective", "none", "feed_forward", "full", *["selective" for _ in config.mtp_layers])
    apply_recompute(model, modes)
    assert [type(model.layers[str(layer)]).__name__ for layer in range(3)] == [
        "FullyRecomputedLayer",
        "ProductsKeptLayer",
        "DecoderLayer",
    ]
    again, recomputed = gradients(model, rows, next_tokens(rows), has_padding=False)
    assert torch.equal(loss, again)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(recomputed, plain, strict=True))


def test_planted_a_layer_that_chooses_its_experts_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of five alone: its second run routes by other choices than its first one."""
    config = replace(example_config("glm4_moe"), n_layers=5)
    rows = packed_rows(config.vocab_size, 0, LENGTHS)
    _, plain = gradients(build(config, 0), rows, next_tokens(rows), has_padding=False)
    model = build(config, 0)
    apply_recompute(model, ("none", "none", "none", "full", "none", *["none" for _ in config.mtp_layers]))

    def others(self: Context, chosen: dict[int, Tensor]) -> Context:
        assert config.moe is not None
        moved = {layer: (choice_TK + 1) % config.moe.n_experts for layer, choice_TK in chosen.items()}
        return replaying(self, moved)

    replaying = Context.replaying
    monkeypatch.setattr(Context, "replaying", others)
    _, recomputed = gradients(model, rows, next_tokens(rows), has_padding=False)
    assert not all(torch.equal(mine, theirs) for mine, theirs in zip(recomputed, plain, strict=True))
