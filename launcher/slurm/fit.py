"""Checks by closed forms, before submission, whether a job's ranks fit the memory of its GPUs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from launcher.closed_form.architecture import CannotPlan
from launcher.config.layout_rules import with_switches
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.plan.quick import quick_plan, room_on
from launcher.plan.search import RECOMPUTE, overrides_of, search
from launcher.slurm.queue import SlurmError, gpu_types
from launcher.trace.hardware import Hardware, hardware_called, read_hardware

GIB = 2**30
REFUSED_BELOW = 0.1  # chance to fit; below it the plan's whole interval lies above the GPU's memory
WARNED_BELOW = 0.5
MOST_TIMES = 8  # a remedy may name up to so many times the nodes asked for
STAGES = (0, 1, 2, 3)
# For a stage of ZeRO, the switches that lower a rank's memory.
LIGHTER: dict[int, list[dict[str, Any]]] = {1: [{"grad_reduce": "micro_batch"}], 2: [{"offload_optimizer": True}]}
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.125)  # fractions of train.activation_gib that a remedy may suggest


def check_fit(config: RunConfig) -> list[str]:
    """A line for a job that will not fit its GPUs, with a remedy; none where it may fit or the GPU is not known.

    Raises UserError for a ``slurm.gpu`` that is neither a known name nor a file.
    """
    hardware = hardware_of(config)
    if hardware is None:
        return []
    plan = plan_of(config, hardware)
    if plan is None or plan["chance_to_fit"] >= REFUSED_BELOW:
        return []
    n_gpus, most = config.slurm.world_size, max(plan["bytes_by_part"], key=plan["bytes_by_part"].__getitem__)
    needs, room, held = (each / GIB for each in (plan["peak_bytes"], plan["room_bytes"], plan["bytes_by_part"][most]))
    return [
        f"slurm.gpu={hardware.name} must hold what a rank needs, {needs:.1f} GiB by plan, and has {room:.1f} GiB, "
        f"{needs - room:.1f} GiB too little; the largest part is {most}, {held:.1f} GiB; "
        f"{remedy(config, n_gpus, hardware)}, or "
        "--skip-plan"
    ]


def fit_notes(config: RunConfig) -> Iterator[str]:
    """A warning where the chance that the job fits its GPUs is low, but not low enough to refuse it."""
    hardware = hardware_of(config)
    plan = plan_of(config, hardware) if hardware is not None else None
    if hardware is not None and plan is not None and REFUSED_BELOW <= plan["chance_to_fit"] < WARNED_BELOW:
        needs, room = plan["peak_bytes"] / GIB, plan["room_bytes"] / GIB
        yield (
            f"warning: a rank needs about {needs:.1f} GiB by plan, and a {hardware.name} has {room:.1f}: the chance "
            f"that it fits is {plan['chance_to_fit']:.0%}; `roundtable plan` traces it"
        )


def hardware_of(config: RunConfig) -> Hardware | None:
    """The hardware that ``slurm.gpu`` names, or else that of the partition's GPUs by Slurm's name for them.

    None where the job has no GPUs, or where Slurm does not name exactly one known kind.
    """
    slurm = config.slurm
    if slurm.gpus_per_node == 0:
        return None
    if slurm.gpu is not None:
        return read_hardware(slurm.gpu, "slurm.gpu")
    try:
        types = gpu_types(slurm.partition)
    except (SlurmError, UserError, OSError):
        return None
    found = {each.name: each for name in types if (each := hardware_called(name)) is not None}
    return next(iter(found.values())) if len(found) == len(types) == 1 else None


def plan_of(config: RunConfig, hardware: Hardware) -> dict[str, Any] | None:
    """The plan by closed forms; None where they cannot plan this config on this hardware."""
    try:
        return quick_plan(config, config.slurm.world_size, hardware, room_on(hardware))
    except CannotPlan:
        return None


def remedy(config: RunConfig, n_gpus: int, hardware: Hardware) -> str:
    """Words for the nearest config that fits: with the fewest changed keys on these GPUs, or else on more nodes."""
    for times in (1, *(2**power for power in range(1, MOST_TIMES.bit_length()))):
        slurm = dataclasses.replace(config.slurm, nodes=times * config.slurm.nodes)
        larger = dataclasses.replace(config, slurm=slurm)
        found = nearest(larger, times * n_gpus, hardware)
        if found is not None:
            nodes = [f"slurm.nodes={slurm.nodes}"] if times > 1 else []
            return f"the nearest that fits: {' '.join([*nodes, *changes(config, found)])}"
    return f"no layout fits on up to {MOST_TIMES * n_gpus} of them: take a larger GPU or a smaller model"


def nearest(config: RunConfig, n_gpus: int, hardware: Hardware) -> RunConfig | None:
    """The valid config that is likely to fit with the fewest changed keys, the fastest of several; None for none."""
    around = [each for each in variants(config) if not check(each, n_gpus)]
    fitting = [(len(changes(config, each)), seconds, each) for each in around if (seconds := fits(each, hardware))]
    if fitting:
        return min(fitting, key=lambda each: each[:2])[2]
    from launcher.closed_form.gpus import gpu_like

    per_node = max(1, config.slurm.n_tasks_per_node)
    part = gpu_like(hardware, min(per_node, n_gpus))
    found = [each.config for each in search(config, n_gpus, part, part.node_gpus).best if fits(each.config, hardware)]
    return min(found, key=lambda each: len(changes(config, each)), default=None)


def variants(config: RunConfig) -> Iterator[RunConfig]:
    """The config with a larger stage of ZeRO, more recomputation, smaller micro-batches, or several of these.

    Under ZeRO 1 gradients may be reduced after each micro-batch, and under ZeRO 2 optimizer states may go to the host.
    More recomputation is a heavier ``train.recompute``, or a part of the budget where there is one.
    """
    parallel, train = config.parallel, config.train
    if train.activation_gib is None:
        ways = [{"recompute": recompute} for recompute in RECOMPUTE[RECOMPUTE.index(train.recompute) :]]
    else:
        ways = [{"activation_gib": float(f"{part * train.activation_gib:.3g}")} for part in BUDGETS]
    sizes = [each for each in range(1, train.micro_batch_size + 1) if train.micro_batch_size % each == 0]
    for zero in STAGES[parallel.zero :]:
        staged = with_switches(dataclasses.replace(parallel, zero=zero), parallel, config.model.moe)
        held = [staged, *(dataclasses.replace(staged, **lighter) for lighter in LIGHTER.get(zero, []))]
        for way in ways:
            for size in sizes:
                changed = dataclasses.replace(train, micro_batch_size=size, **way)
                for each in held:
                    yield dataclasses.replace(config, parallel=each, train=changed)


def fits(config: RunConfig, hardware: Hardware) -> float | None:
    """Planned seconds of a step where the config is more likely to fit than not; else None."""
    plan = plan_of(config, hardware)
    return plan["step_seconds"] if plan is not None and plan["chance_to_fit"] >= WARNED_BELOW else None


def changes(before: RunConfig, after: RunConfig) -> list[str]:
    """The overrides (``key=value``) that turn the config ``before`` into ``after``."""
    had = set(overrides_of(before, before))
    return [each for each in overrides_of(after, before) if each not in had]
