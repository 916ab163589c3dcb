"""Measures how far rounding alone moves the replayed steps; no replay on another layout can be held to less.

The method, its factor and the number of draws are those of `launcher.prove.rounding`: the steps are repeated with every
weight moved to a neighbouring fp32 number, up or down at random. Here they are repeated on the replay's layout, since
the model may not fit one process. Each random direction depends only on the element's position in the logical tensor,
so it is the same whichever ranks hold the element.
"""

from collections.abc import Mapping

import numpy as np
import torch

from data.dataset import open_dataset
from launcher.prove.rounding import DRAWS, NEXT
from launcher.replay.compare import ROUNDED, Numbers
from launcher.replay.plan import Plan
from launcher.replay.rank import StepAgain, steps_again
from launcher.training.loop import build_engine, prepare_process
from modeling.init import Spread, draw_box
from parallel.mesh import opened_mesh
from parallel.zero.engine import Engine


def nudged_rank(plan: Plan) -> list[Numbers] | None:
    """Executes the plan DRAWS times with differently nudged weights. All ranks call it; rank 0 returns the numbers."""
    config = plan.config
    prepare_process(config)
    with opened_mesh(config.parallel, config.train.timeout_seconds) as mesh:
        dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
        engine = build_engine(config, mesh)
        draws = []
        for draw in range(DRAWS):

            def nudge(step: int, _: np.ndarray, draw: int = draw) -> None:
                nudge_masters(engine, draw + DRAWS * step)

            draws.append(numbers_of(steps_again(plan, engine, dataset, nudge, f"rounding, {draw + 1} of {DRAWS}: ")))
        return draws if mesh.rank == 0 else None


@torch.no_grad()
def nudge_masters(engine: Engine, seed: int) -> None:
    """Moves each fp32 master weight to a neighbouring number, up or down at random by ``seed``; zeros stay.

    All ranks call it; afterwards the model's weights are those of the moved masters.
    """
    for fragment in engine.fragments:
        around, weight = fragment.around(), engine.pieces(fragment)["weight"]
        coins = draw_box(seed, f"nudge {fragment.name}", fragment.shape, Spread(1.0), around.start, around.shape)
        signs = fragment.cut(coins).sign().to(weight.device)
        weight.copy_(weight.double() * (1 + NEXT * signs.double()))
    engine.publish_weights()


def numbers_of(steps: Mapping[int, StepAgain]) -> Numbers:
    """The loss and the gradient norm of each step."""
    return {step: {key: float(each.row[key]) for key in ROUNDED} for step, each in steps.items()}
