"""The judgement of a proof: every check, phase by phase, in the order in which a fault would first show."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from launcher.prove import checks, noise_checks
from launcher.prove.checkpoints import read_plain_checkpoint
from launcher.prove.checks import Check
from launcher.prove.compare.boxes import TensorBox
from launcher.prove.compare.halves import with_halves
from launcher.prove.forward_check import check_outputs
from launcher.prove.plain import PlainRun, PlainState, apply_gradients, samples_of_step
from launcher.prove.proof import SGD, Proof, nonlinear_phase, own_phase
from launcher.prove.rank import (
    AFTER_LOAD,
    AFTER_STEPS,
    BEFORE_STEPS,
    LAYOUT_CHECKPOINTS,
    PhaseSeen,
    RankSeen,
    StepSeen,
    hash_row,
)
from launcher.prove.reference import ReferenceStep
from launcher.prove.shrink import nonlinear_for
from modeling.optimizers.config import OptimizerConfig
from parallel.checkpoint.manifest import DamagedCheckpoint
from parallel.checkpoint.places import step_directory
from parallel.zero.ways import sharding_for

SAVED, LOADED = "layout -> one", "one -> layout"  # which side saves and which loads; both continue the nonlinear phase
AGREED = ("loss", "z_loss", "mtp/loss_*", "grad_norm", "moe/balance_loss", "moe/z_loss")


def judge(proof: Proof) -> list[Check]:
    """The checks of all phases, in the order of the table."""
    found = [*judge_sgd(proof), *judge_nonlinear(proof), *judge_saved(proof), *judge_loaded(proof)]
    if proof.plain.own_exact is not None and proof.plain.own_low is not None:
        found += judge_own(proof, proof.plain.own_exact, proof.plain.own_low)
    return found


def phase_of(proof: Proof, name: str) -> list[PhaseSeen]:
    """One phase as every rank saw it."""
    return [rank.phases[name] for rank in proof.ranks]


def all_boxes(phases: Sequence[PhaseSeen], of: Callable[[PhaseSeen], list[TensorBox]]) -> Iterable[TensorBox]:
    """The pieces that ``of`` gives for each rank, in one sequence."""
    return (piece for phase in phases for piece in of(phase))


def judge_sgd(proof: Proof) -> list[Check]:
    """The checks of the phase in fp32 with SGD, which is linear in the gradients, so the tightest bounds hold."""
    seen, plain, steps = phase_of(proof, SGD), proof.plain.sgd, proof.steps
    rows = [step.row for step in seen[0].steps]
    start, end = plain.states[0], plain.states[steps]
    found = [
        checks.check_exact(SGD, "weights at step 0", all_boxes(seen, lambda phase: phase.initial), start.weights),
        checks.check_samples(SGD, proof.ranks, [expected_samples(proof, step) for step in range(steps)]),
        check_outputs(SGD, proof.ranks, plain),
        checks.check_series(SGD, "loss", [row["loss"] for row in rows], [step.loss for step in plain.steps]),
    ]
    if proof.config.model.z_loss:
        theirs = [step.head_z_loss for step in plain.steps]
        found.append(checks.check_series(SGD, "head's z-loss", [row["z_loss"] for row in rows], theirs))
    for k in range(1, 1 + len(proof.config.model.mtp_layers)):
        ours, theirs = [row[f"mtp/loss_{k}"] for row in rows], [step.further_losses[k] for step in plain.steps]
        found.append(checks.check_series(SGD, f"loss of tokens {k + 1} ahead", ours, theirs))
    moe = proof.config.model.moe
    if moe is not None and proof.config.model.has_experts:
        others = [key for key in plain.steps[0].metrics if key not in AGREED]
        found += [
            checks.check_choices(SGD, [phase.replayed for phase in seen]),
            checks.check_counts(SGD, rows, plain.steps),
            _auxiliary(rows, "balance loss", "moe/balance_loss", [step.balance_loss for step in plain.steps]),
            _auxiliary(rows, "z-loss", "moe/z_loss", [step.z_loss for step in plain.steps]),
            checks.check_metrics(SGD, others, rows, plain.steps, lambda: [run.steps for run in proof.nudged]),
        ]
        if moe.balance.moves_bias:
            found.append(checks.check_biases(SGD, proof.ranks, lambda rank: rank.phases[SGD].buffers, end.buffers))
    return [
        *found,
        checks.check_heldout(SGD, heldout_losses(proof, SGD), heldout_truth(proof, plain)),
        checks.check_left_alone(SGD, proof.ranks),
        checks.check_gradients(SGD, seen, plain.steps, proof.cancelled, proof.nudged_gradients),
        *checks.check_cancelled(SGD, seen, plain.steps, proof.cancelled),
        check_norm(proof),
        checks.check_rows_agree(SGD, proof.ranks, AGREED),
        *checks.check_trained(
            SGD,
            f"weights after {steps} steps",
            all_boxes(seen, lambda phase: phase.weights),
            end.weights,
            start.weights,
            proof.cancelled,
            lambda: [run.states[steps].weights for run in proof.nudged],
        ),
    ]


def check_norm(proof: Proof) -> Check:
    """Compares the gradient norm of each step of the SGD phase, before clipping."""
    rows = [step.row for step in phase_of(proof, SGD)[0].steps]
    theirs = [step.grad_norm for step in proof.plain.sgd.steps]
    return checks.check_series(
        SGD,
        "gradient norm",
        [row["grad_norm"] for row in rows],
        theirs,
        nudged=lambda: [[step.grad_norm for step in run.steps] for run in proof.nudged],
    )


def _auxiliary(
    rows: Sequence[Mapping[str, float]], name: str, key: str, theirs: Sequence[Mapping[int, float]]
) -> Check:
    return checks.check_series(SGD, name, [row[key] for row in rows], [sum(layers.values()) for layers in theirs])


def heldout_truth(proof: Proof, plain: PlainRun) -> dict[str, float]:
    """One process's held-out losses before and after the steps, by moment."""
    return {BEFORE_STEPS: plain.heldout[0].loss, AFTER_STEPS: plain.heldout[proof.steps].loss}


