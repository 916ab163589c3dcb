"""`inspect` against Hugging Face transformers' own classes, loaded from the exported folder, with eager attention.

Tolerance: weights to 2e-6 absolute (fp32, numbers from 0 to 1). Both compute scores and a softmax in another order, so
only rounding is seen: at most 3.0e-7 over the 21 families (2026-11-23). Sinks are no column of ours, and transformers
drops theirs. Its hidden states are the residual stream before the final norm, but for the last one, which has it.
Layers of linear attention have no weights, neither in its classes nor in Roundtable; their residuals are compared.
"""

import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from launcher.commands.export import write_export
from launcher.inspection.attention import layer_weights
from launcher.inspection.lens import lens_logits
from launcher.inspection.seen import attention_of, see
from modeling.config import FAMILIES, FamilyName, ModelConfig
from modeling.context import Context
from modeling.decoder import Decoder
from small_models import build, example_config, expressible, softmax_layers, tensors_of
from warnings_seen import no_warnings

TOLERANCE = 2e-6
SEQ_LEN = 23
# every kind of attention once; the other families with the slow tests
FIRST: tuple[FamilyName, ...] = ("qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3", "bloom", "gpt2")

# their classes tell weights as they are without sinks, and scale what these add up to
AS_WITHOUT_SINKS = ("granite_swa", "granitemoe_swa")


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    """Loading draws no bars into the report."""
    transformers.utils.logging.disable_progress_bar()


def exported(model: Decoder, config: ModelConfig) -> PreTrainedModel:
    """transformers' own model with eager attention, the one that tells its weights."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "export"
        write_export(tensors_of(model).items(), config, 64, None, out, "fp32")
        with no_warnings():
            theirs = AutoModelForCausalLM.from_pretrained(
                out, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            )
    return theirs.eval()


@pytest.mark.parametrize(
    "family", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in FIRST)]
)
def test_weights_and_residuals_are_theirs(family: FamilyName) -> None:
    changes = {"sliding_window": 5} if expressible(family, "sliding_window", [5]) else {}
    config = example_config(family, **changes)
    model = build(config, 3).eval()
    tokens_BS = torch.randint(config.vocab_size, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    context = Context(torch.arange(SEQ_LEN)[None], torch.zeros_like(tokens_BS))
    layers = softmax_layers(config)
    seen = see(model, tokens_BS, context, layers)
    theirs = exported(model, config)
    with torch.no_grad():
        wanted = theirs(tokens_BS, output_attentions=True, output_hidden_states=True)
    for layer, weights_BHSS in zip(layers, wanted.attentions, strict=True):
        found = layer_weights(attention_of(model, layer), seen.called[layer], context, tuple(range(config.n_heads)))
        assert found.is_right
        assert weights_BHSS.std() > 0.05  # else anything would be near it
        weights_HSS = found.weights_HSS
        if family in AS_WITHOUT_SINKS:
            weights_HSS = weights_HSS / weights_HSS.sum(-1, keepdim=True)
        torch.testing.assert_close(weights_HSS, weights_BHSS[0], rtol=0, atol=TOLERANCE)
    for layer in range(config.n_layers):
        torch.testing.assert_close(seen.residuals[layer], wanted.hidden_states[layer], rtol=0, atol=2e-5)
    torch.testing.assert_close(lens_logits(model, seen.residuals[-1]), wanted.logits, rtol=0, atol=2e-5)


def test_planted_heads_in_another_order_are_seen() -> None:
    config = example_config("qwen3_moe")
    model = build(config, 3).eval()
    tokens_BS = torch.arange(SEQ_LEN)[None] % config.vocab_size
    context = Context(torch.arange(SEQ_LEN)[None], torch.zeros_like(tokens_BS))
    seen = see(model, tokens_BS, context, (0,))
    with torch.no_grad():
        wanted = exported(model, config)(tokens_BS, output_attentions=True).attentions[0][0]
    found = layer_weights(attention_of(model, 0), seen.called[0], context, (1, 0, 2, 3))
    assert (found.weights_HSS - wanted).abs().max() > 0.01
