"""Builds the report on one replayed step: a tree for JSON, from which the text is printed, and its documents.

Shape letters: N samples of the batch, S positions.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.batch import IGNORED
from launcher.replay.compare import StepVerdict
from launcher.replay.plan import Plan
from launcher.replay.rank import Found
from launcher.replay.seen import StepSeen
from parallel.mesh import Degrees

MOST_TOKENS = 20  # tokens listed as the most expensive ones


@dataclass
class DocumentPartSeen:
    """A document's tokens in one sample, and the loss of each token after the first."""

    sample: int
    tokens: list[int]
    losses: list[float]


@dataclass
class DocumentSeen:
    """All parts of one document that were in the step's batch."""

    source: str
    file: str
    document: int
    parts: list[DocumentPartSeen] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The losses of all the document's tokens that were predicted."""
        return [loss for part in self.parts for loss in part.losses]


def documents_of(found: Found) -> list[DocumentSeen]:
    """The documents of the step's batch, in the order of their first appearance."""
    losses_NS = found.seen.losses_of(found.indices, found.tokens.shape[1])
    documents: dict[tuple[str, int], DocumentSeen] = {}
    for part in found.parts:
        key = (part.file, part.document)
        if key not in documents:
            documents[key] = DocumentSeen(part.source, part.file, part.document)
        inside = slice(part.first, part.stop)
        targets = found.targets[part.row, inside]
        counts = targets != IGNORED
        tokens = [int(found.tokens[part.row, part.first]), *targets[counts].tolist()]
        losses = losses_NS[part.row, inside][counts].tolist()
        documents[key].parts.append(DocumentPartSeen(int(found.indices[part.row]), tokens, losses))
    return list(documents.values())


def expensive_tokens(documents: Sequence[DocumentSeen], text_of: Callable[[int], str] | None) -> list[dict[str, Any]]:
    """The MOST_TOKENS tokens with the largest losses, largest first; a loss that is not finite counts as largest."""
    every = [
        (loss, document, part, place)
        for document in documents
        for part in document.parts
        for place, loss in enumerate(part.losses, 1)
    ]
    every.sort(key=lambda row: -row[0] if math.isfinite(row[0]) else -math.inf)
    rows = []
    for loss, document, part, place in every[:MOST_TOKENS]:
        row = {"loss": number(loss), "token": part.tokens[place], "before": part.tokens[place - 1]}
        if text_of is not None:
            row |= {"text": text_of(row["token"]), "text_before": text_of(row["before"])}
        row |= {"source": document.source, "file": document.file, "document": document.document}
        rows.append(row | {"sample": part.sample})
    return rows


def gradient_rows(seen: StepSeen) -> list[dict[str, Any]]:
    """Each logical tensor's gradient norm before clipping, weight norm before the update, and update norm over it."""
    return [
        {
            "tensor": name,
            "grad_norm": number(math.sqrt(each.held.gradient)),
            "weight_norm": number(math.sqrt(each.held.weight)),
            "update_over_weight": number(math.sqrt(each.update / each.held.weight)) if each.held.weight else None,
            "n_nonfinite": each.held.n_nonfinite,
        }
        for name, each in seen.tensors.items()
    ]


def layer_rows(seen: StepSeen) -> list[dict[str, Any]]:
    """Gradient norm and update over weight of each layer's tensors together, and of the parts outside of layers."""
    squares: dict[str, float] = defaultdict(float)
    updates: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for name, each in seen.tensors.items():
        words = name.split(".")
        place = ".".join(words[:2]) if words[1:2] and words[1].isdecimal() else words[0]
        squares[place] += each.held.gradient
        updates[place] += each.update
        weights[place] += each.held.weight
    return [
        {
            "layer": place,
            "grad_norm": number(math.sqrt(square)),
            "update_over_weight": number(math.sqrt(updates[place] / weights[place])) if weights[place] else None,
        }
        for place, square in squares.items()
    ]


def router_rows(seen: StepSeen) -> list[dict[str, Any]]:
    """For each MoE layer: the token-expert pairs of each expert, and the busiest expert's load over the mean."""
    return [
        {"layer": layer, "counts": counts_E.tolist(), "busiest": float(counts_E.max() / max(1e-9, counts_E.mean()))}
        for layer, counts_E in seen.counts.items()
    ]


def number(value: float) -> float | str:
    """The value itself where it is finite, else the string "NaN", "Infinity" or "-Infinity", for JSON."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def as_json(value: Any) -> Any:
    """The tree with tuples as lists, and NaN and infinities as strings, for JSON."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value


def build_report(
    plan: Plan,
    verdicts: Sequence[StepVerdict],
    found: Found,
    documents: Sequence[DocumentSeen],
    text_of: Callable[[int], str] | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The whole report as a tree for JSON. ``text_of`` decodes a token's id; None where there is no tokenizer."""
    degrees = Degrees.of(plan.config.parallel, plan.n_ranks)
    layout = {name: getattr(degrees, name) for name in ("tp", "pp", "cp", "ep", "dp")}
    first = next((each for verdict in verdicts for each in verdict.differences), None)
    rows = []
    for each in documents:
        losses = np.array(each.losses, np.float64)
        mean = number(float(losses.mean())) if len(losses) else None
        row = {"source": each.source, "file": each.file, "document": each.document}
        rows.append(row | {"tokens": len(losses), "loss": mean, "samples": [part.sample for part in each.parts]})
    last = found.steps[plan.step]
    return as_json(
        {
            "run": plan.run_path,
            "step": plan.step,
            "from": plan.begins_at,
            "layout": {"ranks": plan.n_ranks, **layout, "zero": plan.config.parallel.zero},
            "reproduced": first is None,
            "first_difference": vars(first) if first is not None else None,
            "notes": list(notes),
            "steps": [verdict.as_json() for verdict in verdicts],
            "row": dict(last.row),
            "event": last.event,
            "documents": rows,
            "most_expensive_tokens": expensive_tokens(documents, text_of),
            "gradients": gradient_rows(found.seen),
            "layers": layer_rows(found.seen),
            "routers": router_rows(found.seen),
        }
    )
