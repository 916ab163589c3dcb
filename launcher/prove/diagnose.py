"""What a failed proof points at: the first tensor that differs, its axis, and the factor between the two gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher.prove.checks import (
    COPY,
    GRADIENT_BOUND,
    LOSS_BOUND,
    check_heldout,
    copy_errors,
    moves_of,
    relative,
    step_boxes,
)
from launcher.prove.compare.boxes import Uncovered, assemble
from launcher.prove.compare.errors import (
    Factor,
    execution_order,
    explain_norm,
    factor,
    name_ratio,
    near,
    norm,
    tensor_errors,
)
from launcher.prove.forward_check import check_outputs
from launcher.prove.judge import check_norm, heldout_losses, heldout_truth, phase_of
from launcher.prove.plain import PlainState, samples_of_step
from launcher.prove.proof import SGD, Proof, plain_trainer
from launcher.prove.rounding import bounds_for
from launcher.prove.shrink import sgd_for
from modeling.config import ModelConfig
from modeling.logical import logical_tensors
from parallel.layout import layout_of
from parallel.mesh import Degrees

FIT_RESIDUAL = 1e-3  # a mixture of gradients explains another where no more is left, as a share of the other's norm


def diagnose(proof: Proof) -> list[str]:
    """Lines of text on what the earliest differences of the SGD phase point at; empty where nothing differs."""
    lines = diagnose_weights(proof)
    if lines:
        return lines  # all later differences follow from these
    for step in range(proof.steps):
        theirs = proof.plain.sgd.steps[step].gradients
        lines = [*diagnose_loss(proof, step), *diagnose_gradients(proof, step)] or diagnose_norm(proof, step, theirs)
        if lines:
            return lines
    return diagnose_heldout(proof)


def diagnose_heldout(proof: Proof) -> list[str]:
    """One line where the held-out loss differs though training does not; empty where it does not differ."""
    check = check_heldout(SGD, heldout_losses(proof, SGD), heldout_truth(proof, proof.plain.sgd))
    if check.passed:
        return []
    return [
        f"the held-out loss differs ({check.worst}), though training's losses and gradients are equal: "
        "the evaluation's samples, mask, count or schedule, or the weights that it sees"
    ]


def degrees_of(proof: Proof) -> dict[str, int]:
    """Every degree or count above one that a gradient or loss could have been multiplied or divided by, by name."""
    mesh = Degrees.of(proof.config.parallel, proof.n_ranks)
    train = proof.config.train
    batch_size = train.batches.size_at(1)
    degrees = {name: getattr(mesh, name) for name in ("dp", "cp", "tp", "ep", "pp")}
    degrees["edp"] = mesh.edp if mesh.ep > 1 else 1  # else the same as the others
    degrees["dp x cp"] = mesh.dp * mesh.cp if mesh.cp > 1 else 1
    degrees["micro-batches of a rank"] = batch_size // (mesh.dp * train.micro_batch_size)
    degrees["micro-batches"] = batch_size // train.micro_batch_size
    degrees["sequences"] = batch_size
    return {name: int(degree) for name, degree in degrees.items() if degree > 1}


def axis_words(name: str, proof: Proof) -> str:
    """The axis that cuts a tensor, the ranks that sum its gradient, and the ZeRO stage, in words."""
    mesh, place = Degrees.of(proof.config.parallel, proof.n_ranks), layout_of(proof.config.model)[name]
    degree = 1 if place.axis is None else int(getattr(mesh, place.axis))
    cut = f"dim {place.dim} is cut by {place.axis}={degree}" if degree > 1 else "no axis cuts it"
    replicas, count = ("edp", mesh.edp) if place.is_expert else ("dp x cp", mesh.dp * mesh.cp)
    return f"{cut}; summed over {replicas}={count}, parallel.zero={proof.config.parallel.zero}"


def diagnose_weights(proof: Proof) -> list[str]:
    """One line naming the first tensor, in execution order, that is wrong on some rank at step 0; empty without any."""
    truth: PlainState = proof.plain.sgd.states[0]
    wrong: dict[str, str] = {}
    for rank in proof.ranks:
        for piece in rank.phases[SGD].initial:
            if not torch.equal(piece.value, truth.weights[piece.name][piece.box.slices]):
                wrong.setdefault(piece.name, rank.place)
    if not wrong:
        return []
    first = execution_order(wrong)[0]
    return [f"{first} on {wrong[first]} is not the tensor of (seed, name); {len(wrong)} tensors differ at step 0"]


def diagnose_loss(proof: Proof, step: int) -> list[str]:
    """One line with the ratio of the two losses and, in the first step, where in the model outputs begin to differ.

    Empty where the losses are equal.
    """
    ours, theirs = proof.ranks[0].phases[SGD].steps[step].row["loss"], proof.plain.sgd.steps[step].loss
    if relative(ours, theirs) <= LOSS_BOUND:
        return []
    ratio = ours / theirs if theirs else float("nan")
    named = name_ratio(ratio, degrees_of(proof))
    told = f"step {step + 1}: the loss is {ratio:.6f} of one process's" + (f", which is {named}" if named else "")
    if step > 0:
        return [f"{told}, after weights or biases that differ"]
    outputs = check_outputs(SGD, proof.ranks, proof.plain.sgd)
    if outputs.passed:
        return [f"{told}; every module's outputs are equal: the head, the loss, its targets or its divisor differ"]
    return [f"{told}; the first output in execution order that differs: {outputs.worst}, by {outputs.error:.1e}"]


def diagnose_gradients(proof: Proof, step: int) -> list[str]:
    """Lines on the first tensor in execution order whose gradient differs: its axis, the ratio, and what explains it.

    Empty where all gradients are equal, or where the ranks' pieces do not cover the tensors.
    """
    theirs = proof.plain.sgd.steps[step].gradients
    pieces = step_boxes(phase_of(proof, SGD), lambda phase: phase.steps[step])
    try:
        ours = assemble(pieces, {name: tuple(value.shape) for name, value in theirs.items()})
    except Uncovered:
        return []  # the check of gradients reports it
    errors = tensor_errors(ours, theirs) | copy_errors(pieces, ours, theirs)
    errors = {name: error for name, error in errors.items() if name.removeprefix(COPY) not in proof.cancelled}
    bounds = bounds_for(GRADIENT_BOUND, errors, moves_of(lambda: proof.nudged_gradients(step), theirs))
    differing = [name for name, error in errors.items() if not error <= bounds.of(name.removeprefix(COPY))]
    wrong = execution_order(name for name in differing if not name.startswith(COPY))
    copies = [name for name in differing if name.startswith(COPY)]
    if not wrong:
        return [f"step {step + 1}: gradients differ in {len(copies)} copies alone: {copies[0]}"] if copies else []
    first = wrong[0]
    lines = [
        f"step {step + 1}: {len(wrong)} of {len(theirs)} gradients differ; the first in execution order is {first}, "
        f"by {errors[first]:.1e} ({axis_words(first, proof)}); the last is {wrong[-1]}",
        ratio_words(first, found := factor(ours[first], theirs[first]), proof),
    ]
    mixture = None if found.is_plain else explain_by_losses(proof, step, ours, first)
    return lines if mixture is None else [*lines, mixture]


def ratio_words(name: str, found: Factor, proof: Proof) -> str:
    """The factor between two gradients of one tensor in words, with the name of the degree that it equals."""
    if not found.is_plain:
        return f"{name}: {found.ratio:.4f} x one process's gradient, but no plain factor ({found.residual:.1e} is left)"
    named = name_ratio(found.ratio, degrees_of(proof))
    meaning = f", which is {named}" if named else ""
    return f"{name}: {found.ratio:.4f} x one process's gradient{meaning}"


def explain_by_losses(proof: Proof, step: int, ours: Mapping[str, Tensor], name: str) -> str | None:
    """The weights of the losses (tokens, balance, z) that explain the wrong gradient of ``name``, in words, or None.

    One process repeats the step with each loss alone, from the same weights and with the same choices.
    """
    if not bool(ours[name].isfinite().all()):
        return None
    parts = gradients_by_loss(proof, step)
    parts = {loss: gradients for loss, gradients in parts.items() if norm(gradients[name]) > 0}
    if len(parts) < 2:
        return None
    matrix = torch.stack([gradients[name].double().flatten() for gradients in parts.values()], dim=1)
    target = ours[name].double().flatten()
    weights = torch.linalg.lstsq(matrix, target[:, None]).solution.squeeze(1)
    left = norm(target - matrix @ weights)
    if not left <= FIT_RESIDUAL * norm(target):
        return None
    said = []
    for loss, weight in zip(parts, weights.tolist(), strict=True):
        named = name_ratio(weight, degrees_of(proof))
        said.append(f"{loss} x {weight:.4f}" + (f" (= {named})" if named else ""))
    if all(near(weight, 1.0) for weight in weights.tolist()):
        return None
    return f"{name}: it is the gradient of {', '.join(said)}"


def gradients_by_loss(proof: Proof, step: int) -> dict[str, dict[str, Tensor]]:
    """One process's gradients of each loss alone, in a step of the SGD phase."""
    model, plain = proof.config.model, proof.plain.sgd
    whole = plain.steps[step].gradients
    without_aux = gradients_of(proof, step, weighing(model))
    parts = {"the token loss": without_aux}
    if model.moe is not None and model.moe.balance_coefficient:
        with_balance = gradients_of(proof, step, weighing(model, balance=True))
        parts["the balance loss"] = {name: with_balance[name] - without_aux[name] for name in whole}
    if model.moe is not None and model.moe.z_loss:
        with_z = gradients_of(proof, step, weighing(model, z=True))
        parts["the z-loss"] = {name: with_z[name] - without_aux[name] for name in whole}
    if model.z_loss:
        with_head_z = gradients_of(proof, step, weighing(model, head_z=True))
        parts["the head's z-loss"] = {name: with_head_z[name] - without_aux[name] for name in whole}
    return parts


