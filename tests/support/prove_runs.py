"""Runs proofs in tests: on a model with every part that a fault can affect, with a fault planted in the ranks."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from any_family import any_family
from launcher.commands.prove import load_small, prove_in, stay_on_cpu
from launcher.prove.report import Outcome
from prove_faults import plant
from prove_faults_listed import DIES, STEPS, Fault
from starved import starved

BothSides = Callable[[], AbstractContextManager[None]]  # must be picklable, since it is sent to the ranks
FOR_GOOD = ExitStack()  # contexts that a rank's process enters and never leaves
CONFIG = """
name: everything
model:
  family: glm4_moe
  vocab_size: 8192
  d_model: 512
  n_layers: 8
  n_heads: 8
  n_kv_heads: 4
  qk_norm: true
  tie_embeddings: true
  moe:
    n_experts: 16
    top_k: 2
    d_ff: 256
    n_shared_experts: 1
    n_dense_layers: 1
    score: sigmoid
    routed_scale: 1.5
    z_loss: 1e-4
    balance: {name: sequence_aux, coefficient: 1e-3}
data: {seq_len: 1024, sources: [{path: no/such/corpus}]}
train: {steps: 100, global_batch_size: 64, micro_batch_size: 4, precision: fp32}
optimizer: {name: adamw}
parallel: {zero: 1}
"""


def write_config(folder: Path) -> Path:
    """Writes the config to a file in ``folder``; returns its path."""
    path = folder / "everything.yaml"
    path.write_text(CONFIG)
    return path


def prove(
    folder: Path,
    overrides: tuple[str, ...] = (),
    ranks: int = 2,
    fault: str | None = None,
    on_both_sides: tuple[BothSides, ...] = (),
    timeout_seconds: int = 120,
) -> Outcome:
    """Runs a proof of two steps; returns its outcome.

    ``fault`` is planted in every rank. The contexts ``on_both_sides`` are entered in the ranks and the plain process.
    """
    stay_on_cpu()
    with ExitStack() as stack:
        for enter in on_both_sides:
            stack.enter_context(enter())
        config, n_ranks = load_small(write_config(folder), overrides, ranks)
        before = functools.partial(prepare_rank, fault, on_both_sides)
        return prove_in(folder, config, n_ranks, STEPS, before=before, timeout_seconds=timeout_seconds)


def prepare_rank(fault: str | None, on_both_sides: tuple[BothSides, ...]) -> None:
    """Called first in every rank: enters the contexts and plants the fault."""
    for enter in on_both_sides:
        FOR_GOOD.enter_context(enter())
    if fault is not None:
        plant(fault)


def prove_fault(folder: Path, fault: Fault) -> Outcome:
    """Runs the proof that has to catch the fault, under its config; returns its outcome."""
    on_both_sides = (*((starved,) if fault.starves else ()), *((any_family,) if fault.has_any_family else ()))
    return prove(folder, fault.overrides, fault.ranks, fault.title, on_both_sides)


def told_about(outcome: Outcome, fault: Fault) -> str:
    """What the proof printed about the fault: the failed check that it is expected in, and the diagnosis."""
    if fault.check == DIES:
        return outcome.died or ""
    failed = [check for check in outcome.checks if not check.passed and check.name == fault.check]
    return "\n".join([*(f"{check.name}: {check.worst} {check.note}" for check in failed[:1]), *outcome.diagnosis])


def failures(outcome: Outcome) -> str:
    """The failed checks, for a test's message."""
    lines = [
        f"{check.phase} {check.name}: {check.worst} {check.error:.2e} > {check.bound:.0e} {check.note}"
        for check in outcome.checks
        if not check.passed
    ]
    return "\n".join([*lines, *outcome.diagnosis, outcome.died or ""])
