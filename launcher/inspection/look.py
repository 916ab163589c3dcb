"""What is found when a model is given some texts, each in a pass of its own, as one document.

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
    """A text as the model reads it."""

    name: str
    ids: tuple[int, ...]
    left_out: int  # tokens after these
    is_cut: bool  # of characters beyond LONGEST_TEXT, which were not tokenized


@dataclass
class TextLook:
    """What one text's pass shows."""

    text: TokenText
    attention: list[LayerWeights] = field(default_factory=list)
    # layer -> the experts of each token and their weights, (T, K)
    routing: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    lens: Lens | None = None
    tally: Tally = field(default_factory=Tally)


@dataclass
class Look:
    """What all of them show."""

    texts: list[TextLook]
    n_experts: int | None
    sources: dict[str, Tally] = field(default_factory=dict)  # the texts, or the run's sources
    of_heldout: bool = False  # sources are the run's, by their held-out text

    @property
    def tally(self) -> Tally:
        """The counts over all tokens of ``sources``."""
        return together(self.sources.values())

    @property
    def attention_is_right(self) -> bool:
        """Whether all weights make their layers' outputs."""
        return all(weights.is_right for text in self.texts for weights in text.attention)

    @property
    def lens_is_exact(self) -> bool:
        """Whether the last layer's lens is the model's own output."""
        return all(text.lens is None or text.lens.is_exact for text in self.texts)


def read_tokens(
    texts: Sequence[NamedText], encode: Callable[[str], list[int]], max_tokens: int
) -> tuple[list[TokenText], list[str]]:
    """The texts in tokens, ``max_tokens`` of each at most; and what is to be told of them."""
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
    """One text's pass. The model's device is the embedding's."""
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
    """The texts put together, with the sources' held-out text where there is some to read."""
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
