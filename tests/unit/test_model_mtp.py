"""Multi-token prediction against its formula (DeepSeek-V3, arXiv:2412.19437, section 2.2), written out from tensors."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from launcher.training.step import further_scales
from modeling.config import ModelConfig
from modeling.counts import count_parameters, flops_per_token
from modeling.families.family import family_of
from modeling.generate import generate
from modeling.loss import IGNORE
from modeling.moe_config import BiasBalance, MoEConfig
from modeling.mtp import Ahead, following
from modeling.mtp_config import MTPConfig
from modeling.router_biases import move_router_biases
from small_models import LENGTHS, build, next_tokens, packed_rows

DENSE = ModelConfig(
    family="none",
    vocab_size=37,
    d_model=24,
    n_layers=2,
    n_heads=3,
    n_kv_heads=1,
    d_ff=20,
    init_std=0.15,
    z_loss=1e-2,
    logit_divisor=2.0,
    mtp=MTPConfig(depth=2, coefficient=0.6),
)


def normed(hidden, weight, eps=1e-6):
    return hidden / (hidden.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(vectors, positions):
    """Rotary positions of (S, heads, C)."""
    half = vectors.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** -(torch.arange(half) / half)
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def layer_of(tensors, prefix, hidden, positions, documents):
    """A decoder layer on one row (S, D)."""

    def of(name):
        return tensors[f"{prefix}.{name}.weight"]

    seen, n_tokens = normed(hidden, of("attention_norm")), len(hidden)
    q, k, v = ((seen @ of(f"attention.{name}").T).view(n_tokens, -1, 8) for name in "qkv")
    q, k = turned(q, positions), turned(k, positions)
    scores = torch.einsum("qhc,khc->hqk", q, k.expand_as(q)) / 8**0.5
    sees = (documents[:, None] == documents[None]) & (positions[:, None] >= positions[None])
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    hidden = hidden + torch.einsum("hqk,khc->qhc", weights, v.expand_as(q)).flatten(1) @ of("attention.o").T
    seen = normed(hidden, of("feed_forward_norm"))
    inner = F.silu(seen @ of("feed_forward.gate").T) * (seen @ of("feed_forward.up").T)
    return hidden + inner @ of("feed_forward.down").T


def lost(config, tensors, hidden, token):
    """One target's cross-entropy, and what is trained of it."""
    logits = hidden @ tensors["head.weight"].T / config.logit_divisor
    loss = logits.logsumexp(-1) - logits[token]
    return loss, loss + config.z_loss * logits.logsumexp(-1).square()


def formula(config, tensors, rows):
    """(what is trained; by depth from 0, the mean cross-entropy), document by document."""
    losses = [[] for _ in range(config.mtp.depth + 1)]
    for tokens, positions, documents in zip(rows.tokens_BS, rows.positions_BS, rows.documents_BS, strict=True):
        hidden = tensors["embed.weight"][tokens]
        for layer in range(config.n_layers):
            hidden = layer_of(tensors, f"layers.{layer}", hidden, positions, documents)
        hidden = normed(hidden, tensors["final_norm.weight"])
        for k in range(config.mtp.depth + 1):
            if k:
                number = config.n_layers + k - 1
                later = torch.cat([tokens[k:], tokens.new_zeros(k)])
                embedded = normed(tensors["embed.weight"][later], tensors[f"mtp.{number}.embed_norm.weight"])
                joined = [embedded, normed(hidden, tensors[f"mtp.{number}.hidden_norm.weight"])]
                entering = torch.cat(joined, dim=-1) @ tensors[f"mtp.{number}.project.weight"].T
                hidden = layer_of(tensors, f"layers.{number}", entering, positions, documents)
                hidden = normed(hidden, tensors[f"mtp.{number}.final_norm.weight"])
            for t in range(len(tokens) - k - 1):
                if (documents[t : t + k + 2] == documents[t]).all():
                    losses[k].append(lost(config, tensors, hidden[t], tokens[t + k + 1]))
    means = [torch.stack([torch.stack(pair) for pair in pairs]).mean(0) for pairs in losses]
    trained = means[0][1] + config.mtp.coefficient / config.mtp.depth * sum(mean[1] for mean in means[1:])
    return trained, [float(mean[0].detach()) for mean in means]


def ahead_of(config, targets_BS):
    """What the model is given of further tokens, and how many count, by depth."""
    further = list(following(targets_BS, config.mtp.depth))
    counts = [int((targets != IGNORE).sum()) for _, targets in further]
    factor = config.mtp.coefficient / config.mtp.depth
    return [Ahead(*each, factor / count) for each, count in zip(further, counts, strict=True)], counts


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "mtp": MTPConfig(depth=1)}], ids=str)
def test_loss_and_gradients_are_the_formulas(changes):
    config = replace(DENSE, **changes)
    model, rows = build(config, seed=1), packed_rows(config.vocab_size, 2, LENGTHS)
    targets_BS = next_tokens(rows)
    ahead, counts = ahead_of(config, targets_BS)
    output = model(rows.tokens_BS, rows.context(), targets_BS, ahead=ahead)
    n_targets = int((targets_BS != IGNORE).sum())
    (output.loss / n_targets).backward()
    tensors = {name: weight.detach().double().requires_grad_() for name, weight in model.named_parameters()}
    if config.tie_embeddings:
        tensors["head.weight"] = tensors["embed.weight"]
    trained, means = formula(config, tensors, rows)
    trained.backward()
    ours = [float(output.loss.detach()) / n_targets]
    ours += [float(loss) / count for loss, count in zip(output.further_losses, counts, strict=True)]
    assert ours == pytest.approx(means, rel=1e-6)
    for name, weight in model.named_parameters():
        theirs = tensors[name].grad
        assert float((weight.grad - theirs).norm() / theirs.norm()) < 1e-5, name


