"""Runs of one rank with optimizer states on the host, with and without skipped steps."""

from typing import Any

import torch
from torch import Tensor

from launcher.config.tree import RunConfig


def after_skipped_steps(config: RunConfig) -> list[dict[str, Tensor]]:
    """The rank's weights, masters and states after two updates, first plain, then with two skipped steps in between.

    One of these is discarded, and one has gradients that are not finite. Each must leave everything unchanged.
    """
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(config.parallel, 120)
    found = [run(config, mesh, skips=skips) for skips in (False, True)]
    close_mesh()
    return found


def run(config: RunConfig, mesh: Any, *, skips: bool) -> dict[str, Tensor]:
    import numpy as np

    from data.dataset import open_dataset
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState
    from launcher.training.step import read_micro_batch

    dataset = open_dataset(config.data, seed=0, vocab_size=config.model.vocab_size, split="train")
    engine, state = build_engine(config, mesh), TrainState()
    engine.initialize_weights(0)
    run_step(config, engine, dataset, state)
    for factor in (3.0, float("inf")) if skips else ():
        before = held(engine)
        batch = read_micro_batch(dataset, np.arange(2), mesh)
        output = engine.model(batch.tokens_BS, batch.context, batch.targets_BS)
        engine.backward(output.loss * factor, 1.0, last=True)
        assert (engine.discard() if factor == 3.0 else engine.step(0.1)).skipped
        after = held(engine)
        assert all(torch.equal(after[name], each) for name, each in before.items())
    run_step(config, engine, dataset, state)
    return held(engine)


def held(engine: Any) -> dict[str, Tensor]:
    """Copies of the masters, states and weights that this rank keeps."""
    pieces = {
        f"{fragment.name} {kind}": flat.clone()
        for fragment in engine.fragments
        for kind, flat in engine.pieces(fragment).items()
    }
    return pieces | {name: weight.clone() for name, weight in engine.kept_weights().items()}
