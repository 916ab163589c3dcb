"""A plan of a Roundtable run by closed forms, computed in milliseconds, where a trace would take too long.

It is used when a run starts or is submitted. Training state is counted from the engine's own layout
(launcher.plan.memory), activations and logits by launcher.closed_form.memory, the time by launcher.closed_form.seconds.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from launcher.closed_form.forecast import chance_to_fit, fitted, seconds_by_part
from launcher.closed_form.gpus import Gpu, gpu_like
from launcher.closed_form.memory import layers_of, own_activations, own_head, unlike_positions
from launcher.closed_form.own import job_of_config
from launcher.closed_form.rows import GIB, Job
from launcher.config.tree import RunConfig
from launcher.plan.closed_forms import step_of_rank
from launcher.plan.corrections import MEMORY, STEP, Factors, factors_for
from launcher.plan.memory import rank_memory
from launcher.trace.hardware import Hardware, read_hardware
from launcher.traffic.step import FP32_BYTES
from modeling.loss import CUDA_CHUNK_LOGITS

PASSING = ("activations", "head's gradient", "logits")
MATRICES = "whole matrices of the update"
GRADIENTS = "a micro-batch's gradients, ZeRO's buffers"
DRIVER_SHARE = 0.99  # of a GPU's memory that a process can have
ANY_GPU = "H100"  # stands in where no GPU is given: memory by part does not depend on it


@dataclass(frozen=True)
class Held:
    """Bytes of one rank's tensors, by part; ``left`` and ``scattered`` are factors."""

    weights: float
    masters: float
    optimizer: float
    gradients: float  # sums over the micro-batches
    buffers: float  # one micro-batch's gradients, and what they are reduced through
    activations: float
    head: float  # the gradient of the head's weights, which waits until other gradients are there
    logits: float
    left: float  # the share of activations and the head's gradient that is there when gradients are first reduced
    matrices: float = 0.0  # whole matrices that exist during an update such as Muon's
    scattered: float = 1.0  # the memory that the parts in PASSING take, over the bytes of their tensors

    @property
    def pieces(self) -> float:
        """Bytes that lie unused between tensors which are allocated and freed within a step."""
        parts = self.parts()
        return (self.scattered - 1) * sum(parts.get(name, 0.0) for name in PASSING)

    @property
    def total(self) -> float:
        """Bytes of all parts at the peak."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Name -> bytes of what the worst moment holds: the head at work, the first reduction, or the update."""
        waiting = self.activations + self.head
        head, reduction = self.scattered * (waiting + self.logits), self.scattered * self.left * waiting + self.buffers
        is_update = self.matrices > max(head, reduction)
        is_head = head > reduction and not is_update
        left = 0.0 if is_update else 1.0 if is_head else self.left
        found = {
            "weights": self.weights,
            "masters": self.masters,
            "optimizer state": self.optimizer,
            "sums of gradients": self.gradients,
            "activations": left * self.activations,
            "head's gradient": left * self.head,
            "logits": self.logits if is_head else 0.0,
            GRADIENTS: 0.0 if is_head or is_update else self.buffers,
            MATRICES: self.matrices if is_update else 0.0,
        }
        return {name: count for name, count in found.items() if count}


def held_by(config: RunConfig, world_size: int, job: Job, position: int) -> Held:
    """The bytes that each rank of a pipeline position holds, by part."""
    assert job.ours is not None
    step = step_of_rank(config, world_size, position)
    state, n_weights = rank_memory(step), sum(step.weights.values())
    gradient, chunk = own_head(job, position)
    return Held(
        weights=state.weights,
        masters=state.masters,
        optimizer=state.optimizer,
        gradients=state.gradients,
        buffers=job.ours.buffers(n_weights, layers_of(job, position).total),
        activations=own_activations(job, position),
        head=gradient,
        logits=chunk,
        left=job.ours.left(n_weights, gradient / FP32_BYTES),
        matrices=job.ours.update,
    )


def fullest(config: RunConfig, world_size: int, job: Job) -> Held:
    """The bytes by part at the pipeline position that holds most."""
    found = (held_by(config, world_size, job, each) for each in unlike_positions(job))
    return max(found, key=lambda each: each.total)


