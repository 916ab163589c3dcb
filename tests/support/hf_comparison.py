"""Compares Roundtable's model with transformers' own class, loaded from an export: logits and gradients.

Tolerances: logits to 2e-5 absolute (fp32, logits of deviation about 1), gradients to 1e-5 of their norm. Both models do
the same operations in another order, so they differ by fp32 rounding only: over 240 random models by at most 1.4e-6 in
logits and 3.3e-6 in gradients (QK norm's; all others 1.1e-6). Where a gradient nearly cancels (in OLMo 2 those of
queries and keys can be a ten-thousandth of the whole, 4.7e-4 of 5; in Gemma 3 those of norms), its rounding shows.
There Roundtable's gradient may be twice as far from transformers' as that is from itself, by another kernel or with
weights moved to neighbouring numbers, and at most 1e-4 of its norm.
"""

import copy
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import HealthCheck, settings
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from launcher.commands.export import write_export
from launcher.config.rules import Precision
from launcher.prove.rounding import DRAWS, nudge
from modeling.config import ModelConfig
from modeling.decoder import Decoder
from modeling.dtypes import DTYPES
from modeling.families.weights import hf_parts
from modeling.logical import logical_shapes
from modeling.loss import IGNORE
from modeling.moe_config import MoEConfig
from small_models import Rows, tensors_of
from warnings_seen import no_warnings