def test_planted_hidden_states_before_the_final_norm_differ():
    """The norm between the model and the first module is seen by the comparison above."""
    model, rows = build(replace(DENSE, logit_divisor=1.0), seed=1), packed_rows(37, 2, LENGTHS)
    ahead, _ = ahead_of(DENSE, next_tokens(rows))
    losses = []
    for weight in (1.0, 2.0):
        with torch.no_grad():
            model.final_norm.weight[0] *= weight
        losses.append(float(model(rows.tokens_BS, rows.context(), next_tokens(rows), ahead=ahead).further_losses[0]))
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0]


def test_following_tokens_end_with_the_document_and_the_sample():
    rows = packed_rows(50, 3, [[4, 1, 3]])
    targets_BS = next_tokens(rows)
    targets_BS[0, -1] = 49  # the sample's last target is a token that no position holds
    a, b, c, d, _, f, g, h = rows.tokens_BS[0].tolist()
    (first, second), (also_second, third) = following(targets_BS, 2)
    assert first.tolist() == [[b, c, d, 0, 0, g, h, 49]]
    assert second.tolist() == [[c, d, IGNORE, IGNORE, IGNORE, h, 49, IGNORE]]
    assert also_second.tolist() == [[c, d, 0, 0, 0, h, 49, 0]]
    assert third.tolist() == [[d, IGNORE, IGNORE, IGNORE, IGNORE, 49, IGNORE, IGNORE]]
    assert a != b or f != g  # the tokens differ


def test_modules_route_as_other_layers_do():
    """Experts of such modules have statistics and selection biases, for all tokens that are no padding."""
    moe = MoEConfig(n_experts=4, top_k=2, d_ff=8, n_dense_layers=2, balance=BiasBalance())
    config = replace(DENSE, moe=moe)  # the model's own layers are all dense
    model, rows = build(config, seed=1), packed_rows(config.vocab_size, 2, LENGTHS)
    ahead, _ = ahead_of(config, next_tokens(rows))
    output = model(rows.tokens_BS, rows.context(), next_tokens(rows), ahead=ahead)
    assert [*output.stats] == [2, 3]
    assert all(int(stats.counts_E.sum()) == 2 * rows.tokens_BS.numel() for stats in output.stats.values())
    before = {name: bias.clone() for name, bias in model.named_buffers()}
    move_router_biases(model, config, {layer: stats.counts_E for layer, stats in output.stats.items()})
    assert [*before] == ["layers.2.feed_forward.router.bias", "layers.3.feed_forward.router.bias"]
    assert all(not torch.equal(bias, before[name]) for name, bias in model.named_buffers())


def test_logits_and_text_are_those_of_the_model_without_the_modules():
    config = replace(DENSE, sliding_window=3, full_attention_layers=(1,))
    model, rows = build(config, seed=1), packed_rows(config.vocab_size, 2, [[9]])
    alone = build(replace(config, mtp=None), seed=1)
    logits = [each(rows.tokens_BS, rows.context()).logits_BSV for each in (model, alone)]
    assert torch.equal(*logits)
    texts = [generate(each, rows.tokens_BS, 5, temperature=0.0) for each in (model, alone)]
    assert torch.equal(*texts)
    assert config.window_of(3) is None and config.window_of(0) == 3  # modules' layers are as the last one


def test_published_model_has_as_many_parameters_as_its_files():
    """README_WEIGHTS.md of DeepSeek-V3: 671B, and one module, whose files hold the embedding and the head once more."""
    config = family_of("deepseek_v3").published["DeepSeek-V3"]
    alone, both = count_parameters(config), count_parameters(replace(config, mtp=MTPConfig()))
    layers = config.n_layers, config.n_layers - 1
    of_layer = alone.total - count_parameters(replace(config, n_layers=layers[1])).total
    assert both.total - alone.total == of_layer + 2 * 7168**2 + 3 * 7168  # and a projection and three norms
    assert both.embedding == alone.embedding
    files = both.total + 2 * config.vocab_size * config.d_model
    assert (round(alone.total / 1e9), round((files - alone.total) / 1e9, 1)) == (671, 13.5)


def test_flops_count_the_modules_and_their_heads():
    depths = (None, MTPConfig(), MTPConfig(depth=2))
    one, two, three = (flops_per_token(replace(DENSE, mtp=mtp), 16) for mtp in depths)
    heads, attention = 37 * 24, (24 * 24 * 2 + 2 * 8 * 24) + 3 * 24 * 20
    scores = 2 * 16 * 3 * 16
    assert three - two == two - one == 3 * (2 * (heads + attention + 2 * 24 * 24) + scores)


def test_a_step_weighs_each_depths_mean_by_its_part_of_the_coefficient():
    """Whatever the number of its targets in the batch, and where there is none."""
    engine = SimpleNamespace(loss_factor=4.0, model_config=DENSE)
    dataset = SimpleNamespace(count_further=lambda indices, depth: [10, 0][:depth])
    assert further_scales(engine, dataset, np.arange(3)) == pytest.approx([4 * 0.3 / 10, 4 * 0.3])