def heldout_losses(proof: Proof, phase: str) -> dict[str, dict[str, float]]:
    """Every rank's held-out losses in a phase: moment -> rank -> loss."""
    losses: dict[str, dict[str, float]] = {}
    for rank in proof.ranks:
        for moment, seen in rank.phases[phase].evaluations.items():
            losses.setdefault(moment, {})[rank.place] = seen.loss
    return losses


def expected_samples(proof: Proof, step: int) -> dict[int, str]:
    """Each sample of a step with the hash of its batch row, as one process reads it."""
    samples = samples_of_step(step, proof.config.train.batches)
    batch = proof.dataset.read(samples)
    return {int(sample): hash_row(batch, row) for row, sample in enumerate(samples)}


def judge_nonlinear(proof: Proof) -> list[Check]:
    """The checks of the phase in fp32 with the run's own optimizer, or AdamW where that is SGD.

    They compare the first step's gradients, the weights with what the optimizer makes of the ranks' own gradients, and
    the weights with the plain run's.
    """
    phase, optimizer = nonlinear_phase(proof.config), nonlinear_for(proof.config.optimizer)
    seen, plain, steps = phase_of(proof, phase), proof.plain.nonlinear, proof.steps
    start, end = plain.states[0], plain.states[steps]
    gradients = [checks.step_boxes(seen, lambda phase, step=step: phase.steps[step]) for step in range(steps)]
    applied = [pieces for pieces, step in zip(gradients, plain.steps, strict=False) if not step.skipped]
    weights = list(all_boxes(seen, lambda phase: phase.weights))
    return [
        checks.check_tensors(
            phase,
            "gradients",
            gradients[0],
            plain.steps[0].gradients,
            checks.GRADIENT_BOUND,
            " (step 1)",
            proof.cancelled,
            lambda: proof.nudged_gradients(0),  # from the same weights, by the same samples
        ),
        check_applied(proof, phase, f"{optimizer.name} of these gradients", optimizer, start, applied, weights),
        checks.check_updates(
            phase,
            f"weights after {steps} steps",
            weights,
            end.weights,
            start.weights,
            checks.DRIFT_BOUND,
            plain.steps[:steps],
            sorted({*checks.without_gradient(plain.steps[:steps]), *proof.cancelled}),
            lambda: [run.states[steps].weights for run in proof.nudged_nonlinear],
        ),
        checks.check_left_alone(phase, proof.ranks),
    ]


def check_applied(
    proof: Proof,
    phase: str,
    name: str,
    optimizer: OptimizerConfig,
    start: PlainState,
    gradients: Sequence[list[TensorBox] | None],
    weights: Iterable[TensorBox],
    done: int = 0,
) -> Check:
    """Compares the ranks' weights with what the plain optimizer makes of the ranks' own gradients, from ``start``.

    ``gradients`` are one list of pieces a step, None for a skipped step. ``done`` is the number of steps before
    ``start``, which the learning rate's schedule needs.
    """
    wholes: list[dict[str, Tensor] | None] = []
    shapes = {key: tuple(value.shape) for key, value in start.weights.items()}
    for step in gradients:
        if step is None:
            wholes.append(None)
            continue
        whole, failed = checks.whole_or_failed(phase, name, step, shapes)
        if whole is None:
            assert failed is not None
            return failed
        wholes.append(whole)
    expected = apply_gradients(proof.trainer(optimizer, done), start, wholes)
    if optimizer != optimizer.exact():
        return checks.check_updates(phase, name, weights, expected, start.weights, checks.LOW_UPDATE_BOUND)
    return checks.check_tensors(phase, name, weights, expected, checks.WEIGHT_BOUND)


