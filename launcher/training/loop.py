"""The training loop, read from top to bottom. Every rank runs it."""

import dataclasses
import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from signal import Signals
from typing import Any

import torch

from data.dataset import Dataset, open_dataset
from data.order import take
from data.prepared import locate
from launcher.closed_form.budget import modes_of
from launcher.config.tree import CheckpointConfig, RunConfig
from launcher.console import tell
from launcher.guard.fence import Fence
from launcher.guard.restarts import Restart
from launcher.guard.watchdog import FLIGHT_RECORD, LOGS, STEP, Watchdog, nccl_seconds
from launcher.report.at_end import write_at_end
from launcher.training.compiling import first_problem, usable_fuse
from launcher.training.cpp_kernels import tell_of_missing_kernels
from launcher.training.flash import choose_flash_attention
from launcher.training.health import Health, OutOfData, Unhealthy, examine, stop_line, tell_of_no_targets
from launcher.training.heap import keep_heap_from_growing, let_segments_grow
from launcher.training.init_from import warn_of_beginnings
from launcher.training.ledger import ledger_row
from launcher.training.linear import tell_of_missing_package
from launcher.training.live_tasks import open_tasks
from launcher.training.low_precision import check_precision, report_slow_products
from launcher.training.planned import plan_start, report_budget
from launcher.training.reports import (
    report_compiled,
    report_complete,
    report_damage,
    report_no_heldout_targets,
    report_packing,
    report_saves,
    report_start,
    report_unsaved,
)
from launcher.training.run_dir import keep_config
from launcher.training.samples import Samples, open_samples, out_of_data_line, steps_to_come, why_out_of_data
from launcher.training.start_record import start_record
from launcher.training.state import TrainState, open_saver, restore, tidy
from launcher.training.step import Totals, accumulate_gradients, agree_to_stop, evaluate, further_losses
from launcher.watch.moe import load_metrics, shows_shares
from launcher.watch.speed import peak_flops_per_second, speed_metrics
from launcher.watch.watchers import NullWatchers, Watchers, open_watchers
from modeling.counts import flops_per_token
from modeling.decoder import Output
from modeling.kernels.fuse import Fuse
from modeling.metrics import logged, metrics_of
from modeling.moe import RoutingStats
from modeling.precision import products_of
from modeling.router_biases import move_router_biases
from modeling.schedules import lr_factor
from modeling.transfer import to_device
from parallel.batch import MicroBatch
from parallel.checkpoint.retention import Retention
from parallel.mesh import Mesh, close_mesh, open_mesh
from parallel.offload import Copies, copies_for
from parallel.processes.stop import STOPPED, StopRequest
from parallel.sizes import DEFAULT_SIZES, Sizes
from parallel.zero.engine import Engine, StepResult


def train(
    config: RunConfig,
    changed: list[tuple[str, Any, Any]],
    stop: StopRequest | None = None,
    restart: Restart | None = None,
    fence: Fence | None = None,
) -> int:
    """Trains to train.steps, from the newest good checkpoint in the run directory or from step 0. All ranks call it.

    Returns the exit code: 0 at train.steps; STOPPED after a request to stop on some rank, with the state saved;
    UNHEALTHY where ``config.health`` stops the run; 2 where the data end too soon; 1 where the last checkpoint could
    not be written. Rank 0 says why on stderr. ``changed`` are the config's differences since the run's last start,
    logged as events like a ``restart`` after a crash. The run directory exists; rank 0 writes into it under ``fence``.
    """
    prepare_process(config)
    mesh = open_mesh(config.parallel, config.train.timeout_seconds, nccl_seconds(config))
    with Watchdog(config, mesh) as watchdog:
        try:
            code = train_watched(config, changed, stop or StopRequest(), restart, mesh, watchdog, fence)
        except Unhealthy as error:
            if mesh.rank == 0:
                tell(error)
                write_at_end(config.run_path, fence)
            code = error.exit_code
    close_mesh()
    return code


