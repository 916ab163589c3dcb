"""A model whose gradients rounding alone moves beyond their bound is proven, and faults in it are seen.

OLMo 2 norms what attention puts out. With little weights and a bias that is, after an update, little but the bias. Of
queries' and keys' gradients a thousandth is left, which a unit in the last place of the weights moves by 1e-4.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.commands.prove import load_small, prove_in, stay_on_cpu
from launcher.prove.checks import GRADIENT_BOUND, Check
from launcher.prove.proof import Proof
from launcher.prove.rank import AFTER_STEPS
from launcher.prove.report import Outcome
from prove_faults import hook_gradients
from prove_runs import failures, write_config
from random_layouts import random_family_run
from random_switches import random_free_run

OVERRIDES = (
    *("model.family=olmo2", "model.moe=null", "model.norm_placement=post", "model.qk_norm_over=all_heads"),
    *("model.qkv_bias=true", "model.o_bias=true", "model.init_std=0.002"),
)
LAYOUTS = ["parallel.zero=1", "parallel.tp=2", "parallel.cp=2"]


def prove(folder: Path, layout: str, factor: float | None = None) -> Outcome:
    """A proof of two steps; ``factor`` multiplies one gradient that rounding moves, on every rank."""
    stay_on_cpu()
    config, n_ranks = load_small(write_config(folder), (*OVERRIDES, layout), 2)
    before = None if factor is None else functools.partial(hook_gradients, "layers.1.attention.q.weight", factor)
    return prove_in(folder, config, n_ranks, 2, before=before, timeout_seconds=120)


def gradients(outcome: Outcome) -> Check:
    return next(check for check in outcome.checks if check.name == "gradients")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.slow] if number else []) for number, layout in enumerate(LAYOUTS)],
)
def test_what_rounding_moves_is_held_to_that(tmp_path: Path, layout: str) -> None:
    outcome = prove(tmp_path, layout)
    assert outcome.proven, failures(outcome)
    check = gradients(outcome)
    assert GRADIENT_BOUND < check.error <= check.bound < 100 * GRADIENT_BOUND
    assert "(step 2)" in check.worst and check.note.startswith("rounding alone moves it by ")


def test_planted_gradient_off_by_more_than_rounding_is_caught(tmp_path: Path) -> None:
    """By half a percent: it shows in the first step, which is well conditioned, at the bound of all models."""
    outcome = prove(tmp_path, LAYOUTS[0], 1.005)
    check = gradients(outcome)
    assert not check.passed and check.worst == "layers.1.attention.q.weight (step 1)" and check.bound == GRADIENT_BOUND
    assert any("1.0050 x one process's gradient" in line for line in outcome.diagnosis)


def test_planted_nudge_that_moves_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the layout, which is right, is not proven: the test above would say nothing."""
    monkeypatch.setattr("launcher.prove.rounding.nudge", lambda model, seed: None)
    outcome = prove(tmp_path, LAYOUTS[0])
    assert not outcome.proven and gradients(outcome).bound == GRADIENT_BOUND


def unmoved(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Proof:
    """A proof of three steps on one rank, not judged, where what is to be nudged or rounded otherwise is left alone."""
    proofs: list[Proof] = []
    monkeypatch.setattr("launcher.commands.prove.judge", lambda proof: proofs.append(proof) or [])
    monkeypatch.setattr("launcher.prove.rounding.nudge", lambda model, seed: None)
    monkeypatch.setattr("launcher.prove.proof.round_anew", lambda model, masters, seed: None)
    monkeypatch.setattr("launcher.prove.proof.DRAWS", 1)
    run = ["optimizer={name: muon}", "model.residual_dropout=0.2", "train.batch_ramp={start: 4, increment: 4}"]
    config, n_ranks = load_small(write_config(folder), [*run, *overrides], 1)
    prove_in(folder, config, n_ranks, 3, timeout_seconds=120)
    return proofs[0]


def test_what_is_repeated_is_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing nudged both phases come out bit for bit: dropout, a growing batch and the rule's states, too."""
    proof = unmoved(tmp_path, monkeypatch)
    for repeated, run in ((proof.nudged, proof.plain.sgd), (proof.nudged_nonlinear, proof.plain.nonlinear)):
        (again,) = repeated
        for name, weight in run.states[proof.steps].weights.items():
            assert torch.equal(again.states[proof.steps].weights[name], weight), name


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_what_is_rounded_otherwise_is_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Each step in the run's own precision comes out bit for bit, the one after the checkpoint, too; so do all losses.

    The scale of fp16's loss begins where gradients overflow, so that some steps are skipped.
    """
    monkeypatch.setattr("launcher.prove.plain.FIRST_LOSS_SCALE", 2.0**20)
    proof = unmoved(tmp_path, monkeypatch, f"train.precision={precision}")
    _, low = proof.own_runs
    assert not low.steps[-1].skipped
    assert any(step.skipped for step in low.steps) == (precision == "fp16")
    states = [*low.states[: proof.steps], proof.checkpoint_state]
    for number, (seen, state) in enumerate(zip(low.steps, states, strict=True)):
        (again,) = proof.rounded_anew(number, state)
        for name, gradient in seen.gradients.items():
            assert torch.equal(again.gradients[name], gradient) or not gradient.isfinite().all(), (number, name)
    (losses,) = proof.losses_anew
    assert losses.steps == [step.loss for step in low.steps[: proof.steps]]
    assert list(losses.heldout.values()) == [low.heldout[0].loss, low.heldout[proof.steps].loss]


def test_a_draw_that_skips_otherwise_goes_on_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all have as many updates: here a draw skips every step, and ends with the run's weights all the same."""
    proof = unmoved(tmp_path, monkeypatch, "train.precision=fp16")
    _, low = proof.own_runs
    monkeypatch.setattr(Proof, "own_step", lambda self, trainer, step: replace(low.steps[step], skipped=True))
    assert proof.run_rounded(0).heldout[AFTER_STEPS] == low.heldout[proof.steps].loss != low.heldout[0].loss


@pytest.mark.slow
@pytest.mark.parametrize(("drawn", "seed"), [(random_free_run, 35), (random_family_run, 3246)])
def test_what_rounding_in_16_bits_moves_is_held_to_that(tmp_path: Path, drawn: Any, seed: int) -> None:
    """Two router biases and a key bias, whose distance from fp32 one process's single draw made too small by chance."""
    stay_on_cpu()
    config, n_ranks = drawn(seed)
    outcome = prove_in(tmp_path, config, n_ranks, 2, timeout_seconds=300)
    assert outcome.proven, failures(outcome)
