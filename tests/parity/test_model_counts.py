"""Closed-form counts against the built model: parameters one by one, FLOPs as torch's counter sees them. Exact."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import modeling.moe
from kernel_references import attend_reference, experts_reference, mix_reference
from modeling.attention import Attention
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.counts import count_parameters, flops_per_token, forward_flops_per_token
from modeling.decoder import Decoder, DecoderLayer, build_decoder
from modeling.moe import MoE, staying
from rotating import some_fast
from small_models import build, configs, example_config, next_tokens, packed_rows

FEW = settings(max_examples=10, deadline=None, derandomize=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters(family: FamilyName) -> None:
    @FEW
    @given(config=configs(family))
    def check(config: ModelConfig) -> None:
        with torch.device("meta"):
            model = build_decoder(config)
        counts = count_parameters(config)
        assert counts.total == sum(weight.numel() for weight in model.parameters())
        tables = [model.embed.weight, model.head.weight]
        tables += [] if model.embed_positions is None else [model.embed_positions.weight]
        assert counts.embedding == sum({id(table): table.numel() for table in tables}.values())
        idle = 0
        for module in model.modules():
            if isinstance(module, MoE):
                one_expert = sum(weight[0].numel() for weight in module.experts.parameters())
                idle += (module.router.weight.shape[0] - module.router.top_k) * one_expert
        assert counts.active == counts.total - idle

    check()


def counted_flops(model: Decoder, config: ModelConfig, *, training: bool) -> float:
    """FLOPs of each token, by torch's counter, of one sequence of 12 tokens through the reference kernels."""
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        layer.attention.core = attend_reference if isinstance(layer.attention, Attention) else mix_reference
        if isinstance(layer.feed_forward, MoE):
            layer.feed_forward.sender.dispatch = staying(lambda *given, counts_E: experts_reference(*given))
    rows = packed_rows(config.vocab_size, 0, [[12]])
    targets_BS = next_tokens(rows)
    # oneDNN's product by a transpose is unknown to torch's counter, which leaves it out in silence.
    by_transpose = {torch.ops.mkldnn._linear_pointwise: lambda left, right, *_, **__: 2 * prod(left) * right[0]}
    with FlopCounterMode(display=False, custom_mapping=by_transpose) as counter:
        if training:
            loss = model(rows.tokens_BS, rows.context(), targets_BS).loss
            assert loss is not None
            loss.backward()
        else:
            with torch.no_grad():
                model(rows.tokens_BS, rows.context())
    return counter.get_total_flops() / 12


@pytest.mark.parametrize("family", some_fast(FAMILIES, "gpt2", "gemma2", "deepseek_v3"))
def test_flops(family: FamilyName) -> None:
    @FEW
    @given(config=configs(family), seed=st.integers(0, 99))
    def check(config: ModelConfig, seed: int) -> None:
        model = build(config, seed)
        windows = [config.window_of(layer) for layer in range(config.n_layers)]
        masked_keys = sum(max(0, 12 - window) for window in windows if window is not None)  # computed, not counted
        unseen = 4 * masked_keys * config.n_heads * config.head_dim
        assert counted_flops(model, config, training=False) == forward_flops_per_token(config, 12) + unseen
        assert counted_flops(model, config, training=True) == flops_per_token(config, 12) + 3 * unseen

    check()


def test_evaluation_computes_no_gradient() -> None:
    config = example_config("llama")
    model = build(config, 0)
    rows = packed_rows(config.vocab_size, 0, [[12]])
    with FlopCounterMode(display=False) as with_targets, torch.no_grad():
        model(rows.tokens_BS, rows.context(), next_tokens(rows))
    with FlopCounterMode(display=False) as with_logits, torch.no_grad():
        model(rows.tokens_BS, rows.context())
    assert with_targets.get_total_flops() == with_logits.get_total_flops()


def test_planted_all_experts_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that sends each token to one expert too many is seen in the FLOPs."""
    config = example_config("mixtral")
    model = build(config, 0)
    for module in model.modules():
        if isinstance(module, modeling.moe.Router):
            module.top_k += 1
    assert counted_flops(model, config, training=False) != forward_flops_per_token(config, 12)
