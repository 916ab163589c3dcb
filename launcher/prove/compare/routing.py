"""Routers' choices, token by token: recorded on one process, and replayed on ranks where a tie was decided otherwise.

In fp32 a router's k-th and (k+1)-th scores can lie so close that rounding decides. Such a tie is no fault of a layout,
but it moves the loss by 5e-7 to 6e-6; so where a rank's choice differs from the reference's and the reference's gap is
small, the reference's choice is taken, and counted.

Shape letters: B sequences of a micro-batch, N of the batch, S sequence, P held positions, T tokens, K top_k, E experts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modeling.context import PADDING
from modeling.decoder import Decoder
from modeling.moe import MoE
from modeling.router import ReviseChoice, Router
from parallel.context_parallel.part import held_positions
from parallel.mesh import Mesh

TIE_GAP = 1e-5  # a choice may differ where the reference's leads the nearest other one by less
NO_CHOICE = -1  # in a recorded choice: padding, which is not routed


@dataclass
class StepChoices:
    """What the reference's routers chose in one step, by sequence and position of the global batch."""

    samples: list[int]  # sample number of each sequence
    experts: dict[int, Tensor] = field(default_factory=dict)  # layer -> int16 (N, S, K), NO_CHOICE in padding
    gaps: dict[int, Tensor] = field(default_factory=dict)  # layer -> (N, S): Router.gap; inf in padding

    def for_tokens(self, valid_NS: Tensor) -> dict[int, Tensor]:
        """The choices of all tokens that are not padding, as ``Context.choices`` takes them: layer -> indices_TK."""
        return {layer: experts[valid_NS].long() for layer, experts in self.experts.items()}


@dataclass
class Replayed:
    """How one rank's choices compared with the reference's, in one phase."""

    tokens: int = 0  # choices compared
    ties: int = 0  # differed at a gap below the bound, and were replayed
    wrong: int = 0  # differed at a larger gap, and were kept
    wrong_layer: int | None = None  # the first such layer
    largest_gap: float = 0.0  # of the choices that differed
    strangers: int = 0  # tokens that the reference never saw


@dataclass(frozen=True)
class HeldTokens:
    """One micro-batch as a rank holds it between layers: sample numbers, and documents at the held positions."""

    samples: Sequence[int]
    positions_P: Tensor  # natural positions held, the same for every sequence
    documents_BP: Tensor


def positions_between_layers(seq_len: int, mesh: Mesh) -> Tensor:
    """The natural positions that this rank holds between layers: its tp part of the positions of its cp rank."""
    cp, tp = mesh.cp, mesh.tp
    held = held_positions(seq_len, cp.rank, cp.degree) if cp.degree > 1 else torch.arange(seq_len)
    return held.chunk(tp.degree)[tp.rank]


def routers_of(model: Decoder) -> dict[int, Router]:
    """The routers of the layers that this process holds."""
    found = {int(name): getattr(layer, "feed_forward", None) for name, layer in model.layers.items()}
    return {layer: moe.router for layer, moe in found.items() if isinstance(moe, MoE)}


def record_choices(model: Decoder, into: Callable[[], StepChoices], valid: Callable[[], Tensor]) -> None:
    """Makes every router write its choices and gaps into ``into()``. For one process that sees the whole batch at once.

    ``valid()`` is the current batch's (N, S) mask of the tokens that are not padding.
    """
    for layer, router in routers_of(model).items():
        router.revise_choice = _recording(router, layer, into, valid)


def _recording(
    router: Router, layer: int, into: Callable[[], StepChoices], valid: Callable[[], Tensor]
) -> ReviseChoice:
    def revise_choice(scores_TE: Tensor, indices_TK: Tensor) -> Tensor:
        valid_NS, step = valid(), into()
        experts_NSK = torch.full((*valid_NS.shape, indices_TK.shape[1]), NO_CHOICE, dtype=torch.int16)
        experts_NSK[valid_NS] = indices_TK.to(torch.int16)
        gaps_NS = torch.full(valid_NS.shape, math.inf)
        gaps_NS[valid_NS] = router.gap(scores_TE)
        step.experts[layer], step.gaps[layer] = experts_NSK, gaps_NS
        return indices_TK

    return revise_choice


class ChoiceReplay:
    """Compares a rank's routers with the reference's choices, step by step, and replays ties.

    Made once for a model. ``held(number)`` gives the tokens of the step's micro-batch ``number``: every router has to
    choose once for each micro-batch, in their order. What is found is counted in ``seen``.
    """

    def __init__(self, model: Decoder, held: Callable[[int], HeldTokens], seen: Replayed) -> None:
        self.held = held
        self.seen = seen
        self.reference: StepChoices | None = None
        self.bound = TIE_GAP
        self.passes: dict[int, int] = {}
        for layer, router in routers_of(model).items():
            router.revise_choice = self._replaying(layer)

    def start_step(self, reference: StepChoices | None, bound: float) -> None:
        """To be called before a step's first forward pass, with the reference's choices (None: nothing is compared).

        Where a choice differs at a gap below ``bound``, the reference's is taken.
        """
        self.reference, self.bound = reference, bound
        self.passes = {}

    def _replaying(self, layer: int) -> ReviseChoice:
        def revise_choice(_: Tensor, own_TK: Tensor) -> Tensor:
            number = self.passes.get(layer, 0)
            self.passes[layer] = number + 1
            return own_TK if self.reference is None else self.compare(layer, own_TK, self.held(number), self.reference)

        return revise_choice

    def compare(self, layer: int, own_TK: Tensor, held: HeldTokens, reference: StepChoices) -> Tensor:
        """The rank's choices with ties replaced by the reference's; ties and other differences are counted."""
        rows = {sample: row for row, sample in enumerate(reference.samples)}
        valid_BP = held.documents_BP != PADDING
        is_known = all(sample in rows for sample in held.samples) and int(valid_BP.sum()) == own_TK.shape[0]
        if not is_known:
            self.seen.strangers += own_TK.shape[0]
            return own_TK
        sequences = torch.tensor([rows[sample] for sample in held.samples], dtype=torch.long)
        theirs_TK = reference.experts[layer][sequences][:, held.positions_P][valid_BP].long()
        gaps_T = reference.gaps[layer][sequences][:, held.positions_P][valid_BP]
        differs_T = (own_TK.cpu().sort(-1).values != theirs_TK.sort(-1).values).any(-1)
        ties_T = differs_T & (gaps_T < self.bound)
        self._count(layer, differs_T, ties_T, gaps_T)
        return torch.where(ties_T[:, None].to(own_TK.device), theirs_TK.to(own_TK.device), own_TK)

    def _count(self, layer: int, differs_T: Tensor, ties_T: Tensor, gaps_T: Tensor) -> None:
        seen, wrong = self.seen, int((differs_T & ~ties_T).sum())
        seen.tokens += differs_T.numel()
        seen.ties += int(ties_T.sum())
        seen.wrong += wrong
        if wrong and seen.wrong_layer is None:
            seen.wrong_layer = layer
        if bool(differs_T.any()):
            seen.largest_gap = max(seen.largest_gap, float(gaps_T[differs_T].max()))