def judge_saved(proof: Proof) -> list[Check]:
    """The checks of a checkpoint that the layout saved and one process loaded: its content, and the step after it."""
    phase, optimizer = nonlinear_phase(proof.config), nonlinear_for(proof.config.optimizer)
    seen = phase_of(proof, phase)
    try:
        state = read_plain_checkpoint(layout_checkpoint(proof))
    except DamagedCheckpoint as error:
        return [Check(SAVED, "checkpoint is whole", str(error), math.inf, 0.0)]
    trainer = proof.trainer(optimizer, proof.steps)
    trainer.load(state)
    heldout = trainer.evaluate(
        proof.heldout, proof.config.train.eval_sequences, proof.plain.nonlinear.heldout[proof.steps].choices
    )
    plain = trainer.step(torch.tensor(proof.samples_after).numpy(), proof.plain.nonlinear.choices[proof.steps])
    weights = list(all_boxes(seen, lambda phase: phase.weights))
    return [
        checks.check_exact(SAVED, "weights as saved", weights, state.weights),
        *check_saved_biases(proof, SAVED, lambda rank: rank.phases[phase].buffers, state),
        checks.check_heldout(SAVED, heldout_losses(proof, phase), {AFTER_STEPS: heldout.loss}),
        *check_next_step(
            proof, SAVED, state, plain, lambda phase: phase.after_save, lambda phase: phase.after_save_weights
        ),
    ]


def check_next_step(
    proof: Proof,
    name: str,
    state: PlainState,
    plain: ReferenceStep,
    step_of: Callable[[PhaseSeen], StepSeen | None],
    weights_of: Callable[[PhaseSeen], list[TensorBox]],
) -> list[Check]:
    """Compares the loss, the gradients and the weights of the step after the checkpoint with ``state``."""
    optimizer, seen = nonlinear_for(proof.config.optimizer), phase_of(proof, nonlinear_phase(proof.config))
    losses = [step.row["loss"] for each in seen if (step := step_of(each)) is not None]
    gradients, weights = checks.step_boxes(seen, step_of), all_boxes(seen, weights_of)
    applied = [] if plain.skipped else [gradients]
    return [
        checks.check_series(name, "next loss", [losses[0]], [plain.loss], proof.steps + 1),
        checks.check_tensors(
            name,
            "next gradients",
            gradients,
            plain.gradients,
            checks.GRADIENT_BOUND,
            left_out=proof.cancelled,
            nudged=lambda: proof.nudged_after(state),
        ),
        check_applied(proof, name, "next weights", optimizer, state, applied, weights, proof.steps),
    ]


def check_saved_biases(
    proof: Proof, phase: str, buffers: Callable[[RankSeen], Mapping[str, Tensor]], state: PlainState
) -> list[Check]:
    """Compares the routers' biases in a checkpoint; no check where the model has none."""
    if not state.buffers:
        return []
    return [checks.check_biases(phase, proof.ranks, buffers, state.buffers)]


def judge_loaded(proof: Proof) -> list[Check]:
    """The checks of a checkpoint that one process saved and the layout loaded: its content, and the step after it."""
    phase = nonlinear_phase(proof.config)
    seen = phase_of(proof, phase)
    state, plain = proof.checkpoint_state, proof.plain.nonlinear.steps[proof.steps]
    heldout = proof.plain.nonlinear.heldout[proof.steps]
    loaded = all_boxes(seen, lambda phase: phase.loaded)
    choices = checks.check_choices(LOADED, [phase.replayed_after_load for phase in seen])
    return [
        checks.check_exact(LOADED, "weights as saved", loaded, state.weights),
        *check_saved_biases(proof, LOADED, lambda rank: rank.phases[phase].loaded_buffers, state),
        *([choices] if proof.config.model.has_experts else []),
        checks.check_heldout(LOADED, heldout_losses(proof, phase), {AFTER_LOAD: heldout.loss}),
        *check_next_step(
            proof, LOADED, state, plain, lambda phase: phase.after_load, lambda phase: phase.after_load_weights
        ),
    ]