def train_watched(
    config: RunConfig,
    changed: list[tuple[str, Any, Any]],
    stop: StopRequest,
    restart: Restart | None,
    mesh: Mesh,
    watchdog: Watchdog,
    fence: Fence | None,
) -> int:
    """Builds, restores and trains the run, from top to bottom; returns the exit code. All ranks call it.

    Raises Unhealthy where health stops the run, and OutOfData where the data end too soon.
    """
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    heldout = open_heldout(config)
    engine = build_engine(config, mesh)
    retention = open_retention(config.checkpoint)
    state, warnings = restore(config.checkpoint_location, engine, config.seed, config.init_from, config.run_path)
    tidy(config, retention, fence, mesh.rank)
    if state.step >= config.train.steps:
        report_complete(config, state, mesh.rank, fence)
        return 0
    prepared = locate(config.data, config.model.vocab_size)
    tokenizer = prepared.tokenizer if prepared is not None else None
    record, tasks = start_record(config, mesh), open_tasks(config, mesh)
    wandb_config = {**dataclasses.asdict(config), "start": record}
    with (
        open_watchers(config, wandb_config, config.run_path, state.step, mesh.rank, fence) as watchers,
        watchdog.recording(watchers, together=Unhealthy),
        open_saver(config, engine, tokenizer, retention, fence, watchers, watchdog) as saver,
        open_samples(config, dataset, mesh) as samples,
    ):
        report_start(watchers, config, record, state, warnings, changed, restart)
        if mesh.rank == 0:
            keep_config(config, fence)
            if state.step == 0:
                warn_of_beginnings(config)
        planned = plan_start(config, mesh)
        planned.report(watchers, state.step)
        report_budget(watchers, config, mesh, state.step)
        report_slow_products(watchers, config, mesh, state.step)
        report_packing(watchers, dataset, state.step)
        report_no_heldout_targets(watchers, heldout, config.train.eval_sequences, state.step)
        if tasks is not None:
            watchers.event(tasks.event(state.step))
        health, stopped, n_compiled = Health(config.health), agree_to_stop(stop, mesh), 0
        samples.expect(steps_to_come(config.train, state.step, state.consumed, state.skipped))
        while state.step < config.train.steps and stopped is None:
            out_of_data = why_out_of_data(dataset.stages, config.train, state.step, state.consumed, state.skipped)
            if out_of_data is not None:
                watchdog.beat(state.step, "checkpoint")
                saver.save(state)
                report_saves(watchers, saver.wait())
                error = saver.last.error if saver.last is not None else None
                raise OutOfData(out_of_data_line(out_of_data, state.step, error))
            watchdog.beat(state.step + 1, STEP)
            consumed = state.consumed
            done = run_step(config, engine, samples, state, stop, health)
            n_compiled = report_compiled(watchers, state.step, n_compiled)
            stopped = done.stop_signal
            if done.event is not None and done.event["action"] == "rollback":
                watchdog.beat(state.step, "rollback")
                report_saves(watchers, saver.wait())
                state = roll_back(config, engine, state, done.event, watchers)
                samples.expect(steps_to_come(config.train, state.step, state.consumed, state.skipped))
                continue
            watchers.consumed(ledger_row(state, consumed, trained=done.trained))
            row = done.row | samples.figures()
            watchers.update(row)
            planned.observe(row, watchers)
            if done.event is not None:
                watchers.event(done.event)
                if done.event["action"] == "stop":
                    watchdog.beat(state.step, "checkpoint")
                    report_saves(watchers, saver.wait())
                    watchers.sync()
                    raise Unhealthy(stop_line(done.event))
            in_haste = stopped is not None and state.step < config.train.steps
            is_eval_due = is_due(state.step, config.train.eval_every_steps, config.train.steps)
            if heldout is not None and is_eval_due and not in_haste:
                watchdog.beat(state.step, "evaluation")
                alive = partial(watchdog.beat, state.step, "evaluation")
                state.heldout = (state.step, heldout_loss(config, engine, heldout, alive))
                watchers.eval(
                    {"step": state.step, "eval_loss": state.heldout[1]} | by_source(config, engine, heldout, alive)
                )
                stopped = stopped or agree_to_stop(stop, mesh)
            if tasks is not None and tasks.is_due(state.step) and not in_haste:
                watchdog.beat(state.step, "evaluation")
                watchers.event(tasks.evaluate(engine, state.step, partial(watchdog.beat, state.step, "evaluation")))
                stopped = stopped or agree_to_stop(stop, mesh)
            if stopped is not None or is_due(state.step, config.checkpoint.every_steps, config.train.steps):
                watchdog.beat(state.step, "checkpoint")
                saver.save(state)
                stopped = stopped or agree_to_stop(stop, mesh)
            report_saves(watchers, saver.poll())
            if state.step % config.train.gc_every_steps == 0:
                gc.collect()
        watchdog.beat(state.step, "checkpoint")
        report_saves(watchers, saver.wait())
        if stopped is not None and state.step < config.train.steps:
            watchers.event({"step": state.step, "event": "stopped", "signal": Signals(stopped).name})
    if mesh.rank == 0 and state.step >= config.train.steps:
        write_at_end(config.run_path, fence)
    if saver.last is not None and saver.last.error is not None:
        report_unsaved(saver.last, mesh.rank)
        return 1
    return 0 if state.step >= config.train.steps else STOPPED


def is_due(step: int, every_steps: int | None, last_step: int) -> bool:
    """Whether something that is done every ``every_steps`` steps (None: never), and after the last step, is due now."""
    return step == last_step or (every_steps is not None and step % every_steps == 0)


