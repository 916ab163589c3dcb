"""What `inspect` sees in a pass is what the model computed: every family and kind of attention, and planted faults.

Tolerances are the run-time ones of `launcher.inspection.attention`, which a pass holds itself to. Seen here: outputs
made from the weights differ by at most 1.7e-7 of the largest in fp32, 0 in bf16 and 1.7e-4 in fp16; a head's weights
taken for another's, by more than 0.01.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import launcher.inspection.attention as inspected_attention
import launcher.inspection.lens as inspected_lens
from launcher.inspection.attention import LayerWeights, habits_of, layer_weights, weights_of
from launcher.inspection.lens import look_through
from launcher.inspection.seen import Seen, attention_of, see
from modeling.config import FAMILIES, FamilyName, MLAConfig, ModelConfig
from modeling.decoder import Decoder
from modeling.dtypes import DTYPES
from small_models import (
    MOE_FAMILIES,
    Rows,
    build,
    example_config,
    expressible,
    packed_rows,
    softmax_layers,
    tensors_of,
)

LENGTHS = [[7, 1, 12]]  # documents of one row
BLOCKS: dict[str, dict[str, Any]] = {  # kinds of attention that no family's example has alone
    "alibi": {"positions": "alibi"},
    "slopes of three heads": {"positions": "alibi", "n_heads": 3, "n_kv_heads": 1},
    "t5": {"positions": "t5", "t5_buckets": 8, "t5_max_distance": 16},
    "nope": {"positions": "none"},
    "window": {"sliding_window": 4, "full_attention_layers": (1,)},
    "sinks and a window": {"sinks": True, "sliding_window": 4},
    "capped": {"score_cap": 0.7},
    "capped sinks with buckets": {"score_cap": 0.7, "sinks": True, "positions": "t5", "sliding_window": 6},
    "one kv head": {"n_kv_heads": 1},
    "latent, narrow values": {
        "n_kv_heads": 4,
        "mla": MLAConfig(kv_lora_rank=6, q_lora_rank=None, d_nope=4, d_rope=2, d_v=3),
    },
    "queries beyond a head's channels": {"d_head": 2},
    "dropout, which inspection has none of": {"attention_dropout": 0.5, "residual_dropout": 0.5},
}


def passed(config: ModelConfig, seed: int = 0, dtype: str = "fp32") -> tuple[Decoder, Rows, Seen]:
    model = build(config, seed).eval()
    biases = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model = model.to(DTYPES[dtype])
    for name, buffer in model.named_buffers():  # routers' biases stay fp32, as `load_decoder` has them
        buffer.data = biases[name]
    rows = packed_rows(config.vocab_size, seed, LENGTHS)
    return model, rows, see(model, rows.tokens_BS, rows.context(), softmax_layers(config))


def all_weights(config: ModelConfig, model: Decoder, seen: Seen) -> list[LayerWeights]:
    heads = tuple(range(config.n_heads))
    return [
        layer_weights(attention_of(model, layer), seen.called[layer], seen.context, heads)
        for layer in softmax_layers(config)
    ]


def block_config(name: str) -> ModelConfig:
    return ModelConfig(
        **{"family": "none", "vocab_size": 61, "d_model": 24, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
        | {"d_head": 6, "d_ff": 40, "init_std": 0.3}
        | BLOCKS[name]
    )


def check_weights(config: ModelConfig, rows: Rows, found: list[LayerWeights]) -> None:
    documents_S, positions_S = rows.documents_BS[0], rows.positions_BS[0]
    for weights in found:
        assert weights.is_right, (weights.layer, weights.error, weights.sum_error)
        window = config.window_of(weights.layer)
        assert weights.window == window
        distance_SS = positions_S[:, None] - positions_S
        seen_SS = (documents_S[:, None] == documents_S) & (distance_SS >= 0)
        seen_SS &= distance_SS < window if window is not None else True
        assert torch.equal(weights.weights_HSS > 0, seen_SS.expand_as(weights.weights_HSS))
        sums_HS = weights.weights_HSS.sum(-1)
        if weights.sinks_HS is not None:
            assert (weights.sinks_HS > 0).all()
            sums_HS = sums_HS + weights.sinks_HS
        assert (weights.sinks_HS is not None) == config.sinks
        torch.testing.assert_close(sums_HS, torch.ones_like(sums_HS), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_family_the_weights_make_each_layers_output(family: FamilyName) -> None:
    changes = {"sliding_window": 5} if expressible(family, "sliding_window", [5]) else {}
    config = example_config(family, **changes)
    model, rows, seen = passed(config)
    check_weights(config, rows, all_weights(config, model, seen))


@pytest.mark.parametrize("name", BLOCKS)
def test_of_every_kind_of_attention_too(name: str) -> None:
    config = block_config(name)
    model, rows, seen = passed(config)
    check_weights(config, rows, all_weights(config, model, seen))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "deepseek_v3", "bloom"])
def test_in_16_bits(family: FamilyName, dtype: str) -> None:
    config = example_config(family)
    model, rows, seen = passed(config, dtype=dtype)
    check_weights(config, rows, all_weights(config, model, seen))


def test_without_terms_they_are_the_softmax_of_scaled_scores() -> None:
    """The textbook's formula, once: to 1e-6, rounding."""
    config = block_config("nope")
    _, rows, seen = passed(config)
    called = seen.called[0]
    k_BSHC = called.k_BSGC.repeat_interleave(2, dim=2)
    scores_BHSS = torch.einsum("bqhc,bshc->bhqs", called.q_BSHC, k_BSHC) / 6**0.5
    seen_BSS = rows.context().mask_BSS(None)
    wanted_BHSS = scores_BHSS.masked_fill(~seen_BSS[:, None], float("-inf")).softmax(-1)
    torch.testing.assert_close(weights_of(called, seen.context), wanted_BHSS, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layers_lens_is_the_models_output_bit_for_bit(family: FamilyName) -> None:
    config = example_config(family)
    model, rows, seen = passed(config)
    tokens_S = rows.tokens_BS[0]
    lens = look_through(model, seen, tokens_S, 3)
    assert lens.is_exact and len(lens.top_LSK) == config.n_layers + 1
    assert seen.logits_BSV is not None
    logs_SV = seen.logits_BSV[0].log_softmax(-1)
    for place in range(len(tokens_S) - 1):
        order = logs_SV[place].argsort(descending=True).tolist()
        assert lens.top_LSK[-1, place].tolist() == order[:3]
        assert lens.next_rank_LS[-1, place] == order.index(int(tokens_S[place + 1])) + 1
    losses_S = F.cross_entropy(seen.logits_BSV[0, :-1], tokens_S[1:], reduction="none")
    torch.testing.assert_close(torch.from_numpy(lens.next_loss_LS[-1]).float(), losses_S)
    assert lens.probability_LSK[-1].sum(-1).max() <= 1 + 1e-6


def test_a_layer_that_is_seen_alone_computes_its_lens_of_what_went_in() -> None:
    """A decoder without its last layer puts out what the lens after the layer before shows."""
    config = example_config("qwen3_moe", n_layers=3)
    model, rows, seen = passed(config)
    shorter = model.part_of(range(2), has_embedding=True, has_head=True)
    with torch.no_grad():
        logits_BSV = shorter(rows.tokens_BS, rows.context()).logits_BSV
    assert torch.equal(inspected_lens.lens_logits(model, seen.residuals[2]), logits_BSV)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_routers_choices_are_those_of_the_pass(family: FamilyName) -> None:
    """The experts computed with the weights that are shown give the layer's own output, bit for bit."""
    config = example_config(family)
    model, rows, seen = passed(config)
    with torch.no_grad():
        output = model(rows.tokens_BS, rows.context())
    assert seen.routing.keys() == output.stats.keys() != set()
    for layer, routing in seen.routing.items():
        assert torch.equal(routing.indices_TK, output.stats[layer].choice_TK)
        if config.moe is not None and config.moe.normalize_top_k:
            sums_T = routing.weights_TK.sum(-1) / config.moe.routed_scale
            torch.testing.assert_close(sums_T, torch.ones_like(sums_T))


def test_looking_changes_nothing_and_leaves_nothing_behind() -> None:
    config = example_config("gpt_oss")
    model, rows, seen = passed(config)
    cores = [layer.attention.core for layer in model.own_layers]
    before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    with torch.no_grad():
        plain = model(rows.tokens_BS, rows.context()).logits_BSV
    again = see(model, rows.tokens_BS, rows.context(), range(config.n_layers))
    assert torch.equal(plain, seen.logits_BSV) and torch.equal(plain, again.logits_BSV)
    assert [layer.attention.core for layer in model.own_layers] == cores
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors_of(model).items())


