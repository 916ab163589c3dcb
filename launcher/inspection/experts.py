"""Statistics of routers' choices: which experts are chosen, which pairs together, and how sources differ.

Shape letters: T tokens, K top_k, E experts, N sources.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset
from data.errors import DataError, reason_of
from launcher.commands.trained import Trained
from launcher.training.evaluation import open_heldout
from modeling.context import Context
from modeling.decoder import Decoder


@dataclass
class Tally:
    """Counts of the routers' choices for some tokens, by layer."""

    n_tokens: int = 0
    counts: dict[int, np.ndarray] = field(default_factory=dict)  # layer -> int64 (E,): tokens sent to each expert
    pairs: dict[int, np.ndarray] = field(default_factory=dict)  # layer -> int64 (E, E): tokens sent to both

    def add(self, choices: Mapping[int, Tensor], n_experts: int) -> None:
        """Adds the choices of one forward pass (layer -> indices_TK)."""
        self.n_tokens += len(next(iter(choices.values())))
        for layer, indices_TK in choices.items():
            chosen_TE = torch.zeros(len(indices_TK), n_experts, device=indices_TK.device)
            chosen_TE.scatter_(1, indices_TK, 1.0)
            pairs_EE = (chosen_TE.T @ chosen_TE).round().long().cpu().numpy()
            self.pairs[layer] = self.pairs.get(layer, 0) + pairs_EE
            self.counts[layer] = tokens_of(self.pairs[layer])


def tokens_of(pairs_EE: np.ndarray) -> np.ndarray:
    """The number of tokens sent to each expert (E,), from the diagonal of the pairs' counts."""
    experts_E = np.arange(len(pairs_EE))
    return pairs_EE[experts_E, experts_E]


def together(tallies: Iterable[Tally]) -> Tally:
    """One tally with the sums of all."""
    total = Tally()
    for tally in tallies:
        total.n_tokens += tally.n_tokens
        for layer, pairs_EE in tally.pairs.items():
            total.pairs[layer] = total.pairs.get(layer, 0) + pairs_EE
            total.counts[layer] = tokens_of(total.pairs[layer])
    return total


def shares_of(counts_E: np.ndarray) -> np.ndarray:
    """Each expert's share of the token-expert pairs (E,)."""
    return counts_E / max(1, counts_E.sum())


def specialisation(shares_NE: np.ndarray) -> float:
    """The mutual information in bits of a token's expert and its source: 0 where all sources use the experts alike.

    Each source has the same weight, so it is at most log2 of their number.
    """
    mean_E = shares_NE.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms_NE = np.where(shares_NE > 0, shares_NE * np.log2(shares_NE / mean_E), 0.0)
    return float(terms_NE.sum(1).mean())


def by_chance(counts_NE: np.ndarray) -> float:
    """The bits that ``specialisation`` would find about by chance in so few counts: (N - 1) (E - 1) / (2 ln2 pairs).

    That is the bias of a mutual information from counts (Miller 1955), if all token-expert pairs were independent.
    Those of one text are not, so chance may account for more.
    """
    n_sources, n_used = counts_NE.shape[0], int((counts_NE.sum(0) > 0).sum())
    return max(0, n_sources - 1) * max(0, n_used - 1) / (2 * math.log(2) * max(1, counts_NE.sum()))


def strongest_pair(pairs_EE: np.ndarray) -> tuple[int, int, int, float] | None:
    """The two experts whose number of shared tokens exceeds chance the most: (one, other, tokens, tokens by chance).

    The number by chance divides all pairs of choices among pairs of experts in proportion to the product of their
    tokens. None where no token has two experts.
    """
    counts_E = tokens_of(pairs_EE).astype(np.float64)
    experts_E = np.arange(len(counts_E))
    is_pair_EE = experts_E[:, None] < experts_E  # each pair once
    both_EE = np.where(is_pair_EE, pairs_EE, 0).astype(np.float64)
    apart_EE = np.where(is_pair_EE, counts_E[:, None] * counts_E, 0.0)
    if not both_EE.any():
        return None
    expected_EE = both_EE.sum() * apart_EE / apart_EE.sum()
    above_EE = np.where(both_EE > 0, both_EE - expected_EE, -np.inf)
    one, other = (int(each) for each in np.unravel_index(int(above_EE.argmax()), above_EE.shape))
    return one, other, int(both_EE[one, other]), float(expected_EE[one, other])


def heldout_sources(trained: Trained) -> tuple[Dataset | None, str | None]:
    """The held-out samples of a run with several sources; else None, with a note if held-out text is missing."""
    if len(trained.config.data.sources) < 2:
        return None, None
    try:
        heldout = open_heldout(trained)
    except (DataError, OSError) as error:
        why = error.problems[0] if isinstance(error, DataError) else reason_of(error)
        return None, f"the sources' held-out text cannot be read, so the texts stand for sources: {why}"
    if sum(n > 0 for n in heldout.source_samples) < 2:
        return None, "fewer than two sources have held-out text, so the texts stand for sources"
    return heldout, None


@torch.no_grad()
def tally_sources(
    model: Decoder, heldout: Dataset, n_sequences: int, at_once: int, n_experts: int, device: torch.device
) -> dict[str, Tally]:
    """The tally of each source over its first ``n_sequences`` held-out sequences, ``at_once`` in a pass, by its name.

    Padding is not routed.
    """
    found: dict[str, Tally] = {}
    for name, (first, n) in heldout.ranges(n_sequences).items():
        for start in range(first, first + n, at_once):
            batch = heldout.read(np.arange(start, min(first + n, start + at_once)))
            rows = [torch.from_numpy(each) for each in (batch.tokens_BS, batch.positions_BS, batch.documents_BS)]
            targets_BS = torch.from_numpy(batch.targets_BS).to(device)  # with them the head keeps no logits
            context = Context(rows[1], rows[2], has_padding=batch.has_padding).to(device)
            output = model(rows[0].to(device), context, targets_BS)
            choices = {layer: stats.choice_TK for layer, stats in output.stats.items()}
            found.setdefault(name, Tally()).add(choices, n_experts)
    return found
