"""Checks of rows of published measurements: statements in a row that contradict each other."""

from collections.abc import Mapping
from typing import Any

from launcher.closed_form.architecture import CannotPlan
from launcher.closed_form.gpus import gpu_of
from launcher.closed_form.rows import GIB, Job, job_of, measured_bytes, measured_seconds, number, part

NEAR = 0.03  # two statements of one quantity may differ by their rounding
FLOPS_NEAR = 0.07  # sources count norms, embeddings and rotations differently


def contradictions(row: Mapping[str, Any]) -> list[str]:
    """One line for each contradiction in a row; none where too little is known to tell."""
    try:
        job = job_of(row)
        gpu = gpu_of(job.gpu, job.per_node, job.interconnect)
    except CannotPlan:
        return []
    found = [*of_layout(row, job), *of_speed(row, job)]
    held = measured_bytes(row)
    if held is not None and held > gpu.hardware.memory_gb * GIB:
        found.append(f"measured.mem_gb={held / GIB:g} is more than the {gpu.hardware.memory_gb:g} of the GPU")
    seconds, share = measured_seconds(row), None
    if seconds:
        useful = 6 * job.architecture.active_parameters * job.tokens / seconds / job.n_gpus
        share = useful / gpu.peak(job.precision)
    if share is not None and share > 1:
        found.append(f"its tokens/s would take {share:.0%} of the peak")
    return found


def of_layout(row: Mapping[str, Any], job: Job) -> list[str]:
    """One line for each contradiction between the axes, the number of GPUs, the batch and the experts."""
    layout = part(row, "layout")
    found = []
    if number(layout.get("dp")) and number(layout.get("pp")) and job.dp * job.tp * job.pp * job.cp != job.n_gpus:
        product = job.dp * job.tp * job.pp * job.cp
        found.append(f"dp x tp x pp x cp = {product} are not the {job.n_gpus} GPUs")
    if number(layout.get("dp")) and job.global_batch_size % job.dp:
        found.append(f"{job.global_batch_size} sequences are not dealt evenly to {job.dp} replicas")
    if job.architecture.n_experts and job.architecture.n_experts % job.ep:
        found.append(f"{job.architecture.n_experts} experts are not dealt evenly to ep={job.ep}")
    return found


def of_speed(row: Mapping[str, Any], job: Job) -> list[str]:
    """A line where the measured seconds of a step and tokens/s differ by more than rounding."""
    measured = part(row, "measured")
    seconds, speed = number(measured.get("step_s")), number(measured.get("tokens_per_s_per_gpu"))
    if not seconds or not speed:
        return []
    told = job.tokens / seconds / job.n_gpus
    if abs(told / speed - 1) <= NEAR:
        return []
    return [f"measured.step_s makes {told:.0f} tokens/s of a GPU, and tokens_per_s_per_gpu is {speed:g}"]


def miscounts(row: Mapping[str, Any]) -> list[str]:
    """A line where the stated TFLOP/s agree with no usual way to count the FLOPs of the measured step.

    The usual ways count causal or whole attention, with or without recomputation.
    """
    try:
        job = job_of(row)
    except CannotPlan:
        return []
    stated, seconds = number(part(row, "measured").get("tflops_per_gpu")), measured_seconds(row)
    if not stated or not seconds:
        return []
    arch = job.architecture
    rate = job.tokens / seconds / job.n_gpus / 1e12
    plain, core = 6 * arch.active_parameters, 12 * arch.n_layers * arch.attention_width
    usual = {
        f"{share}{again}": rate * times * (plain + core * keys)
        for share, keys in {"causal": arch.attended(job.seq_len), "whole": float(job.seq_len)}.items()
        for again, times in {"": 1.0, " and recomputed": 4 / 3}.items()
    }
    if any(abs(stated / each - 1) <= FLOPS_NEAR for each in usual.values()):
        return []
    name, nearest = min(usual.items(), key=lambda each: abs(stated / each[1] - 1))
    return [
        f"measured.tflops_per_gpu={stated:g} is {stated / nearest - 1:+.0%} of what its step makes ({name} attention)"
    ]
