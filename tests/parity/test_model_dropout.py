"""Where transformers' own classes drop, ours does: theirs trains with our masks, handed out in the order of its calls.

Tolerances are those of tests/support/hf_comparison.py: 2e-5 of logits, and of gradients 1e-5 of their norm.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from launcher.commands.export import write_export
from modeling.config import DROPOUTS, FAMILIES, FamilyName, ModelConfig
from modeling.context import Context
from modeling.dropout import ATTENTION, EMBEDDING, FEED_FORWARD, SCORES, Draws, Dropout, ScoreDropout
from modeling.families.family import family_of
from rotating import some_fast
from small_models import build, example_config, tensors_of

B, S = 2, 9
DRAWS = Draws(3, 5, torch.tensor([4, 11]), torch.arange(S))
TOKENS_BS = torch.randint(61, (B, S), generator=torch.Generator().manual_seed(1))


def factors(config: ModelConfig) -> Iterator[Tensor]:
    """By what our model multiplies, in the order in which transformers' classes ask."""
    ones_BSD = torch.ones(B, S, config.d_model)
    if config.embedding_dropout:
        yield Dropout(config.embedding_dropout, 0, EMBEDDING)(ones_BSD, DRAWS)
    for layer in range(config.n_layers):
        if config.attention_dropout and not config.is_linear_layer(layer):  # linear attention has no scores to drop
            seeds_B = DRAWS.of_samples(layer, SCORES)
            dropout = ScoreDropout(config.attention_dropout, seeds_B, range(config.n_heads))
            yield dropout.factors(torch.arange(S), 0, S)
        if config.residual_dropout:
            yield Dropout(config.residual_dropout, layer, ATTENTION)(ones_BSD, DRAWS)
            yield Dropout(config.residual_dropout, layer, FEED_FORWARD)(ones_BSD, DRAWS)


def in_training(config: ModelConfig, tensors: dict[str, Tensor]) -> PreTrainedModel:
    """transformers' own model, loaded from an export, as it trains."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "export"
        write_export(tensors.items(), config, 64, None, out, "fp32")
        theirs = AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
    return theirs.train()


# ERNIE's classes drop nothing, and read no key for it.
DROPPING = [name for name in FAMILIES if set(DROPOUTS) & family_of(name).told]


def test_every_class_but_two_drops_numbers() -> None:
    assert set(FAMILIES) - set(DROPPING) == {"ernie4_5", "ernie4_5_moe"}


@pytest.mark.parametrize("family", some_fast(DROPPING, "gpt2", "gpt_neox"))
def test_numbers_are_dropped_where_the_class_drops_them(family: FamilyName, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [key for key in DROPOUTS if key in family_of(family).told]
    assert "attention_dropout" in told
    config = example_config(family, **dict.fromkeys(told, 0.25))
    model = build(config, 0)
    theirs, handed = in_training(config, tensors_of(model)), factors(config)

    def handed_out(hidden: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return hidden * next(handed).view_as(hidden) if training and p > 0 else hidden

    monkeypatch.setattr(F, "dropout", handed_out)
    positions_BS = torch.arange(S).expand(B, S)
    context = Context(positions_BS, torch.zeros_like(TOKENS_BS), draws=DRAWS)
    logits_BSV = model(TOKENS_BS, context).logits_BSV
    wanted_BSV = theirs(TOKENS_BS, use_cache=False).logits
    assert next(handed, None) is None
    torch.testing.assert_close(logits_BSV, wanted_BSV, rtol=0.0, atol=2e-5)
    weights_BSV = torch.randn(logits_BSV.shape, generator=torch.Generator().manual_seed(2))
    (logits_BSV * weights_BSV).sum().backward()
    (wanted_BSV * weights_BSV).sum().backward()
    ours, other = model.embed.weight.grad, theirs.get_input_embeddings().weight.grad
    assert ours is not None and (ours - other).norm() <= 1e-5 * other.norm()
    plain_BSV = model(TOKENS_BS, replace(context, draws=None)).logits_BSV
    assert (plain_BSV - logits_BSV).abs().max() > 1e-2
