"""How far rounding alone moves the executed steps: where that is beyond a bound, no other layout can be held to it.

As `launcher.prove.rounding` has it, of which the measure, its factor and the number of draws are; but on the layout of
the replay, for what a run trains may fit no single process. So each element of the fp32 masters is moved by a coin that
depends on its place in the logical tensor alone, and is moved alike wherever it is held.
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
    """The plan executed DRAWS times, each time with other coins. All ranks call it; rank 0 returns what came out."""
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
    """Moves each fp32 master to a neighbouring number, up or down by a coin of ``seed``; zeros stay.

    All ranks call it.
    """
    for fragment in engine.fragments:
        around, weight = fragment.around(), engine.pieces(fragment)["weight"]
        coins = draw_box(seed, f"nudge {fragment.name}", fragment.shape, Spread(1.0), around.start, around.shape)
        signs = fragment.cut(coins).sign().to(weight.device)
        weight.copy_(weight.double() * (1 + NEXT * signs.double()))
    engine.publish_weights()


def numbers_of(steps: Mapping[int, StepAgain]) -> Numbers:
    """Of each step, what rounding moves."""
    return {step: {key: float(each.row[key]) for key in ROUNDED} for step, each in steps.items()}
