"""Our model against Hugging Face transformers' own classes, loaded from the exported folder.

Tolerances are the project's: logits to 2e-5 absolute (fp32, logits of deviation about 1), gradients to 1e-5 of their norm.
Both models do the same operations in another order, so what is seen is fp32 rounding, 20 times below the tolerance.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

import modeling.attention
import modeling.context
from launcher.export import write_export
from modeling.config import BiasBalance, ModelConfig, MoEConfig, NoBalance, SequenceAuxBalance
from modeling.context import Context
from modeling.decoder import Decoder, build_decoder
from modeling.hf import glm4_moe, mixtral, qwen3_moe
from modeling.hf.convert import from_hf, tensor_shapes
from modeling.init import draw_normal, materialize
from modeling.loss import IGNORE
from modeling.moe import MoE
from modeling.norm import RMSNorm

LOGITS_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-5
TIE_GAP = 1e-5  # DESIGN.md section 2.8
FAMILIES = ["llama", "mixtral", "qwen3_moe", "glm4_moe"]
FEW = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def configs(draw: st.DrawFn, family: str) -> ModelConfig:
    """A small model that the family can express."""
    n_kv_heads = draw(st.sampled_from([1, 2, 3]))
    n_heads = n_kv_heads * draw(st.sampled_from([1, 2, 3]))
    n_layers = draw(st.integers(1, 3))
    d_model = n_heads * draw(st.sampled_from([4, 8, 12])) if family == "llama" else 4 * draw(st.integers(2, 12))
    return ModelConfig(
        family=family,
        vocab_size=draw(st.integers(11, 90)),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=draw(st.sampled_from([2, 4, 8, 16])),
        d_ff=4 * draw(st.integers(1, 12)),
        tie_embeddings=draw(st.booleans()),
        qk_norm=family == "qwen3_moe" or (family == "glm4_moe" and draw(st.booleans())),
        sliding_window=draw(st.none() | st.integers(1, 9)) if family in ("mixtral", "qwen3_moe") else None,
        rope_theta=draw(st.sampled_from([100.0, 10000.0, 1e6])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        init_std=0.7 * d_model**-0.5,
        moe=None if family == "llama" else draw(moe_configs(family, n_layers)),
    )


@st.composite
def moe_configs(draw: st.DrawFn, family: str, n_layers: int) -> MoEConfig:
    """The experts of such a model."""
    is_glm = family == "glm4_moe"
    n_experts = draw(st.integers(2 if is_glm else 1, 9))
    return MoEConfig(
        n_experts=n_experts,
        top_k=draw(st.integers(1, n_experts)),
        d_ff=4 * draw(st.integers(1, 9)),
        n_shared_experts=draw(st.integers(1, 2)) if is_glm else 0,
        n_dense_layers=0 if family == "mixtral" else draw(st.integers(0, n_layers)),
        score="sigmoid" if is_glm else "softmax",
        normalize_top_k=family == "mixtral" or draw(st.booleans()),
        routed_scale=draw(st.sampled_from([1.0, 2.5])) if is_glm else 1.0,
        balance=draw(st.sampled_from([BiasBalance(), NoBalance()])) if is_glm else SequenceAuxBalance(coefficient=0.0),
    )


def example_config(family: str, **changes: object) -> ModelConfig:
    """One fixed model of the family, with everything that the planted faults damage."""
    is_glm = family == "glm4_moe"
    moe = MoEConfig(
        n_experts=6,
        top_k=2,
        d_ff=24,
        n_shared_experts=1 if is_glm else 0,
        n_dense_layers=0 if family == "mixtral" else 1,
        score="sigmoid" if is_glm else "softmax",
        normalize_top_k=True,
        balance=BiasBalance() if is_glm else NoBalance(),
    )
    config = ModelConfig(
        family=family,
        vocab_size=61,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_head=16,
        d_ff=40,
        qk_norm=family in ("qwen3_moe", "glm4_moe"),
        init_std=0.12,
        moe=None if family == "llama" else moe,
    )
    return replace(config, **changes)


def build(config: ModelConfig, seed: int) -> Decoder:
    """Our model in fp32, its norms and selection biases away from one and zero so that leaving one out shows."""
    with torch.device("meta"):
        model = build_decoder(config)
    materialize(model, config, seed, "cpu", torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, RMSNorm):
                module.weight += draw_normal(seed, f"{name} shift", module.weight.shape, 0.3)
            if isinstance(module, MoE) and module.router.bias is not None:
                module.router.bias += draw_normal(seed, f"{name} shift", module.router.bias.shape, 0.2)
    return model


class Warnings(logging.Handler):
    """Collects what is logged at level WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the message."""
        self.messages.append(record.getMessage())


@contextmanager
def no_warnings() -> Iterator[None]:
    """Fails where Python or a library's logger warns."""
    handler = Warnings()
    loggers = [logging.getLogger(), logging.getLogger("transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert handler.messages == []


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Logical tensors: parameters once each, and buffers."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def exported(model: Decoder, config: ModelConfig) -> PreTrainedModel:
    """transformers' own model, loaded from an export of ours; fails where loading warns or reports anything."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "export"
        write_export(tensors_of(model).items(), config, 64, None, out)
        with no_warnings():
            theirs, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    return theirs.eval()


@dataclass
class Rows:
    """A batch of rows packed with documents: tokens, positions, documents, all (B, S)."""

    tokens_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor

    def context(self, choices: dict[int, Tensor] | None = None) -> Context:
        """A fresh context."""
        return Context(self.positions_BS, self.documents_BS, choices={} if choices is None else choices)


def packed_rows(vocab_size: int, seed: int, lengths: list[list[int]]) -> Rows:
    """Random tokens in documents of the given lengths, row by row (each row's lengths have one sum)."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(vocab_size, (len(lengths), sum(lengths[0])), generator=generator)
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    documents = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return Rows(tokens_BS, torch.stack(positions), torch.stack(documents))


@dataclass
class Routes:
    """What each router of transformers' model chose, recorded as it ran."""

    indices: dict[int, Tensor] = field(default_factory=dict)  # layer -> indices_TK
    scores: dict[int, Tensor] = field(default_factory=dict)  # layer -> scores_TE by which it chose


@contextmanager
def recorded_routes(theirs: PreTrainedModel) -> Iterator[Routes]:
    """Records the choices of one forward pass."""
    routes = Routes()

    def hook_for(layer: int) -> Callable[..., None]:
        def hook(router: nn.Module, _: object, result: tuple[Tensor, Tensor, Tensor]) -> None:
            bias = getattr(router, "e_score_correction_bias", None)
            logits_TE, _, routes.indices[layer] = result
            routes.scores[layer] = (logits_TE if bias is None else logits_TE.sigmoid() + bias).detach()

        return hook

    hooks = [
        layer.mlp.gate.register_forward_hook(hook_for(number))
        for number, layer in enumerate(theirs.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    yield routes
    for hook in hooks:
        hook.remove()


def tied_choices(ours: dict[int, Tensor], routes: Routes, top_k: int) -> int:
    """How many tokens' choices differ where the reference's gap is below TIE_GAP; fails at a larger gap."""
    ties = 0
    for layer, indices_TK in ours.items():
        differs_T = (indices_TK.sort(-1).values != routes.indices[layer].sort(-1).values).any(-1)
        if differs_T.any():
            ranked_TE = routes.scores[layer].sort(-1, descending=True).values
            gaps_T = (ranked_TE[:, top_k - 1] - ranked_TE[:, top_k])[differs_T]
            assert gaps_T.max() < TIE_GAP, f"layer {layer} chose other experts at a gap of {float(gaps_T.max()):.1e}"
            ties += int(differs_T.sum())
    return ties


def our_logits(model: Decoder, config: ModelConfig, rows: Rows, routes: Routes) -> Tensor:
    """Our logits (B, S, V); a tie between experts is broken as transformers broke it."""
    context = rows.context()
    logits_BSV = model(rows.tokens_BS, context).logits_BSV
    if config.moe is None:
        return logits_BSV
    assert context.choices.keys() == routes.indices.keys()
    ties = tied_choices(context.choices, routes, config.moe.top_k)
    if ties:
        print(f"{ties} ties between experts replayed")
        logits_BSV = model(rows.tokens_BS, rows.context(dict(routes.indices))).logits_BSV
    return logits_BSV


def check_logits(model: Decoder, theirs: PreTrainedModel, config: ModelConfig, rows: Rows) -> None:
    """Our packed rows equal theirs packed (told by position_ids), and equal each document alone in theirs."""
    with torch.no_grad():
        with recorded_routes(theirs) as routes:
            reference_BSV = theirs(rows.tokens_BS, position_ids=rows.positions_BS, use_cache=False).logits
        logits_BSV = our_logits(model, config, rows, routes)
        torch.testing.assert_close(logits_BSV, reference_BSV, rtol=0.0, atol=LOGITS_TOLERANCE)
        reference_TV, routes = documents_alone(theirs, rows)
        logits_TV = our_logits(model, config, rows, routes).flatten(0, 1)
        torch.testing.assert_close(logits_TV, reference_TV, rtol=0.0, atol=LOGITS_TOLERANCE)


def documents_alone(theirs: PreTrainedModel, rows: Rows) -> tuple[Tensor, Routes]:
    """transformers' logits (T, V) and choices where each document is a call of its own, in the order of the rows."""
    logits, parts = [], []
    for tokens_S, documents_S in zip(rows.tokens_BS, rows.documents_BS, strict=True):
        for document in documents_S.unique():
            with recorded_routes(theirs) as routes:
                logits.append(theirs(tokens_S[documents_S == document][None], use_cache=False).logits[0])
            parts.append(routes)
    joined = Routes()
    for layer in parts[0].indices:
        joined.indices[layer] = torch.cat([part.indices[layer] for part in parts])
        joined.scores[layer] = torch.cat([part.scores[layer] for part in parts])
    return torch.cat(logits), joined


LENGTHS = [[7, 1, 12], [20], [3, 9, 8]]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal(family: str) -> None:
    """Random small configurations: the exported model's logits are ours."""

    @FEW
    @given(config=configs(family), seed=st.integers(0, 2**20))
    def check(config: ModelConfig, seed: int) -> None:
        model = build(config, seed)
        check_logits(model, exported(model, config), config, packed_rows(config.vocab_size, seed, LENGTHS))

    check()


def our_gradients(model: Decoder, rows: Rows, targets_BS: Tensor, choices: dict[int, Tensor]) -> dict[str, Tensor]:
    """Gradients of the mean loss by logical name, after one pass with ``choices`` made beforehand (none: our own)."""
    output = model(rows.tokens_BS, rows.context(choices), targets_BS)
    assert output.loss is not None
    (output.loss / (targets_BS != IGNORE).sum()).backward()
    return {name: torch.zeros_like(weight) if weight.grad is None else weight.grad for name, weight in model.named_parameters()}


def their_gradients(
    theirs: PreTrainedModel, config: ModelConfig, rows: Rows, targets_BS: Tensor
) -> tuple[dict[str, Tensor], Routes]:
    """The same from transformers, its fused gradients split as its files are and named by our table; and the choices."""
    with recorded_routes(theirs) as routes:
        logits_BSV = theirs(rows.tokens_BS, position_ids=rows.positions_BS, use_cache=False).logits
    F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE).backward()
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad for name, weight in theirs.named_parameters()
    }
    gradients |= {name: torch.zeros_like(buffer) for name, buffer in theirs.named_buffers()}  # selection biases
    on_disk = revert_weight_conversion(theirs, gradients)
    return dict(from_hf(config, on_disk.__getitem__)), routes


def check_gradients(model: Decoder, theirs: PreTrainedModel, config: ModelConfig, rows: Rows, targets_BS: Tensor) -> None:
    """Every gradient equals theirs."""
    references, routes = their_gradients(theirs, config, rows, targets_BS)
    ours = our_gradients(model, rows, targets_BS, {})
    context = rows.context()
    with torch.no_grad():
        model(rows.tokens_BS, context)
    ties = tied_choices(context.choices, routes, config.moe.top_k) if config.moe is not None else 0
    if ties:
        print(f"{ties} ties between experts replayed")
        model.zero_grad()
        ours = our_gradients(model, rows, targets_BS, dict(routes.indices))
    whole_norm = torch.stack([gradient.norm() for gradient in references.values()]).norm()
    for name, gradient in ours.items():
        reference = references[name]
        error, norm = (gradient - reference).norm(), reference.norm()
        if is_zero_by_algebra(config, name):
            assert max(error, norm) < 1e-6 * whole_norm, f"{name}: {norm:.1e} where zero is exact"
        else:
            assert error <= GRADIENT_TOLERANCE * norm, f"{name}: error {error:.1e}, norm {norm:.1e}"


def is_zero_by_algebra(config: ModelConfig, name: str) -> bool:
    """Whether the gradient vanishes exactly, so that both sides hold only rounding.

    A single chosen weight, normalized, is 1 whatever the router says; attention over one key is 1 whatever q and k are.
    """
    if config.moe is not None and config.moe.normalize_top_k and config.moe.top_k == 1 and "router" in name:
        return True
    return config.sliding_window == 1 and any(part in name for part in (".q.", ".k.", "q_norm", "k_norm"))


def next_tokens(rows: Rows) -> Tensor:
    """targets_BS: the next token of the same document, IGNORE at each document's last."""
    targets_BS = torch.full_like(rows.tokens_BS, IGNORE)
    same_BS = rows.documents_BS[:, 1:] == rows.documents_BS[:, :-1]
    targets_BS[:, :-1] = torch.where(same_BS, rows.tokens_BS[:, 1:], IGNORE)
    return targets_BS


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal(family: str) -> None:
    """Random small configurations: every gradient of one training step is transformers' own."""

    @FEW
    @given(config=configs(family), seed=st.integers(0, 2**20))
    def check(config: ModelConfig, seed: int) -> None:
        model = build(config, seed)
        rows = packed_rows(config.vocab_size, seed, LENGTHS)
        check_gradients(model, exported(model, config), config, rows, next_tokens(rows))

    check()
