"""Runs that nobody chose, saved under one random layout and gone on with under another one, by other switches.

- SGD with momentum: losses and gradients' norms of three steps before and three after are those of one plain process,
  to 1e-6 or to what rounding alone does to that process: four times what micro-batches of one sequence change.
- The run's own optimizer: what the second layout loaded and saved again has the same bits, in every tensor and scalar.

A seed that fails names itself: ``random_resume(seed)`` in tests/support/random_switches.py is its two configs.
"""

from dataclasses import replace

import pytest

from launcher.commands.prove import stay_on_cpu
from launcher.config.tree import RunConfig
from launcher.prove.report import layout_words
from launcher.prove.tokens import write_documents
from layout_runs import LayoutResult, run_reference
from modeling.optimizers.config import OptimizerConfig, SGDConfig
from pair_runs import STEPS, Work, load_under, save_under
from random_switches import random_resume

pytestmark = pytest.mark.timeout(900)

BOUND = 1e-6
N_SEEDS = 40
SGD = SGDConfig(lr=0.05, momentum=0.9, clip_norm=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(N_SEEDS))
def test_random_resume_goes_on(tmp_path, seed):
    stay_on_cpu()
    first, n_first, second, n_second = random_resume(seed)
    words = f"{layout_words(first, n_first)} -> {layout_words(second, n_second)}"
    data = write_documents(tmp_path, first, (2 * STEPS + 1) * first.train.global_batch_size)

    def work(name: str, config: RunConfig, optimizer: OptimizerConfig, *sources: str) -> Work:
        train = replace(config.train, steps=2 * STEPS)
        config = replace(config, data=data, train=train, optimizer=optimizer)
        return Work(name, config, sources, resaves=name == "own")

    save_works = [work("sgd", first, SGD), work("own", first, first.optimizer)]
    saved = save_under("first", n_first, save_works, tmp_path)[0]["sgd"]
    load_works = [work("sgd", second, SGD, "sgd/first"), work("own", second, first.optimizer, "own/first")]
    loaded = load_under("second", n_second, load_works, tmp_path)

    plain = replace(save_works[0].config, train=replace(save_works[0].config.train, activation_gib=None))
    wanted, singly = (run_reference(plain, micro_batch_size) for micro_batch_size in (None, 1))
    whole = LayoutResult([*saved.rows[:STEPS], *loaded["sgd", "sgd/first"].rows])
    assert loaded["own", "own/first"].differing == [], words
    for key in ("loss", "grad_norm"):
        bound = max(BOUND, 4 * worst(singly, wanted, key))
        assert worst(whole, wanted, key) <= bound, f"{words}\n{key}"
        assert worst(LayoutResult(saved.rows), wanted, key) <= bound, f"{words}\n{key}, uninterrupted"


def worst(found: LayoutResult, wanted: LayoutResult, key: str) -> float:
    """The largest relative difference of a number that each step has."""
    pairs = zip(found.rows, wanted.rows, strict=True)
    return max(abs(mine[key] - theirs[key]) / abs(theirs[key]) for mine, theirs in pairs)