def test_an_error_in_the_pass_leaves_nothing_behind_either(monkeypatch: pytest.MonkeyPatch) -> None:
    config = example_config("llama")
    model, rows, _ = passed(config)
    core = model.own_layers[0].attention.core
    model.own_layers[-1].attention.core = lambda *_: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        see(model, rows.tokens_BS, rows.context(), range(config.n_layers))
    assert model.own_layers[0].attention.core is core
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_habits_are_means_over_the_queries() -> None:
    weights_HSS = torch.tensor([[[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.3, 0.2]]])
    found = LayerWeights(0, None, (2,), weights_HSS, None, 0.0, 0.0, 0.0, 1e-5)
    (habits,) = habits_of(found)
    assert (habits.head, habits.sink) == (2, None)
    wanted = (0.375, (0.25 + 0.3) / 2, (0.75 + 0.2) / 2, (0.25 + 1.3) / 2)
    assert (habits.first, habits.previous, habits.itself, habits.distance) == pytest.approx(wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_another_heads_map_is_seen(family: FamilyName, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = inspected_attention.weights_of
    monkeypatch.setattr(inspected_attention, "weights_of", lambda *given: honest(*given).roll(1, dims=1))
    config = example_config(family)
    model, _, seen = passed(config)
    found = all_weights(config, model, seen)
    assert not any(weights.is_right for weights in found)
    assert min(weights.error for weights in found) > 0.01


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("capped", {"cap": None}),
        ("sinks and a window", {"sinks_H": None}),
        ("alibi", {"alibi": None}),
        ("t5", {"bias_HN": None, "buckets": None}),
    ],
)
def test_planted_a_term_left_out_is_seen(name: str, changes: dict[str, Any]) -> None:
    config = block_config(name)
    model, _, seen = passed(config)
    for called in seen.called.values():
        called.terms = called.terms._replace(**changes)
    assert not any(weights.is_right for weights in all_weights(config, model, seen))


def test_planted_a_wider_window_is_seen() -> None:
    config = block_config("window")
    model, _, seen = passed(config)
    seen.called[0].window = 5
    first, second = all_weights(config, model, seen)
    assert not first.is_right and second.is_right


def test_planted_a_weight_of_a_hidden_key_is_seen() -> None:
    found = LayerWeights(0, None, (0,), torch.ones(1, 1, 1), None, 0.0, 0.0, 1e-9, 1e-5)
    assert not found.is_right and replace(found, unseen=0.0).is_right
    assert not replace(found, unseen=0.0, error=float("nan")).is_right


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_a_lens_without_the_final_norm_is_seen(family: FamilyName, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_norm(model: Decoder, residual_BSD: torch.Tensor) -> Any:
        return model.head(model.divided(residual_BSD))

    monkeypatch.setattr(inspected_lens, "lens_logits", without_norm)
    model, rows, seen = passed(example_config(family))
    assert not look_through(model, seen, rows.tokens_BS[0], 3).is_exact


def test_planted_a_lens_of_the_layer_before_is_seen() -> None:
    model, rows, seen = passed(example_config("llama"))
    seen.residuals.pop()
    assert not look_through(model, seen, rows.tokens_BS[0], 3).is_exact