@dataclass(frozen=True)
class Room:
    """The memory that a rank has, in bytes, and what else takes of it besides the plan's tensors."""

    n_bytes: float
    outside: float  # bytes of libraries and contexts
    reserved: float  # a factor: what the allocator takes, over what tensors hold
    scattered: float = 1.0  # that factor for tensors which are allocated and freed within a step
    chunk_logits: int = CUDA_CHUNK_LOGITS  # the number of logits that the head computes at a time


def room_on(hardware: Hardware) -> Room:
    """The memory of a GPU, with the share that published runs had outside of their tensors (docs/plan-table.md)."""
    known = fitted().memory
    return Room(DRIVER_SHARE * hardware.memory_gb * GIB, known["outside"] * GIB, known["reserved"])


def quick_plan(config: RunConfig, world_size: int, hardware: Hardware | None, room: Room | None) -> dict[str, Any]:
    """The plan by closed forms: bytes and seconds, and the chance that it fits into ``room``.

    ``step_seconds`` is None without ``hardware``, and ``chance_to_fit`` without ``room``. Both are corrected by
    measured runs on the hardware. Raises CannotPlan where the hardware lacks the precision.
    """
    job, gpu = job_on(config, world_size, hardware)
    assert job.ours is not None
    changes = {} if room is None else {"chunk_logits": room.chunk_logits}
    if hardware is None:  # a CPU, on which attention computes few scores at a time
        changes["scores"] = 0
    job = replace(job, ours=replace(job.ours, **changes))
    held = replace(fullest(config, world_size, job), scattered=room.scattered if room is not None else 1.0)
    kind = "dense" if config.model.moe is None else "MoE"
    factors = factors_for(hardware.name, kind, "closed_forms") if hardware is not None else Factors()
    plan: dict[str, Any] = {
        "kind": kind,
        "gpu": hardware.name if hardware is not None else None,
        "gpus": world_size,
        "tensor_bytes": held.total * factors.memory,
        "bytes_by_part": held.parts(),
        "corrected_by": list(factors.origins),
        **(seconds_of(job, gpu, factors.step) if hardware is not None else {"step_seconds": None}),
    }
    if room is None:
        return plan | {"chance_to_fit": None}
    return plan | fit_of(plan["tensor_bytes"] + held.pieces * factors.memory, room)


def job_on(config: RunConfig, world_size: int, hardware: Hardware | None) -> tuple[Job, Gpu]:
    """The config as a job of the closed forms, and the GPU that it runs on (ANY_GPU where no hardware is given)."""
    per_node = min(max(1, config.slurm.n_tasks_per_node), world_size)
    gpu = gpu_like(hardware or read_hardware(ANY_GPU), per_node)
    return job_of_config(config, world_size, gpu, per_node), gpu


def first_position(config: RunConfig, world_size: int, hardware: Hardware) -> dict[str, float]:
    """Uncorrected seconds of a step and bytes of the first rank's tensors, under the keys STEP and MEMORY."""
    job, gpu = job_on(config, world_size, hardware)
    held = held_by(config, world_size, job, 0)
    return {STEP: seconds_of(job, gpu, 1.0)["step_seconds"], MEMORY: float(held.total)}


def seconds_of(job: Job, gpu: Gpu, factor: float) -> dict[str, Any]:
    """The seconds of a step, in all and by part, with their interval, and tokens a second; all with ``factor``."""
    parts = {name: seconds * factor for name, seconds in seconds_by_part(job, gpu).items()}
    seconds = sum(parts.values())
    low, high = (math.exp(each) for each in fitted().intervals["dense" if job.kind == "dense" else "MoE"])
    return {
        "step_seconds": seconds,
        "step_seconds_low": seconds * low,
        "step_seconds_high": seconds * high,
        "seconds_by_part": parts,
        "tokens_per_second": job.tokens / seconds,
    }


def fit_of(tensor_bytes: float, room: Room) -> dict[str, Any]:
    """The peak of memory with its interval, and the chance that it fits into ``room``."""
    peak, interval = tensor_bytes * room.reserved + room.outside, fitted().intervals["memory"]
    less, more = (math.exp(each) for each in interval)
    return {
        "peak_bytes": peak,
        "peak_bytes_low": peak * less,
        "peak_bytes_high": peak * more,
        "room_bytes": room.n_bytes,
        "chance_to_fit": chance_to_fit(peak, room.n_bytes, interval),
    }
