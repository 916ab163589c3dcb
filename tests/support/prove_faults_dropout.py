"""Faults in the numbers that determine dropout's masks, and in gradients of dropped weights. For prove_faults.plant."""

from dataclasses import replace
from itertools import count
from typing import Any

import torch


def draw_by_own_positions() -> None:
    """A rank's positions are counted from its own first position instead of the sequence's."""
    from modeling.dropout import Draws

    at = Draws.at
    Draws.at = lambda self, places_S: at(self, torch.arange(len(places_S)))


def draw_by_own_rows() -> None:
    """A sample's number, from which its mask is drawn, is its row in the micro-batch."""
    from modeling.dropout import Draws

    of_samples = Draws.of_samples
    Draws.of_samples = lambda self, *place: of_samples(
        replace(self, samples_B=torch.arange(len(self.samples_B))), *place
    )


def draw_alike_in_layers() -> None:
    """Every layer has the same masks."""
    from modeling.dropout import Draws

    of_samples = Draws.of_samples
    Draws.of_samples = lambda self, layer, site: of_samples(self, 0, site)


def draw_as_in_the_first_step() -> None:
    """Every step has the same masks."""
    from modeling.dropout import Draws

    of_samples = Draws.of_samples
    Draws.of_samples = lambda self, *place: of_samples(replace(self, step=1), *place)


def count_steps_of_the_process() -> None:
    """Steps are counted from the start of the process, even where it resumes from a checkpoint."""
    import launcher.training.loop as loop

    accumulate, numbers = loop.accumulate_gradients, count(1)

    def counting(*arguments: Any) -> Any:
        *others, (seed, _) = arguments
        return accumulate(*others, (seed, next(numbers)))

    loop.accumulate_gradients = counting


def draw_anew_in_recomputation() -> None:
    """Recomputation in the backward pass draws other masks than the forward pass."""
    from launcher.prove.compare.outputs import in_backward
    from modeling.dropout import Draws

    of_samples = Draws.of_samples
    Draws.of_samples = lambda self, *place: of_samples(replace(self, seed=self.seed + in_backward()), *place)


def drop_in_evaluation() -> None:
    """Dropout stays on in evaluation."""
    import launcher.training.step as step

    original = step.read_micro_batch

    def read_micro_batch(*arguments: Any, drawn_from: Any = None, **options: Any) -> Any:
        return original(*arguments, drawn_from=drawn_from or (0, 0), **options)

    step.read_micro_batch = read_micro_batch


def drop_for_the_first_heads() -> None:
    """Each rank's heads have the masks of the first rank's heads."""
    from modeling.dropout import ScoreDropout

    of_part = ScoreDropout.of_part
    ScoreDropout.of_part = lambda self, rank, degree: of_part(self, 0, degree)


def count_keys_of_a_tile() -> None:
    """Under ring attention a tile's keys are counted from the tile's own first key."""
    from parallel.context_parallel.plan import Tile

    factors = Tile.factors
    Tile.factors = lambda self, terms: factors(replace(self, first_key_place=0), terms)


def forget_factors(module: Any) -> None:
    """Dropped attention weights pass gradients on as if they were not dropped, in ``module``'s backward pass."""
    backward = module.attend_scored_backward
    module.attend_scored_backward = lambda *arguments: backward(*arguments[:-1], None)