def judge_own(proof: Proof, exact: PlainRun, low: PlainRun) -> list[Check]:
    """The checks of the phase in the run's own precision, with bounds taken from one process in that precision.

    ``exact`` is one process's run in fp32, and ``low`` the same in the run's own precision.
    """
    phase_name, steps, precision = own_phase(proof.config), proof.steps, proof.config.train.precision
    seen = phase_of(proof, phase_name)
    floor = torch.finfo(torch.float16 if precision == "fp16" else torch.bfloat16).eps / 64
    losses = [step.row["loss"] for step in seen[0].steps]
    after = [phase.after_load for phase in seen if phase.after_load is not None]
    exact_losses, low_losses = ([step.loss for step in run.steps] for run in (exact, low))
    heldout_noise = noise_checks.loss_noise(
        [*low_losses[:steps], *(seen.loss for seen in low.heldout.values())],
        [*exact_losses[:steps], *(seen.loss for seen in exact.heldout.values())],
        floor,
    )
    first = next((number for number, step in enumerate(low.steps) if not step.skipped), 0)
    shown = [
        noise_checks.check_noisy_losses(
            phase_name,
            "loss",
            losses,
            low_losses[:steps],
            exact_losses[:steps],
            floor,
            lambda: [draw.steps for draw in proof.losses_anew],
        ),
        noise_checks.check_noisy_heldout(
            phase_name,
            heldout_losses(proof, phase_name),
            heldout_truth(proof, exact),
            heldout_noise,
            lambda: [draw.heldout for draw in proof.losses_anew],
        ),
        checks.check_left_alone(phase_name, proof.ranks),
        noise_checks.check_noisy_gradients(
            phase_name,
            checks.step_boxes(seen, lambda phase: phase.steps[first]),
            low.steps[first].gradients,
            exact.steps[first].gradients,
            f" (step {first + 1})",
            anew=lambda: [step.gradients for step in proof.rounded_anew(first, low.states[first])],
        ),
        checks.check_rows_agree(phase_name, proof.ranks, (*AGREED, "loss_scale", "skipped")),
        noise_checks.check_noisy_losses(
            phase_name,
            f"{LOADED}: next loss",
            [after[0].row["loss"]],
            low_losses[steps:],
            exact_losses[steps:],
            floor,
            lambda: [[step.loss] for step in proof.loaded_anew],
        ),
        noise_checks.check_noisy_gradients(
            phase_name,
            checks.step_boxes(seen, lambda phase: phase.after_load),
            low.steps[steps].gradients,
            exact.steps[steps].gradients,
            "",
            f"{LOADED}: next gradients",
            lambda: [step.gradients for step in proof.loaded_anew],
        ),
    ]
    if precision == "fp8":
        ours, plain = checks.step_boxes(seen, lambda phase: phase.steps[first]), low.steps[first].gradients
        shown.append(
            noise_checks.check_noise_is_there(phase_name, "8 bits are used", ours, plain, exact.steps[first].gradients)
        )
    shown += [check_own_updates(proof, phase_name), *check_accumulation(proof, phase_name)]
    if precision == "fp16":
        shown.append(noise_checks.check_overflow(phase_name, proof.ranks))
    return shown


def check_own_updates(proof: Proof, phase: str) -> Check:
    """Compares the own-precision phase's fp32 masters with what its optimizer makes of the ranks' own gradients."""
    seen, optimizer = phase_of(proof, phase), proof.config.optimizer
    gradients = [
        None if row.get("skipped") else checks.step_boxes(seen, lambda each, step=step: each.steps[step])
        for step, row in enumerate(step.row for step in seen[0].steps)
    ]
    name, weights = f"{optimizer.name} of these gradients", all_boxes(seen, lambda each: each.weights)
    return check_applied(proof, phase, name, optimizer, proof.plain.sgd.states[0], gradients, weights)


def check_accumulation(proof: Proof, phase: str) -> list[Check]:
    """Compares the accumulated gradients of several equal rounds of micro-batches with those of one round.

    They are equal if the sums are kept in fp32: 16 bits would round them. Where a pipeline's sums are rounded once at
    the end, a sum halfway between two numbers may round either way, which is allowed for.
    """
    seen, name = phase_of(proof, phase), "accumulated gradients"
    shapes = checks.shapes_of(proof.plain.sgd.states[0].weights)
    once, failed = checks.whole_or_failed(phase, name, all_boxes(seen, lambda each: each.once), shapes)
    if once is None:
        assert failed is not None
        return [failed]
    repeated = list(all_boxes(seen, lambda each: each.repeated))
    parallel = proof.config.parallel
    if parallel.pp > 1 and sharding_for(parallel, proof.config.train.stored).rounds_sums:
        ours, failed = checks.whole_or_failed(phase, name, repeated, shapes)
        if ours is None:
            assert failed is not None
            return [failed]
        once = with_halves(once, ours)
    return [checks.check_tensors(phase, name, repeated, once, checks.ACCUMULATION_BOUND)]


def layout_checkpoint(proof: Proof) -> Path:
    """The directory of the checkpoint that the layout's ranks saved."""
    return step_directory(proof.folder / LAYOUT_CHECKPOINTS, proof.steps)
