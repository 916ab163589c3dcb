"""Routers with two experts of almost equal scores, so that rounding decides; and choices that are forced to differ."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import modeling.init as init
from modeling.router import Router


@contextmanager
def twin_experts(difference: float) -> Iterator[None]:
    """A context in which every router's initial row for expert 1 is that for expert 0, times 1 + ``difference``.

    At 1e-7, half a unit in the last place, rounding alone decides which of the two experts has the higher score.
    """
    draw = init.draw_normal

    def draw_normal(seed: int, name: str, shape: Any, std: float) -> Tensor:
        drawn = draw(seed, name, shape, std)
        if name.endswith("router.weight"):
            drawn[1] = drawn[0] * (1 + difference)
        return drawn

    with patch.object(init, "draw_normal", draw_normal):
        yield


def choose_otherwise(least_gap: float, largest_gap: float) -> None:
    """Makes this process's routers replace the last chosen expert by the next best, where the gap is in the range."""
    choose = Router.choose

    @torch.no_grad()
    def chosen(self: Any, scores_TE: Tensor) -> Tensor:
        biased_TE = scores_TE if self.bias is None else scores_TE + self.bias
        best_TX = biased_TE.topk(self.top_k + 1, dim=-1)
        gaps_T = best_TX.values[:, -2] - best_TX.values[:, -1]
        indices_TK = choose(self, scores_TE)
        last_T1 = torch.where(((gaps_T > least_gap) & (gaps_T < largest_gap))[:, None], best_TX.indices[:, -1:], -1)
        changed_TK = torch.cat([best_TX.indices[:, : self.top_k - 1], last_T1], dim=-1)
        return torch.where(last_T1 >= 0, changed_TK, indices_TK)

    Router.choose = chosen


def leave_ties() -> None:
    """Turns off the replay of routers' choices in this process, so that a layout's own choices stay."""
    from launcher.prove.compare.routing import ChoiceReplay

    compare = ChoiceReplay.compare

    def kept(self: Any, layer: int, own_TK: Tensor, *rest: Any) -> Tensor:
        compare(self, layer, own_TK, *rest)
        return own_TK

    ChoiceReplay.compare = kept
