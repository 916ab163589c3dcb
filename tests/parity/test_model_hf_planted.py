"""Faults planted in our model, which the comparison with Hugging Face transformers' own classes must see."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import modeling.attention
from hf_comparison import check_gradients, check_logits, exported
from modeling.attention import GroupedQueryAttention, LatentAttention
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.context import Context
from modeling.decoder import Decoder, DecoderLayer
from modeling.families.family import family_of
from modeling.families.packed import Packed
from modeling.loss import Head
from modeling.router import Router
from small_models import LENGTHS, MOE_FAMILIES, Rows, build, example_config, expressible, next_tokens, packed_rows


def test_planted_nothing_is_planted() -> None:
    """The fixed models of the following tests pass while they are whole."""
    for family in FAMILIES:
        config, model, theirs, rows = whole_example(family)
        check_logits(model, theirs, config, rows)
        check_gradients(model, theirs, config, rows, next_tokens(rows))


def whole_example(family: FamilyName) -> tuple[ModelConfig, Decoder, PreTrainedModel, Rows]:
    """The family's fixed model, transformers' copy of it, and a batch."""
    config = example_config(family)
    model = build(config, 5)
    return config, model, exported(model, config), packed_rows(config.vocab_size, 5, LENGTHS)


def fails_logits(model: Decoder, theirs: PreTrainedModel, config: ModelConfig, rows: Rows) -> None:
    """The comparison of logits must fail."""
    with pytest.raises(AssertionError):
        check_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", [name for name in FAMILIES if expressible(name, "positions", ["rope"])])
def test_planted_rope_halves(family: FamilyName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning channel pairs (2c, 2c+1), as GPT-J does, is seen."""
    config, model, theirs, rows = whole_example(family)

    def rotate_neighbors(heads_BSHC: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
        cos, sin = (table[:, :, None, :] for table in (cos_BSR, sin_BSR))
        turning, rest = heads_BSHC.split([2 * cos.shape[-1], heads_BSHC.shape[-1] - 2 * cos.shape[-1]], dim=-1)
        even, odd = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
        return torch.cat([turned, rest], dim=-1)

    monkeypatch.setattr(modeling.attention, "rotate", rotate_neighbors)
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", [name for name in FAMILIES if expressible(name, "positions", ["learned"])])
def test_planted_positions_off_by_one(family: FamilyName) -> None:
    """A table whose rows are those of the positions before is seen."""
    config, model, theirs, rows = whole_example(family)
    assert model.embed_positions is not None
    with torch.no_grad():
        model.embed_positions.weight.copy_(model.embed_positions.weight.roll(1, 0))
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", [name for name in FAMILIES if expressible(name, "norm", ["layer"])])
def test_planted_norm_without_its_bias(family: FamilyName) -> None:
    """A LayerNorm that adds nothing is seen."""
    config, model, theirs, rows = whole_example(family)
    with torch.no_grad():
        model.final_norm.bias.zero_()
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", [name for name in FAMILIES if expressible(name, "ff_gated", [True])])
def test_planted_gate_and_up_swapped(family: FamilyName, monkeypatch: pytest.MonkeyPatch) -> None:
    """w1 and w3 exchanged in the name table is seen."""
    table = family_of(family).weights
    feed_forward = "layers.{layer}.feed_forward."
    gate, up = ("gate.weight", "up.weight") if family not in MOE_FAMILIES else ("experts.gate", "experts.up")
    gate, up = feed_forward + gate, feed_forward + up
    swapped = {gate: table[up], up: table[gate]}
    if isinstance(both := table[gate], Packed):  # in one tensor, one after the other
        swapped = dict.fromkeys((gate, up), replace(both, parts=both.parts[::-1]))
    for name, told in swapped.items():
        monkeypatch.setitem(table, name, told)
    config, model, theirs, rows = whole_example(family)
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_planted_expert_order(family: FamilyName) -> None:
    """Expert e written as expert e + 1 is seen."""
    config, model, theirs, rows = whole_example(family)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." in name:
                weight.copy_(weight.roll(1, 0))
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", [name for name in FAMILIES if expressible(name, "qk_norm", [True])])
def test_planted_qk_norm_missing(family: FamilyName) -> None:
    """Attention without its QK norm is seen."""
    config, model, theirs, rows = whole_example(family)
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        layer.attention.q_norm = None
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", [name for name in FAMILIES if expressible(name, "qk_norm_after_rope", [True])])
def test_planted_qk_norm_before_the_turn(family: FamilyName) -> None:
    """Queries and keys normed before they turn are seen."""
    config, model, theirs, rows = whole_example(family)
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer) and isinstance(layer.attention, GroupedQueryAttention)
        layer.attention.norms_after_rope = False
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_mask_off(family: FamilyName) -> None:
    """Attention across documents is seen."""
    config, model, theirs, rows = whole_example(family)
    rows.context = lambda choices=None: Context(
        rows.positions_BS, torch.zeros_like(rows.documents_BS), choices=choices or {}
    )
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", [name for name in FAMILIES if family_of(name).has_selection_bias])
def test_planted_selection_bias_lost(family: FamilyName) -> None:
    """A router that drops its selection bias is seen."""
    config, model, theirs, rows = whole_example(family)
    for name, buffer in model.named_buffers():
        assert buffer.any(), name
        buffer.zero_()
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", [name for name in MOE_FAMILIES if expressible(name, "moe.n_groups", [3])])
def test_planted_groups_of_experts_lost(family: FamilyName) -> None:
    """A router that chooses among all experts is seen."""
    config, model, theirs, rows = whole_example(family)
    for module in model.modules():
        if isinstance(module, Router):
            module.n_groups = 1
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", [name for name in FAMILIES if family_of(name).has("mla")])
def test_planted_latent_norm_missing(family: FamilyName) -> None:
    """A latent that is not normed is seen."""
    config, model, theirs, rows = whole_example(family)
    for module in model.modules():
        if isinstance(module, LatentAttention):
            module.kv_a_norm = nn.Identity()
    fails_logits(model, theirs, config, rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_shifted_labels(family: FamilyName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets one position off are seen in the gradients."""
    config, model, theirs, rows = whole_example(family)
    whole = Head.forward
    monkeypatch.setattr(Head, "forward", lambda head, hidden, targets: whole(head, hidden, targets.roll(1, 1)))
    with pytest.raises(AssertionError):
        check_gradients(model, theirs, config, rows, next_tokens(rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_a_gradient_off_by_a_twenty_thousandth(family: FamilyName) -> None:
    """Rounding is measured where a gradient's error exceeds the tolerance; this error is larger in every family."""
    config, model, theirs, rows = whole_example(family)
    attention = model.layer_of("0").attention
    name, weight = next((name, weight) for name, weight in attention.named_parameters() if weight.ndim == 2)
    weight.register_hook(lambda grad: grad * (1 + 5e-5))
    with pytest.raises(AssertionError, match=rf"^layers\.0\.attention\.{name}: error "):
        check_gradients(model, theirs, config, rows, next_tokens(rows))


def test_planted_wrong_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that transformers does not find, or does not expect, fails the loading."""
    config = example_config("qwen3_moe")
    monkeypatch.setitem(family_of(config.family).weights, "final_norm.weight", "model.final_norm.weight")
    with pytest.raises(AssertionError):
        exported(build(config, 5), config)