def prepare_process(config: RunConfig) -> None:
    """Makes the process's settings that must precede CUDA's start, and turns off automatic garbage collection.

    The loop collects on all ranks at the same steps. Left alone, Python's collector would pause each rank at another
    moment, and all ranks would wait for the paused one.
    """
    let_segments_grow()
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    if torch.cuda.is_available():  # where NCCL's own watchdog writes it; the rank's number follows
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(config.run_path / LOGS / FLIGHT_RECORD))
    else:  # torch's record of collectives tells nothing on gloo, and grows by 5 MB until it holds 2,000
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        keep_heap_from_growing()
    gc.disable()
    gc.collect()
    gc.freeze()


def open_heldout(config: RunConfig) -> Dataset | None:
    """The held-out samples; None where the config asks for no evaluation."""
    if config.train.eval_every_steps is None:
        return None
    return open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="heldout")


def open_retention(checkpoint: CheckpointConfig) -> Retention:
    """The rules by which old checkpoints are deleted."""
    return Retention(checkpoint.keep_last, checkpoint.keep_every_steps, checkpoint.keep_best)


def build_engine(
    config: RunConfig,
    mesh: Mesh,
    sizes: Sizes = DEFAULT_SIZES,
    engine_class: type[Engine] = Engine,
    fuse: Fuse | None = None,
    copies: Copies | None = None,
) -> Engine:
    """The engine with the model in its parallel layout and precision, its weights not yet set. All ranks call it.

    ``fuse`` computes chains of elementwise operations; None chooses by train.compile and this machine, and rank 0 says
    what is missing. ``copies`` moves activations to the host; None follows train.offload_activations. Raises UserError
    where the device lacks train.precision, or the machine the package of train.flash_attention.
    """
    check_precision(config.train.precision, mesh.device)
    choose_flash_attention(config.train.flash_attention, mesh.device)
    if fuse is None:
        say_so = tell if mesh.rank == 0 else lambda line: None
        tell_of_missing_package(config, mesh.device, say_so)
        share = partial(first_problem, mesh)
        tell_of_missing_kernels(config, mesh.device, say_so, share)
        fuse = usable_fuse(config.train.compile, mesh.device, say_so, sizes.row_piece_bytes, share)
    if copies is None and config.train.offload_activations:
        copies = copies_for(mesh.device)
    engine = engine_class(
        mesh,
        config.model,
        config.optimizer,
        parallel=config.parallel,
        precision=config.train.precision,
        micro_batch_size=config.train.micro_batch_size,
        sizes=sizes,
        recompute=modes_of(config, mesh.world_size),
        copies=copies,
        fuse=fuse,
        products=products_of(config.train.precision, fuse, keeps_weights=config.train.fp8_keep_weights),
    )
    if mesh.pp.degree > 1:
        engine.open_pipeline(config.parallel.pipeline, config.train.micro_batch_size, config.data.seq_len)
    return engine


@dataclass
class StepDone:
    """The outcome of one step, the same on all ranks."""

    row: dict[str, Any]  # the step's line of metrics.jsonl
    trained: bool  # whether the optimizer advanced
    event: dict[str, Any] | None  # what was wrong with the step, and the action to be taken; None: nothing
    stop_signal: int | None  # the signal by which some rank was asked to stop


def run_step(
    config: RunConfig,
    engine: Engine,
    dataset: Samples,
    state: TrainState,
    stop: StopRequest | None = None,
    health: Health | None = None,
) -> StepDone:
    """One training step: reads the batch, accumulates gradients, applies or drops them, and advances ``state``.

    All ranks call it. ``health`` judges the gradients and the loss before they are applied; None judges nothing. A
    batch in which no target counts (documents of one token each) has a loss of 0 and updates nothing.
    """
    started = time.perf_counter()
    step = state.step + 1
    indices = take(state.consumed, config.train.batches.size_at(step), state.skipped)
    n_targets, n_tokens = dataset.count(indices)
    size, drawn_from = config.train.micro_batch_size, (config.seed, step)
    totals = accumulate_gradients(engine, dataset, indices, size, stop or StopRequest(), drawn_from)
    if n_targets:
        event = examine(health, engine, dataset, indices, state, totals.loss / n_targets)
    else:
        event = tell_of_no_targets(health, dataset, indices, step)
    lr = config.optimizer.lr * lr_factor(config.schedule, step, config.train.steps)
    applies = n_targets > 0 and (event is None or event["action"] == "report")
    update = engine.step(lr) if applies else engine.discard()
    if not update.skipped:
        move_router_biases(engine.model, config.model, move_to(totals, engine.mesh.device))
        state.losses = [*state.losses, totals.loss / n_targets][-config.health.spike_window :]
    state.step, state.consumed, state.tokens = step, int(indices[-1]) + 1, state.tokens + n_tokens
    seconds = time.perf_counter() - started
    row = metrics_row(config, engine, state, totals, update, n_targets, n_tokens, lr, seconds)
    if config.model.mtp is not None:
        row |= further_losses(totals, dataset.count_further(indices, config.model.mtp.depth))
    row |= dataset.progress(state.consumed, state.skipped)
    return StepDone(row, not update.skipped, event, totals.stop_signal)


