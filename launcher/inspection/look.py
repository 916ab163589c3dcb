"""Runs a model over some texts, each in a pass of its own as one document, and collects what the passes show.

Shape letters: S sequence, T tokens, K top_k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from data.dataset import Dataset
from launcher.inspection.asked import LONGEST_TEXT, Maps, NamedText
from launcher.inspection.attention import LayerWeights, layer_weights
from launcher.inspection.experts import Tally, tally_sources, together
from launcher.inspection.lens import Lens, look_through
from launcher.inspection.seen import attention_of, see
from modeling.context import Context
from modeling.decoder import Decoder


@dataclass(frozen=True)
class TokenText:
    """A text as the tokens that the model is given."""

    name: str
    ids: tuple[int, ...]
    left_out: int  # the number of further tokens, beyond --max-tokens
    is_cut: bool  # whether characters beyond LONGEST_TEXT were not tokenized


@dataclass
class TextLook:
    """The findings of one text's pass."""

    text: TokenText
    attention: list[LayerWeights] = field(default_factory=list)
    # layer -> the experts of each token and their weights, (T, K)
    routing: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    lens: Lens | None = None
    tally: Tally = field(default_factory=Tally)


@dataclass
class Look:
    """The findings of all texts, and the routers' choices by source."""

    texts: list[TextLook]
    n_experts: int | None
    sources: dict[str, Tally] = field(default_factory=dict)  # name of a text, or of a source of the run -> choices
    of_heldout: bool = False  # whether ``sources`` are the run's, with their held-out text

    @property
    def tally(self) -> Tally:
        """The counts over all tokens of ``sources``."""
        return together(self.sources.values())

    @property
    def attention_is_right(self) -> bool:
        """Whether all attention weights passed their checks."""
        return all(weights.is_right for text in self.texts for weights in text.attention)

    @property
    def lens_is_exact(self) -> bool:
        """Whether the lens after the last layer equals the model's own output in every text."""
        return all(text.lens is None or text.lens.is_exact for text in self.texts)


def read_tokens(
    texts: Sequence[NamedText], encode: Callable[[str], list[int]], max_tokens: int
) -> tuple[list[TokenText], list[str]]:
    """The texts as tokens, ``max_tokens`` of each at most, and notes on what was left out."""
    found, notes = [], []
    for each in texts:
        is_cut = len(each.text) > LONGEST_TEXT
        ids = encode(each.text[:LONGEST_TEXT])
        found.append(TokenText(each.name, tuple(ids[:max_tokens]), max(0, len(ids) - max_tokens), is_cut))
        if len(ids) > max_tokens:
            more = "more than " if is_cut else ""
            notes.append(f"{each.name}: the first {max_tokens} of {more}{len(ids)} tokens are shown (--max-tokens)")
        elif is_cut:
            notes.append(f"{each.name}: the first {LONGEST_TEXT:,} characters are shown")
    return found, notes


def look_at(
    model: Decoder, text: TokenText, parts: Sequence[str], maps: Maps, top_k: int, n_experts: int | None
) -> TextLook:
    """Runs one text through the model, on the embedding's device, and returns the findings of the chosen ``parts``."""
    device = model.embed.weight.device
    tokens_BS = torch.tensor([text.ids])
    positions_BS = torch.arange(len(text.ids))[None]
    context = Context(positions_BS, torch.zeros_like(tokens_BS)).to(device)
    tokens_BS = tokens_BS.to(device)
    layers = maps.layers if "attention" in parts else ()
    seen = see(model, tokens_BS, context, layers)
    found = TextLook(text)
    for layer in layers:
        found.attention.append(layer_weights(attention_of(model, layer), seen.called.pop(layer), context, maps.heads))
    if "experts" in parts and n_experts is not None:
        found.tally.add({layer: each.indices_TK for layer, each in seen.routing.items()}, n_experts)
        for layer, each in seen.routing.items():
            found.routing[layer] = each.indices_TK.cpu().numpy(), each.weights_TK.float().cpu().numpy()
    if "lens" in parts:
        found.lens = look_through(model, seen, tokens_BS[0], top_k)
    return found


def with_sources(
    looks: list[TextLook],
    n_experts: int | None,
    model: Decoder,
    heldout: Dataset | None,
    n_sequences: int,
    at_once: int,
) -> Look:
    """All texts' findings put together, with the routers' choices by source.

    The sources are the run's where ``heldout`` is given, of which ``n_sequences`` sequences of each source are run,
    ``at_once`` in a pass; else each text counts as a source.
    """
    found = Look(looks, n_experts)
    if n_experts is None:
        return found
    if heldout is None:
        found.sources = {each.text.name: each.tally for each in looks}
        return found
    device = model.embed.weight.device
    found.sources = tally_sources(model, heldout, n_sequences, at_once, n_experts, device)
    found.of_heldout = True
    return found
