"""Runs of the real training loop in which a NaN, a loss spike or a stop request is planted in one step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.training.run_dir import claim
from parallel.processes.start import run_ranks

Change = Callable[[Any, int], None]  # called with the engine and the step's number


@dataclass(frozen=True)
class Plan:
    """The faults to plant in a run. Samples are numbered in training order."""

    poisoned: int | None = None  # a sample that makes gradients NaN on the ranks that read it
    spiked: int | None = None  # a sample that makes the loss large
    tensor: str | None = None  # the tensor in whose reduced gradient ``rank`` gets a NaN in step ``step``, once
    rank: int = 0
    step: int = 0
    skipped: tuple[int, int] | None = None  # samples left out from the start, for runs that others are compared with
    loss_scale: float | None = None
    blind: bool = False  # the fault that the norm ignores gradients that this rank does not count
    unsaved: int | None = None  # a step whose checkpoint finds no room on the disk
    told: str | None = None  # a file that gets rank 0's last line for the user
    slow_save: bool = False  # a save takes seconds, longer than a failing process waits for it
    stops_during: str | None = None  # "save" or "evaluation", during which ``rank`` is asked to stop


def run_planned(plan: Plan, config: Any, n_ranks: int = 2) -> list[Any]:
    """Trains on ``n_ranks`` ranks with the plan's faults; returns the ranks' exit codes."""
    with claim(config):
        return run_ranks(
            train_planned, n_ranks, plan, config, timeout_seconds=240, threads=1, preload=["launcher.training.loop"]
        )


def train_planned(plan: Plan, config: Any) -> Any:
    """One rank of ``run_planned``."""
    import launcher.training.loop as loop
    from parallel.processes.stop import StopRequest

    stop = StopRequest()
    poison_samples(plan)
    change_gradients(plan)
    if plan.skipped is not None:
        leave_out(plan.skipped)
    if plan.loss_scale is not None:
        fix_loss_scale(plan.loss_scale)
    if plan.blind:
        make_blind()
    if plan.unsaved is not None:
        refuse_commits(plan.unsaved)
    if plan.told is not None:
        loop.tell = lambda line: Path(plan.told or "").write_text(str(line))
    if plan.slow_save:
        slow_down_saves()
    if plan.stops_during is not None:
        ask_during(plan, stop)
    return loop.train(config, [], stop)


def poison_samples(plan: Plan) -> None:
    import launcher.training.step as step

    read, over_ranks = step.read_micro_batch, step.Sums.over_ranks
    seen: list[int] = []

    def poisoned(
        dataset: Any, indices: Any, mesh: Any, balance_scale: float = 0.0, z_scale: float = 0.0, **options: bool
    ) -> Any:
        if plan.poisoned in indices:
            z_scale = float("nan")
        if plan.spiked in indices:
            seen.append(plan.spiked)
        return read(dataset, indices, mesh, balance_scale, z_scale, **options)

    def spiked(self: Any, *rest: Any) -> Any:
        self.loss = self.loss + 1000.0 * len(seen)
        seen.clear()
        return over_ranks(self, *rest)

    step.read_micro_batch = poisoned
    step.Sums.over_ranks = spiked


def change_gradients(plan: Plan) -> None:
    """Plants the plan's NaN, and asserts that every discarded step leaves weights and optimizer states unchanged."""
    import launcher.training.loop as loop
    from parallel.zero.engine import Engine

    accumulate, discard = loop.accumulate_gradients, Engine.discard
    steps = iter(range(1, 1000))

    def accumulating(engine: Any, *rest: Any) -> Any:
        totals = accumulate(engine, *rest)
        if next(steps) == plan.step and engine.mesh.rank == plan.rank:
            names = {id(weight): name for name, weight in engine.model.named_parameters()}
            (gradient,) = [held for weight, held, _ in engine.gradients() if names[id(weight)] == plan.tensor]
            gradient.view(-1)[0] = float("nan")
        return totals

    def discarding(engine: Any) -> Any:
        before = everything(engine)
        result = discard(engine)
        assert all(map(equal, before, everything(engine))), "a dropped step changed something"
        assert engine.updates() == updates_before, "a dropped step counted"
        return result

    updates_before = 0

    def stepping(engine: Any, lr: float) -> Any:
        nonlocal updates_before
        result = apply(engine, lr)
        updates_before = engine.updates()
        return result

    apply = Engine.step
    Engine.step = stepping
    Engine.discard = discarding
    loop.accumulate_gradients = accumulating


def everything(engine: Any) -> list[torch.Tensor]:
    """Copies of the rank's weights in both precisions, optimizer states and router biases."""
    masters = [piece.clone() for fragment in engine.fragments for piece in engine.pieces(fragment).values()]
    weights = [getattr(weight, "ds_tensor", weight) for weight in engine.model.parameters()]  # ZeRO 3: its partition
    return masters + [tensor.detach().clone() for tensor in (*weights, *engine.model.buffers())]


def equal(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether two tensors are equal element by element, NaNs being equal to NaNs."""
    return torch.allclose(before, after, rtol=0, atol=0, equal_nan=True)


def leave_out(skipped: tuple[int, int]) -> None:
    import launcher.training.loop as loop

    restore = loop.restore

    def leaving_out(*arguments: Any) -> Any:
        state, warnings = restore(*arguments)
        state.skipped = [skipped]
        return state, warnings

    loop.restore = leaving_out


def fix_loss_scale(scale: float) -> None:
    import launcher.training.loop as loop

    build = loop.build_engine

    def fixed(*arguments: Any) -> Any:
        engine = build(*arguments)
        engine.sharding.loss_scale.first["cur_scale"] = scale
        engine.restore_loss_scaler({})
        return engine

    loop.build_engine = fixed


def make_blind() -> None:
    import parallel.zero.engine as module

    norm = module.global_norm
    module.global_norm = lambda parts, *rest: norm([part for part in parts if part[1]], *rest)


def refuse_commits(step: int) -> None:
    import errno

    from parallel.checkpoint.local import LocalStore
    from parallel.checkpoint.store import step_name

    commit = LocalStore.commit

    def refusing(self: Any, name: str, *rest: Any) -> None:
        if name == step_name(step):
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(self, name, *rest)

    LocalStore.commit = refusing


def slow_down_saves() -> None:
    import time

    import parallel.checkpoint.saver as saver

    write = saver.write_shard

    def slowly(*arguments: Any) -> Any:
        time.sleep(3)
        return write(*arguments)

    saver.write_shard = slowly
    saver.SECONDS_AFTER_FAILURE = 0


def ask_during(plan: Plan, stop: Any) -> None:
    """Makes one rank receive a stop signal while it saves or evaluates."""
    import os
    import signal

    import launcher.training.loop as loop

    def asking(work: Any) -> Any:
        def asked(*arguments: Any) -> Any:
            if int(os.environ["RANK"]) == plan.rank:
                stop.hear(signal.SIGUSR1)
            return work(*arguments)

        return asked

    open_saver = loop.open_saver

    def opening(*arguments: Any) -> Any:
        saver = open_saver(*arguments)
        saver.save = asking(saver.save)
        return saver

    if plan.stops_during == "save":
        loop.open_saver = opening
    else:
        loop.heldout_loss = asking(loop.heldout_loss)