def roll_back(
    config: RunConfig, engine: Engine, state: TrainState, event: dict[str, Any], watchers: Watchers | NullWatchers
) -> TrainState:
    """Restores the last good checkpoint, or step 0, and returns its state with all samples consumed since left out.

    All ranks call it. Batches before the bad one are left out too, since they often contributed to it.
    """
    restored, warnings = restore(config.checkpoint_location, engine, config.seed, config.init_from, config.run_path)
    left_out = (restored.consumed, state.consumed)
    restored.skipped = [*restored.skipped, left_out]
    watchers.rewind(restored.step)
    report_damage(watchers, restored.step, warnings)
    watchers.event(
        event
        | {"step": restored.step, "event": "rollback", "cause": event["event"], "at_step": event["step"]}
        | {"samples_left_out": list(left_out)}
    )
    return restored


def move_to(totals: Totals, device: torch.device) -> dict[int, torch.Tensor]:
    """Layer -> each expert's count of token-expert pairs, as a tensor on the device."""
    return {layer: to_device(torch.from_numpy(counts), device) for layer, counts in totals.counts.items()}


def metrics_row(
    config: RunConfig,
    engine: Engine,
    state: TrainState,
    totals: Totals,
    update: StepResult,
    n_targets: int,
    n_tokens: int,
    lr: float,
    seconds: float,
) -> dict[str, Any]:
    """One line of metrics.jsonl for the step. The layers' own numbers appear under the keys of their ``Metric``."""
    device, precision = engine.mesh.device, config.train.precision
    speed = speed_metrics(
        tokens=n_tokens,
        step_seconds=seconds,
        flops_per_token=flops_per_token(config.model, config.data.seq_len),
        peak_flops=peak_flops_per_second(device, config.train.stored),
        n_devices=engine.mesh.world_size,
        device=device,
    )
    row = {"step": state.step, "tokens": state.tokens, "loss": totals.loss / max(1, n_targets), "lr": lr}
    if config.model.z_loss:
        row |= {"z_loss": totals.z_loss / max(1, n_targets)}
    row |= {"grad_norm": update.grad_norm, **speed}
    if config.train.batch_ramp is not None:
        row |= {"batch_size": config.train.batches.size_at(state.step)}
    if precision == "fp16":
        row |= {"loss_scale": update.loss_scale}
    if precision == "fp16" or update.skipped:
        row |= {"skipped": update.skipped}
    if config.model.moe is not None:
        every_steps, n_shares = config.metrics.expert_shares_every_steps, sum(map(len, totals.counts.values()))
        with_shares = shows_shares(state.step, config.train.steps, every_steps, n_shares)
        moe = {"n_tokens": n_tokens, "top_k": config.model.moe.top_k, "with_shares": with_shares}
        row |= load_metrics(totals.counts, **moe)
        n_sequences = config.train.batches.size_at(state.step)
        row |= logged(metrics_of(RoutingStats), totals.metrics, n_tokens=n_tokens, n_sequences=n_sequences)
    return row


def by_source(config: RunConfig, engine: Engine, heldout: Dataset, alive: Callable[[], None]) -> dict[str, float]:
    """``eval_loss/NAME`` -> the held-out loss of each source; empty without train.eval_by_source. All ranks call it.

    Each source is a separate evaluation; ``alive`` is called after each micro-batch.
    """
    if not config.train.eval_by_source:
        return {}
    ranges = heldout.ranges(config.train.eval_sequences)
    return {f"eval_loss/{name}": heldout_loss(config, engine, heldout, alive, at) for name, at in ranges.items()}


def heldout_loss(
    config: RunConfig,
    engine: Engine,
    heldout: Dataset,
    alive: Callable[[], None],
    at: tuple[int, int] | None = None,
) -> float:
    """The held-out token cross-entropy. All ranks call it. ``alive`` is called after each micro-batch.

    ``at`` is (first sample, number of samples); None takes the first train.eval_sequences samples.
    """
    train = config.train
    first, n_sequences = at or (0, train.eval_sequences)

    def run(micro_batches: list[MicroBatch]) -> Iterator[Output]:
        for output in engine.evaluate(micro_batches):
            alive()
            yield output

    return evaluate(run, config.model, heldout, n_sequences, train.micro_batch_size, engine.mesh, first)
