"""The report on the findings, as JSON, from which the page, the pictures and the terminal's text are made."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from launcher.inspection.attention import SUM_TOLERANCE, LayerWeights, habits_of
from launcher.inspection.experts import Tally, by_chance, shares_of, specialisation, strongest_pair
from launcher.inspection.look import Look, TextLook
from launcher.replay.report import number

DIGITS = 6  # significant digits of weights and probabilities


def build_report(look: Look, about: dict[str, Any], notes: list[str], text_of: Callable[[int], str]) -> dict[str, Any]:
    """The whole report. ``about`` describes the model and the run; ``text_of`` gives the text of a token id."""
    tree: dict[str, Any] = {**about, "notes": notes, "checks": checks_of(look)}
    tree["texts"] = [text_tree(each, text_of) for each in look.texts]
    if look.n_experts is not None and look.sources:
        tree["experts"] = experts_tree(look)
    return tree


def checks_of(look: Look) -> dict[str, Any]:
    """The results of comparing attention weights and the lens with the model's own outputs."""
    layers = [weights for text in look.texts for weights in text.attention]
    found: dict[str, Any] = {}
    if layers:
        found["attention"] = {
            "right": look.attention_is_right,
            "output_error": number(max(_comparable(each.error) for each in layers)),
            "output_tolerance": layers[0].tolerance,
            "sum_error": number(max(_comparable(each.sum_error) for each in layers)),
            "sum_tolerance": SUM_TOLERANCE,
            "largest_unseen": number(max(_comparable(each.unseen) for each in layers)),
        }
    if any(text.lens is not None for text in look.texts):
        found["lens"] = {"last_layer_is_the_output": look.lens_is_exact}
    return found


def _comparable(value: float) -> float:
    return math.inf if math.isnan(value) else value


def text_tree(look: TextLook, text_of: Callable[[int], str]) -> dict[str, Any]:
    """One text's part of the report."""
    tree: dict[str, Any] = {
        "name": look.text.name,
        "tokens": list(look.text.ids),
        "token_texts": [text_of(each) for each in look.text.ids],
        "left_out": look.text.left_out,
        "cut": look.text.is_cut,
    }
    if look.attention:
        tree["attention"] = [attention_tree(each) for each in look.attention]
    if look.routing:
        tree["routing"] = [
            {"layer": layer, "experts": experts_TK.tolist(), "weights": rounded(weights_TK)}
            for layer, (experts_TK, weights_TK) in look.routing.items()
        ]
    if look.lens is not None:
        tree["lens"] = lens_tree(look, text_of)
    return tree


def attention_tree(weights: LayerWeights) -> dict[str, Any]:
    """One layer's attention: for each head its habits, and each query's weights up to its own place and its sink's."""
    heads = []
    for place, habits in enumerate(habits_of(weights)):
        weights_SS = weights.weights_HSS[place].numpy()
        row: dict[str, Any] = {key: None if value is None else number(value) for key, value in vars(habits).items()}
        row["weights"] = [rounded(weights_SS[query, : query + 1]) for query in range(len(weights_SS))]
        if weights.sinks_HS is not None:
            row["sinks"] = rounded(weights.sinks_HS[place].numpy())
        heads.append(row)
    return {
        "layer": weights.layer,
        "window": weights.window,
        "right": weights.is_right,
        "output_error": number(weights.error),
        "heads": heads,
    }


def lens_tree(look: TextLook, text_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """A row for the embedding (layer None) and for each layer. The last token of the text has no known next token."""
    lens = look.lens
    assert lens is not None
    rows = []
    for place, top_SK in enumerate(lens.top_LSK):
        losses_S, ranks_S = lens.next_loss_LS[place], lens.next_rank_LS[place]
        rows.append(
            {
                "layer": place - 1 if place else None,
                "loss": number(float(losses_S.mean())) if len(losses_S) else None,
                "first_is_right": float((ranks_S == 1).mean()) if len(ranks_S) else None,
                "median_rank": float(np.median(ranks_S)) if len(ranks_S) else None,
                "top": top_SK.tolist(),
                "top_texts": [[text_of(int(token)) for token in top_K] for top_K in top_SK],
                "top_probabilities": rounded(lens.probability_LSK[place]),
                "next_rank": ranks_S.tolist(),
                "next_probability": rounded(lens.next_probability_LS[place]),
            }
        )
    return rows


def experts_tree(look: Look) -> dict[str, Any]:
    """The routers' choices for the tokens of all sources, by layer."""
    assert look.n_experts is not None
    total, names = look.tally, list(look.sources)
    return {
        "n_experts": look.n_experts,
        "of_heldout": look.of_heldout,
        "sources": names,
        "tokens": {name: tally.n_tokens for name, tally in look.sources.items()},
        "layers": [layer_tree(layer, total, [look.sources[name] for name in names]) for layer in total.counts],
    }


def layer_tree(layer: int, total: Tally, sources: list[Tally]) -> dict[str, Any]:
    """One layer's counts of tokens by expert, by pair of experts and by source, and how sources differ."""
    counts_NE = np.stack([tally.counts[layer] for tally in sources])
    shares_NE = np.stack([shares_of(counts_E) for counts_E in counts_NE])
    pair = strongest_pair(total.pairs[layer])
    tree: dict[str, Any] = {
        "layer": layer,
        "counts": total.counts[layer].tolist(),
        "pairs": total.pairs[layer].tolist(),
        "strongest_pair": None
        if pair is None
        else {"experts": [pair[0], pair[1]], "tokens": pair[2], "by_chance": pair[3]},
        "source_counts": counts_NE.tolist(),
    }
    if len(sources) > 1:
        tree["specialisation_bits"] = specialisation(shares_NE)
        tree["by_chance_bits"] = by_chance(counts_NE)
    return tree


def rounded(values: np.ndarray) -> list[Any]:
    """The numbers as nested lists, with DIGITS digits; NaN and infinity as text, since JSON has no such numbers."""
    if values.ndim > 1:
        return [rounded(each) for each in values]
    return [number(float(f"{value:.{DIGITS}g}")) for value in values.tolist()]