def weighing(model: ModelConfig, *, balance: bool = False, z: bool = False, head_z: bool = False) -> ModelConfig:
    """``model`` with only these auxiliary losses left on."""
    model = model if head_z else replace(model, z_loss=0.0)
    if model.moe is None:
        return model
    changes: dict[str, Any] = {} if z else {"z_loss": 0.0}
    if not balance and model.moe.balance_coefficient:
        changes["balance"] = replace(model.moe.balance, coefficient=0.0)
    return replace(model, moe=replace(model.moe, **changes))


def gradients_of(proof: Proof, step: int, model: ModelConfig) -> dict[str, Tensor]:
    """One process's gradients in a step of the SGD phase, for ``model``: the config's, with other loss coefficients."""
    plain = proof.plain.sgd
    config, optimizer = replace(proof.config, model=model), sgd_for(proof.config.optimizer)
    trainer = plain_trainer(config, proof.dataset, optimizer, done=step)
    trainer.load(plain.states[step])
    samples = samples_of_step(step, proof.config.train.batches)
    return trainer.step(samples, plain.choices[step]).gradients


def diagnose_norm(proof: Proof, step: int, theirs: Mapping[str, Tensor]) -> list[str]:
    """One line on a wrong gradient norm, and which tensors it miscounts; empty where the norm of this step is right."""
    ours, expected = proof.ranks[0].phases[SGD].steps[step].row["grad_norm"], proof.plain.sgd.steps[step].grad_norm
    check = check_norm(proof)
    if check.passed or check.worst != f"step {step + 1}":
        return []
    found = explain_norm(ours, theirs, groups_of(list(theirs), proof.config.model), degrees_of(proof))
    told = f"step {step + 1}: the gradient norm is {ours / expected:.6f} of one process's"
    return [f"{told}: {found}" if found else told]


def groups_of(names: Sequence[str], model: ModelConfig) -> dict[str, list[str]]:
    """Groups of tensors that a gradient norm may miscount together, by title; empty groups are left out."""
    layout, tensors = layout_of(model), logical_tensors(model)
    groups = {
        "everything": list(names),
        "the experts": [name for name in names if layout[name].is_expert],
        "what no axis cuts": [name for name in names if layout[name].axis is None],
        "what tp cuts": [name for name in names if layout[name].axis == "tp"],
        "the routers": [name for name in names if "scores" in tensors[name].weight.dims],
    }
    return {title: group for title, group in groups.items() if group}
