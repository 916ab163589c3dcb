"""Calibration of plans by a finished run: its measured step time and memory, beside what plans say of that run."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.guard.agreement import hash_of_config
from launcher.plan.ask import ask
from launcher.plan.corrections import MEMORY, STEP, Correction, Engine
from launcher.report.read import RunRows, read_run
from launcher.report.starts import Start, starts_of
from launcher.trace.hardware import Hardware, known_hardware, read_hardware
from launcher.training.run_dir import saved_config
from launcher.training.run_parts import CONFIG, METRICS, check_parts

WARM = 5  # first steps of a start, which are left out: compilers, the allocator and unread files make them slow
FEWEST = 20  # steps that a median needs
GIB = 2**30


def measure_run(path: Path, gpu: str | None) -> tuple[Correction, list[str]]:
    """The correction that follows from the finished run at ``path``, and remarks on what it leaves out. Writes nothing.

    ``gpu`` is the hardware's file or name; with None, the known hardware with the device name that torch gave the run.
    Raises UserError where ``path`` is no trained run, has too few steps, or ran on other hardware.
    """
    check_parts(path, METRICS, CONFIG)
    config, rows = saved_config(path), read_run(path / METRICS)
    starts = starts_of(rows.events, config)
    start = starts[-1] if starts else None
    if config is None or start is None or start.ranks is None:
        raise UserError([f"--calibrate={path} must be a run that has trained, with its config.yaml and metrics.jsonl"])
    hardware = hardware_of(path, start, gpu)
    hardware.check_fp8(config.train.precision)
    chosen_N = steps_of(path, config, rows, start)
    measured = {STEP: float(np.median(step_seconds(rows)[chosen_N]))}
    remarks = []
    if start.event.get("cuda"):
        measured[MEMORY] = float(np.nanmax(rows.columns["peak_gib"][chosen_N])) * GIB
    else:
        remarks.append("memory is not corrected: on a CPU what was measured is the whole process")
    planned, missing = plans_of(path, config, start.ranks, hardware, gpu or hardware.name)
    remarks += missing
    sha = hash_of_config(config)[:12]
    return Correction(
        name=f"{config.name}-{sha[:6]}",
        run=str(path.absolute()),
        date=datetime.date.today().isoformat(),
        config_sha256=sha,
        hardware=hardware.name,
        device=str(start.event.get("device")),
        gpus=start.ranks,
        kind="dense" if config.model.moe is None else "MoE",
        steps=int(chosen_N.sum()),
        measured=measured,
        planned=planned,
    ), remarks


def hardware_of(path: Path, start: Start, gpu: str | None) -> Hardware:
    """The hardware that the run ran on. Raises UserError where ``gpu`` is another device, or no known file has it."""
    device = start.event.get("device")
    if gpu is not None:
        hardware = read_hardware(gpu, "--gpu")
        if hardware.torch_name != device:
            rule = f"must be what {path} ran on, {device!r}, and its torch_name is {hardware.torch_name!r}"
            raise UserError([f"--gpu={gpu} {rule}; leave out --gpu, or give that hardware's file"])
        return hardware
    for name in known_hardware():
        if read_hardware(name).torch_name == device:
            return read_hardware(name)
    rule = f"ran on {device!r}, of which there is no file in configs/hardware"
    raise UserError([f"--calibrate={path} {rule}; write one with that torch_name, and give its path as --gpu"])


def steps_of(path: Path, config: RunConfig, rows: RunRows, start: Start) -> np.ndarray:
    """A mask (N,) of the steps to measure: of the last start, after warm-up, with the whole batch size.

    Raises UserError where there are too few.
    """
    chosen_N = (rows.steps > start.step + WARM) & np.isfinite(rows.columns.get(STEP, np.zeros(len(rows.steps))))
    if config.train.batch_ramp is not None and "batch_size" in rows.columns:
        chosen_N &= rows.columns["batch_size"] == config.train.batches.sizes[-1]
    if chosen_N.sum() < FEWEST:
        rule = f"must have at least {FEWEST} steps after the first {WARM} of its last start, and has {chosen_N.sum()}"
        raise UserError([f"--calibrate={path} {rule}; train it for longer"])
    return chosen_N


def step_seconds(rows: RunRows) -> np.ndarray:
    """Seconds of each step (N,) without the wait for its samples, which plans do not contain."""
    waited_N = rows.columns.get("loader_wait_seconds", np.zeros(len(rows.steps)))
    return rows.columns[STEP] - np.nan_to_num(waited_N)


def plans_of(
    path: Path, config: RunConfig, ranks: int, hardware: Hardware, gpu: str
) -> tuple[dict[Engine, dict[str, float]], list[str]]:
    """Uncorrected plans of the run's first rank by each way of planning (step seconds, tensor bytes), and remarks.

    A remark says why a plan by traced operations is missing.
    """
    from launcher.plan.quick import first_position

    found: dict[Engine, dict[str, float]] = {"closed_forms": first_position(config, ranks, hardware)}
    try:
        plan: dict[str, Any] | None = ask(path / CONFIG, (), gpu, ranks, imbalance=1.0)
    except UserError as error:
        return found, [f"plans by traced operations are not corrected: {error.problems[0]}"]
    if plan is None:
        return found, ["plans by traced operations are not corrected: the run could not be traced"]
    found["traced"] = {STEP: plan["step_seconds"], MEMORY: float(plan["positions"][0]["peak_bytes"])}
    return found, []
