"""Runs that nobody chose, saved under one random layout and gone on with under another one, by other switches.

- SGD with momentum: losses and gradients' norms of three steps before and three after are those of one plain process,
  to 1e-6 or to what rounding alone does to that process: four times what micro-batches of one sequence change.
- The run's own optimizer: what the second layout loaded and saved again has the same bits, in every tensor and scalar.

A seed that fails names itself: ``random_resume(seed)`` in tests/support/random_switches.py is its two configs.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pair_runs
from launcher.commands.prove import stay_on_cpu
from launcher.config.tree import RunConfig
from launcher.prove.report import layout_words
from launcher.prove.tokens import write_documents
from layout_runs import LayoutResult, relative, run_reference
from modeling.optimizers.config import OptimizerConfig, SGDConfig
from pair_runs import STEPS, Work, load_under, save_under
from random_switches import random_resume

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

BOUND = 1e-6
N_SEEDS = 40
SGD = SGDConfig(lr=0.05, momentum=0.9, clip_norm=0.5)


@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_random_resume_goes_on(tmp_path, seed):
    words, beyond, differing = resume(tmp_path, seed)
    assert differing == [], words
    assert beyond == [], words


def start_a_sample_early() -> None:
    """The last sample before the save is read once more."""
    restore = pair_runs.restore

    def restore_early(*arguments: Any) -> Any:
        state, warnings = restore(*arguments)
        state.consumed -= 1
        return state, warnings

    pair_runs.restore = restore_early


def forget_momentum() -> None:
    """What is loaded besides weights is lost."""
    restore = pair_runs.restore

    def restore_weights(folder: Path, engine: Any, seed: int) -> Any:
        restored = restore(folder, engine, seed)
        for fragment in engine.fragments:
            for kind, flat in engine.pieces(fragment).items():
                if kind != "weight":
                    flat.zero_()
        return restored

    pair_runs.restore = restore_weights


@pytest.mark.parametrize("fault", [start_a_sample_early, forget_momentum])
def test_planted_faults_are_seen(tmp_path, fault):
    _, beyond, _ = resume(tmp_path, 4, fault)
    assert any(each.startswith("resumed") for each in beyond)
    assert not any(each.startswith("uninterrupted") for each in beyond)


def resume(folder: Path, seed: int, fault: Callable[[], None] | None = None) -> tuple[str, list[str], list[str]]:
    """The two layouts in words, what is beyond its bound, and which of the own optimizer's states differ."""
    stay_on_cpu()
    first, n_first, second, n_second = random_resume(seed)
    data = write_documents(folder, first, (2 * STEPS + 1) * first.train.global_batch_size)

    def work(name: str, config: RunConfig, optimizer: OptimizerConfig, *sources: str) -> Work:
        train = replace(config.train, steps=2 * STEPS)
        config = replace(config, data=data, train=train, optimizer=optimizer)
        return Work(name, config, sources, resaves=name == "own")

    save_works = [work("sgd", first, SGD), work("own", first, first.optimizer)]
    saved = save_under("first", n_first, save_works, folder)[0]["sgd"]
    load_works = [work("sgd", second, SGD, "sgd/first"), work("own", second, first.optimizer, "own/first")]
    loaded = load_under("second", n_second, load_works, folder, fault)

    wanted, singly = (run_reference(save_works[0].config, micro_batch_size) for micro_batch_size in (None, 1))
    runs = {
        "uninterrupted": LayoutResult(saved.rows),
        "resumed": LayoutResult([*saved.rows[:STEPS], *loaded["sgd", "sgd/first"].rows]),
    }
    beyond = []
    for name, run in runs.items():
        for what in ("losses", "grad_norms"):
            numbers, plain, alone = (getattr(each, what) for each in (run, wanted, singly))
            error, bound = relative(numbers, plain), max(BOUND, 4 * relative(alone, plain))
            if not error <= bound:
                beyond.append(f"{name}: {what} {error:.1e} > {bound:.1e}")
    words = f"{layout_words(first, n_first)} -> {layout_words(second, n_second)}"
    return words, beyond, loaded["own", "own/first"].differing