LOGITS_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-5
CANCELLED_TOLERANCE = 1e-4  # for a gradient that transformers' own rounding moves as far
NEGLIGIBLE = 1e-5  # of all gradients' norm: the least norm that sinks' gradients are compared with
TIE_GAP = 1e-5  # a choice of experts that leads the next by less may go either way by rounding
OTHER_CHUNKS = (1, 4, 9)  # other chunk sizes of linear attention, in tokens; transformers' class uses 64
FEW = settings(max_examples=14, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
ROUTER = re.compile(r"\.layers\.(\d+)\.\w+\.(?:gate|router)$")  # in transformers' models


def exported(model: Decoder, config: ModelConfig, precision: Precision = "fp32") -> PreTrainedModel:
    """transformers' own model, loaded from an export of ``model``; fails where loading warns or reports anything."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "export"
        write_export(tensors_of(model).items(), config, 64, None, out, precision)
        with no_warnings():
            theirs, info = AutoModelForCausalLM.from_pretrained(
                out, dtype=DTYPES[precision], output_loading_info=True, trust_remote_code=False
            )
    assert {key: value for key, value in info.items() if value} == {}
    return theirs.eval()


@dataclass
class Routes:
    """What each router of transformers' model chose, recorded as it ran."""

    indices: dict[int, Tensor] = field(default_factory=dict)  # layer -> indices_TK
    scores: dict[int, Tensor] = field(default_factory=dict)  # layer -> scores_TE by which it chose


@contextmanager
def recorded_routes(theirs: PreTrainedModel) -> Iterator[Routes]:
    """A context that records the routers' choices in one forward pass of transformers' model."""
    routes = Routes()

    def hook_for(layer: int) -> Callable[..., None]:
        def hook(router: nn.Module, given: tuple[Tensor, ...], result: tuple[Tensor, Tensor, Tensor]) -> None:
            given_bias = given[1] if len(given) > 1 else None  # by layers of minimax_m2 and afmoe
            bias = getattr(router, "e_score_correction_bias", given_bias)
            logits_TE, _, routes.indices[layer] = result
            scores_TE = logits_TE if bias is None else logits_TE.sigmoid() + bias
            if hasattr(router, "moe_statics"):  # ernie4_5_moe
                scores_TE = router.moe_statics(logits_TE.softmax(-1))
            routes.scores[layer] = scores_TE.detach()

        return hook

    hooks = [
        module.register_forward_hook(hook_for(int(found[1])))
        for name, module in theirs.named_modules()
        if (found := ROUTER.search(name)) is not None
    ]
    yield routes
    for hook in hooks:
        hook.remove()


def gaps_of(scores_TE: Tensor, moe: MoEConfig) -> Tensor:
    """By how much each token's choice of experts (and of groups) leads the next best one (T,)."""
    if moe.n_groups == 1:
        return lead_of(scores_TE, moe.top_k)
    scores_TGX = scores_TE.unflatten(1, (moe.n_groups, -1)).sort(-1, descending=True).values
    group_scores_TG = scores_TGX[..., : 2 if moe.group_score == "best_two" else 1].sum(-1)
    kept_TG = group_scores_TG.argsort(-1, descending=True)[:, : moe.top_k_groups]
    scores_TGX = scores_TE.unflatten(1, (moe.n_groups, -1))
    kept_TX = torch.stack([row_GX[kept_G].flatten() for row_GX, kept_G in zip(scores_TGX, kept_TG, strict=True)])
    return torch.minimum(lead_of(group_scores_TG, moe.top_k_groups), lead_of(kept_TX, moe.top_k))


def lead_of(values_TX: Tensor, k: int) -> Tensor:
    """By how much the k-th largest value leads the next one (T,); inf where there is no next one."""
    ranked_TX = values_TX.sort(-1, descending=True).values
    return ranked_TX[:, k - 1] - ranked_TX[:, k] if k < ranked_TX.shape[1] else torch.full((len(ranked_TX),), torch.inf)


def tied_choices(ours: dict[int, Tensor], routes: Routes, moe: MoEConfig) -> int:
    """The number of tokens whose choices differ; fails where the reference's choice leads by TIE_GAP or more."""
    ties = 0
    for layer, indices_TK in ours.items():
        differs_T = (indices_TK.sort(-1).values != routes.indices[layer].sort(-1).values).any(-1)
        if differs_T.any():
            gaps_T = gaps_of(routes.scores[layer], moe)[differs_T]
            assert gaps_T.max() < TIE_GAP, f"layer {layer} chose other experts at a gap of {float(gaps_T.max()):.1e}"
            ties += int(differs_T.sum())
    return ties


def our_logits(model: Decoder, config: ModelConfig, rows: Rows, routes: Routes) -> Tensor:
    """The logits of Roundtable's model (B, S, V); ties between experts are broken as transformers broke them."""
    output = model(rows.tokens_BS, rows.context())
    if config.moe is None:
        return output.logits_BSV
    logits_BSV, choices = output.logits_BSV, {layer: stats.choice_TK for layer, stats in output.stats.items()}
    assert choices.keys() == routes.indices.keys()
    ties = tied_choices(choices, routes, config.moe)
    if ties:
        print(f"{ties} ties between experts replayed")
        logits_BSV = model(rows.tokens_BS, rows.context(dict(routes.indices))).logits_BSV
    return logits_BSV


def told_of(theirs: PreTrainedModel, rows: Rows) -> dict[str, Any]:
    """The arguments by which transformers' class separates documents: positions, for some classes also masks."""
    told: dict[str, Any] = {"position_ids": rows.positions_BS}
    if theirs.config.model_type in ("gpt_oss", "afmoe"):
        distance_BSS = rows.positions_BS[:, :, None] - rows.positions_BS[:, None]
        seen_BSS = (rows.documents_BS[:, :, None] == rows.documents_BS[:, None]) & (distance_BSS >= 0)
        hidden = torch.finfo(theirs.dtype).min
        seen = {
            "full_attention": seen_BSS,
            "sliding_attention": seen_BSS & (distance_BSS < theirs.config.sliding_window),
        }
        told["attention_mask"] = {
            kind: torch.zeros_like(mask_BSS, dtype=theirs.dtype).masked_fill(~mask_BSS, hidden)[:, None]
            for kind, mask_BSS in seen.items()
        }
    return told


def check_logits(model: Decoder, theirs: PreTrainedModel, config: ModelConfig, rows: Rows) -> None:
    """Asserts that logits of packed rows equal transformers' logits, of the packed rows and of each document alone."""
    with torch.no_grad():
        reference_BSV, routes = their_logits(theirs, config, rows)
        logits_BSV = our_logits(model, config, rows, routes)
        torch.testing.assert_close(logits_BSV, reference_BSV, rtol=0.0, atol=LOGITS_TOLERANCE)
        reference_TV, routes = documents_alone(theirs, rows)
        logits_TV = our_logits(model, config, rows, routes).flatten(0, 1)
        torch.testing.assert_close(logits_TV, reference_TV, rtol=0.0, atol=LOGITS_TOLERANCE)


def their_logits(theirs: PreTrainedModel, config: ModelConfig, rows: Rows) -> tuple[Tensor, Routes]:
    """transformers' logits (B, S, V) of packed rows, separated by position_ids, and the routers' choices.

    Classes with ALiBi or linear attention ignore position_ids, so there each document is a call of its own.
    """
    if config.positions == "alibi" or config.linear_attention is not None:
        logits_TV, routes = documents_alone(theirs, rows)
        return logits_TV.unflatten(0, rows.tokens_BS.shape), routes
    with recorded_routes(theirs) as routes:
        return theirs(rows.tokens_BS, **told_of(theirs, rows), use_cache=False).logits, routes


def documents_alone(theirs: PreTrainedModel, rows: Rows) -> tuple[Tensor, Routes]:
    """transformers' logits (T, V) and routers' choices, with a call for each document, in the order of the rows."""
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


def our_gradients(
    model: Decoder, rows: Rows, targets_BS: Tensor, choices: dict[int, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Roundtable's gradients of the mean loss by logical name, and the routers' choices (``choices`` where given)."""
    output = model(rows.tokens_BS, rows.context(choices), targets_BS)
    assert output.loss is not None
    (output.loss / (targets_BS != IGNORE).sum()).backward()
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    return gradients, {layer: stats.choice_TK for layer, stats in output.stats.items()}


def from_hf(config: ModelConfig, get_tensor: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Every logical tensor of the model, whole, put together from tensors that ``get_tensor(hf_name)`` returns."""
    found = {}
    for name, shape in logical_shapes(config).items():
        pieces = [part.view(get_tensor(part.name)) for part in hf_parts(config, name)]
        found[name] = torch.cat([piece.flatten() for piece in pieces]).reshape(shape)
    return found


def their_gradients(
    theirs: PreTrainedModel, config: ModelConfig, rows: Rows, targets_BS: Tensor
) -> tuple[dict[str, Tensor], Routes]:
    """transformers' gradients of the mean loss by logical name, and the routers' choices.

    Fused gradients are split as in transformers' files, and renamed by Roundtable's table of weight names.
    """
    logits_BSV, routes = their_logits(theirs, config, rows)
    F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE).backward()
    gradients = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in theirs.named_parameters()
    }
    gradients |= {name: torch.zeros_like(buffer) for name, buffer in theirs.named_buffers()}  # selection biases
    on_disk = revert_weight_conversion(theirs, gradients)
    return from_hf(config, on_disk.__getitem__), routes


def check_gradients(
    model: Decoder, theirs: PreTrainedModel, config: ModelConfig, rows: Rows, targets_BS: Tensor
) -> None:
    """Asserts that every gradient equals transformers', within the tolerances of this module."""
    references, routes = their_gradients(theirs, config, rows, targets_BS)
    ours, choices = our_gradients(model, rows, targets_BS)
    assert choices.keys() == routes.indices.keys()
    ties = tied_choices(choices, routes, config.moe) if config.moe is not None else 0
    if ties:
        print(f"{ties} ties between experts replayed")
        model.zero_grad()
        ours, _ = our_gradients(model, rows, targets_BS, dict(routes.indices))
    whole_norm = torch.stack([gradient.norm() for gradient in references.values()]).norm()
    apart = {}
    for name, gradient in ours.items():
        reference = references[name]
        error, norm = (gradient - reference).norm(), reference.norm()
        if is_zero_by_algebra(config, name):
            assert max(error, norm) < 1e-6 * whole_norm, f"{name}: {norm:.1e} where zero is exact"
        elif is_normed_away(config, name):
            assert error < 1e-6 * whole_norm, f"{name}: error {error:.1e}, norm {norm:.1e}, of all {whole_norm:.1e}"
        elif error > GRADIENT_TOLERANCE * norm:
            apart[name] = error
    if apart:
        rounding = their_rounding(theirs, config, rows, targets_BS, references, routes)
        for name, error in apart.items():
            told = f"{name}: error {error:.1e}, norm {references[name].norm():.1e}, their rounding {rounding[name]:.1e}"
            norm = references[name].norm()
            if config.sinks and "sinks" in name:
                norm = max(norm, NEGLIGIBLE * whole_norm)
            assert error <= 2 * rounding[name] and error < CANCELLED_TOLERANCE * norm, told
            print(told)


def their_rounding(
    theirs: PreTrainedModel,
    config: ModelConfig,
    rows: Rows,
    targets_BS: Tensor,
    references: dict[str, Tensor],
    routes: Routes,
) -> dict[str, Tensor]:
    """The rounding error of each of transformers' gradients: the largest distance to any of ``their_draws``.

    A draw in which a router chooses other experts than in ``routes`` is left out.
    """
    found = {name: torch.zeros(()) for name in references}
    for gradients, drawn in their_draws(theirs, config, rows, targets_BS):
        if same_choices(drawn, routes):
            distances = {name: (gradients[name] - reference).norm() for name, reference in references.items()}
            found = {name: max(found[name], distance) for name, distance in distances.items()}
    return found


def their_draws(
    theirs: PreTrainedModel, config: ModelConfig, rows: Rows, targets_BS: Tensor
) -> Iterator[tuple[dict[str, Tensor], Routes]]:
    """transformers' gradients and choices, computed again in other ways, which differ from the first by rounding.

    They are computed in fp64 (except where the class itself computes in fp32), with attention or experts by their plain
    formula, and with linear attention in other chunks. Several are needed, since each is one draw of the rounding
    error, which may be small by chance. These alone are nearly one draw for gradients of queries and keys, since the
    plain formula of attention rounds them less than its kernel and is as good as exact beside it. So the weights are
    also moved to neighbouring numbers, up or down at random, which lets the same kernels round anew.
    """
    exact = copy.deepcopy(theirs).double()
    exact.set_attn_implementation("eager")
    exact.set_experts_implementation("eager")
    yield their_gradients_again(exact, config, rows, targets_BS)
    if theirs.config._attn_implementation != "eager":  # which has no other
        theirs.set_attn_implementation("eager")
        yield their_gradients_again(theirs, config, rows, targets_BS)
        theirs.set_attn_implementation("sdpa")
    usual = theirs.config._experts_implementation
    if config.has_experts and usual != "eager":
        theirs.set_experts_implementation("eager")
        yield their_gradients_again(theirs, config, rows, targets_BS)
        theirs.set_experts_implementation(usual)
    if config.linear_attention is not None:
        modeling = sys.modules[type(theirs).__module__]
        rule = modeling.torch_chunk_gated_delta_rule
        for size in OTHER_CHUNKS:
            modeling.torch_chunk_gated_delta_rule = partial(rule, chunk_size=size)
            yield their_gradients_again(theirs, config, rows, targets_BS)
        modeling.torch_chunk_gated_delta_rule = rule
    for seed in range(DRAWS):
        nudged = copy.deepcopy(theirs)
        nudge(nudged, seed)
        yield their_gradients_again(nudged, config, rows, targets_BS)


def their_gradients_again(
    theirs: PreTrainedModel, config: ModelConfig, rows: Rows, targets_BS: Tensor
) -> tuple[dict[str, Tensor], Routes]:
    """transformers' gradients by logical name and choices, after clearing the gradients that the model has."""
    theirs.zero_grad()
    return their_gradients(theirs, config, rows, targets_BS)


def same_choices(first: Routes, second: Routes) -> bool:
    """Whether every router chose the same experts for each token."""
    return all(
        torch.equal(indices_TK.sort(-1).values, second.indices[layer].sort(-1).values)
        for layer, indices_TK in first.indices.items()
    )


def is_normed_away(config: ModelConfig, name: str) -> bool:
    """Whether the gradient vanishes except for the eps of a norm, so that it is little more than rounding.

    The router's weight of a single expert scales the layer's whole output, and a norm after the layer divides by it.
    """
    alone = config.moe is not None and config.moe.top_k == 1 and config.moe.shared_width == 0
    return alone and config.norm_placement != "pre" and "router" in name


def is_zero_by_algebra(config: ModelConfig, name: str) -> bool:
    """Whether the gradient vanishes exactly, so that both sides hold only rounding.

    A single chosen weight, normalized, is 1 whatever the router says; attention over one key is 1 whatever q and k are,
    unless there is a sink. A key's bias that is neither turned nor normed adds the same to all scores of a query, which
    softmax does not see, without a sink.
    """
    if config.moe is not None and config.moe.normalize_top_k and config.moe.top_k == 1 and "router" in name:
        return True
    layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
    if config.rope_dim_of(layer) == 0 and not config.qk_norm and not config.sinks and name.endswith("attention.k.bias"):
        return True
    return (
        config.window_of(layer) == 1
        and not config.sinks
        and any(part in name for part in (".q.", ".k.", "q_norm", "k_norm"))
    )
