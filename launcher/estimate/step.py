"""Estimates the time of a training step on GPUs that are not there: traced passes, closed forms, and stated rates.

The passes of one micro-batch are traced; the optimizer's update and the communication outside of the passes are added
by closed forms. Nothing overlaps, not even what parallel.tp_overlap would hide, but for two things. Expert dispatch
takes time only where it is waited for (launcher.estimate.messages): with parallel.ep_overlap other computation hides
it, and with parallel.ep_chunks the experts of other chunks do. Copies of activations to the host and back
(train.offload_activations) take time only beyond that of the pass beside which they run. What runs at the same time is
assumed not to slow each other down. So this is an estimate for kernels of the stated efficiency, and no measurement.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launcher.closed_form.memory import CUT
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.estimate.messages import hide
from launcher.estimate.pass_over import Traced, trace_rank
from launcher.plan.closed_forms import step_of_rank
from launcher.plan.memory import Memory as States
from launcher.plan.memory import cut_bytes, rank_memory, updated_elements
from launcher.trace.hardware import Hardware
from launcher.trace.ops import Op, Phase, Work
from launcher.trace.parts import AXES, BUBBLE, COPIES
from launcher.trace.recorder import Memory
from launcher.trace.roofline import Rates, Sum, least_seconds, sums_by, sums_by_name
from launcher.traffic.axes import pp_traffic
from launcher.traffic.matrices import busiest_owner, matrices_traffic
from launcher.traffic.step import FP32_BYTES, Step, Traffic, around_ring
from launcher.traffic.zero import elements_summed_over_tp, zero_traffic
from modeling.dtypes import DTYPES
from parallel.mesh import Degrees, Mesh
from parallel.pipeline.config import chunks
from parallel.zero.ways import sharding_for

GROUPS = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "ZeRO": "replicas"}  # axis of a part -> group in Degrees


@dataclass
class Estimate:
    """The estimate of one training step on a rank of one pipeline position.

    ``traced`` is one micro-batch, and ``update`` all operations besides, of a micro-batch or of the whole step.
    """

    config: RunConfig
    hardware: Hardware
    rates: Rates
    world_size: int
    pp_rank: int
    n_micro_batches: int
    traced: Traced
    update: list[Op]
    micro_batch_seconds: float
    bubble_seconds: float
    sums: dict[tuple[str, str], Sum]  # (part, phase) of the step, the bubble among them
    tops: dict[tuple[str, str], Sum]  # (part, operation)
    states: States

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(each.seconds for each in self.sums.values())


def estimate_step(
    config: RunConfig, world_size: int, hardware: Hardware, tell: Callable[[str], None] = lambda line: None
) -> Estimate:
    """The estimate of the pipeline position that takes longest, for which the others wait.

    The device must be open (launcher.estimate.device). Raises UserError where the config cannot be estimated.
    """
    check_known(config)
    found: list[Estimate] = []
    for pp_rank, ranks in enumerate(Degrees.of(config.parallel, world_size).stages()):
        where = f"pipeline position {pp_rank} of {config.parallel.pp}" if config.parallel.pp > 1 else "the model"
        tell(f"tracing {where} under fake CUDA tensors")
        found.append(estimate_position(config, world_size, pp_rank, ranks[0], hardware))
    return max(found, key=lambda each: each.seconds)


def check_known(config: RunConfig) -> None:
    """Raises UserError where the optimizer, or the precision with experts, cannot be estimated."""
    if config.optimizer.takes_whole_matrices and config.optimizer.matrix_work(1, 1) is None:
        rule = f"optimizer.name={config.optimizer.name} has no estimate: its matrix_work counts no products"
        raise UserError([f"{rule}; try optimizer.name=adamw"])
    if config.model.moe is not None and config.train.stored != "bf16":
        raise UserError(
            [
                f"train.precision={config.train.precision} with model.moe cannot be traced: torch's rules for fake "
                "grouped products take bf16 alone; try train.precision=bf16"
            ]
        )


def estimate_position(config: RunConfig, world_size: int, pp_rank: int, rank: int, hardware: Hardware) -> Estimate:
    """The estimate of one rank at pipeline position ``pp_rank``. The device must be open."""
    step = step_of_rank(config, world_size, pp_rank)
    degrees = Degrees.of(config.parallel, world_size)
    rates = hardware.rates(near(degrees, rank, max(1, config.slurm.n_tasks_per_node)))
    seconds = [0.0]

    def clock(op: Op | None) -> float:
        seconds[0] += least_seconds(op, rates)[0] if op is not None else 0.0
        return seconds[0]

    traced = trace_rank(config, world_size, rank, clock)
    traced.ops = hide(traced.ops, traced.waits, rates)
    traced.ops.extend(copies_left(traced, rates))
    states = rank_memory(step)
    update = [*update_ops(step, states), *wire_ops(step, traced.mesh)]
    update = [op for op in update if op.part != COPIES or COPIES in rates.wires]
    repeated = [*traced.ops, *(op for op in update if op.work.name == ACCUMULATE)]
    once = [op for op in update if op.work.name != ACCUMULATE]
    ops = [*((op, step.n_micro_batches) for op in repeated), *((op, 1) for op in once)]
    sums = sums_by(ops, rates)
    micro_batch = sum(least_seconds(op, rates)[0] for op in repeated)
    bubble = bubble_seconds(config, micro_batch)
    if bubble:
        sums[BUBBLE, "forward"] = Sum(seconds=bubble)
    return Estimate(
        config=config,
        hardware=hardware,
        rates=rates,
        world_size=world_size,
        pp_rank=pp_rank,
        n_micro_batches=step.n_micro_batches,
        traced=traced,
        update=update,
        micro_batch_seconds=micro_batch,
        bubble_seconds=bubble,
        sums=sums,
        tops=sums_by_name(ops, rates),
        states=states,
    )


def copies_left(traced: Traced, rates: Rates) -> Iterator[Op]:
    """The part of a micro-batch's copies to the host and back that takes longer than the pass beside which they run.

    Nothing where the hardware has no rate for them.
    """
    passes: dict[Phase, tuple[Phase, ...]] = {"forward": ("forward",), "backward": ("recompute", "backward")}
    for phase, theirs in passes.items() if COPIES in rates.wires else ():
        seconds = sum(least_seconds(op, rates)[0] for op in traced.ops if op.phase in theirs)
        left = traced.host_bytes.get(phase, 0) - seconds * rates.wire_rate(COPIES)
        if left > 0:
            yield Op(Work("copies that nothing hides", "wire", None, 0, 0, left, "copy", 0), COPIES, phase)


def near(degrees: Degrees, rank: int, n_per_node: int) -> dict[str, bool]:
    """For each part of communication, whether all the rank's partners are on its own node."""
    found = {"communication: metrics": degrees.world_size <= n_per_node}
    for axis, group in GROUPS.items():
        line = next(line for line in degrees.lines(group) if rank in line)
        found[f"communication: {axis}"] = len({other // n_per_node for other in line}) == 1
    assert found.keys() == {f"communication: {axis}" for axis in AXES}
    return found


ACCUMULATE = "a micro-batch's gradients added up"


def update_ops(step: Step, states: States) -> list[Op]:
    """The operations of ZeRO and the optimizer in a step, with each number read and written once, as by fused kernels.

    That is a lower bound. Operations named ACCUMULATE are those of one micro-batch.
    """
    n_gradients = states.gradients // FP32_BYTES
    if step.parallel.offload_optimizer:
        return [*sum_ops(step, n_gradients), *host_ops(step), *cut_ops(step)]
    share = (states.masters or states.weights) // (FP32_BYTES if states.masters else step.element_bytes)

    return [
        *sum_ops(step, n_gradients),
        moved("norm and clipping", "optimizer", n_gradients * 3 * FP32_BYTES),
        moved("update", "optimizer", share * 3 * FP32_BYTES + 2 * states.optimizer),
        *matrix_ops(step),
        moved("weights from masters", "optimizer", share * (FP32_BYTES + step.element_bytes)),
        *cut_ops(step),
    ]


def matrix_ops(step: Step) -> Iterator[Op]:
    """The matrix products of the rank that has the most of them, where the update needs whole matrices, as Muon's."""
    for (rows, columns), n in busiest_owner(step).items():
        work = step.optimizer.matrix_work(rows, columns)
        if work is not None and n:
            name = f"whole matrices of {rows} x {columns}"
            yield Op(Work(name, "product", DTYPES[work.dtype], n * work.bytes, n * work.flops), "optimizer", "update")


def cut_ops(step: Step) -> Iterator[Op]:
    """The cast of kept weights to 8 bits once a step, which reads them once for rows and twice for transposes."""
    n_elements = cut_bytes(step) // CUT
    if n_elements:
        yield moved("weights cut to 8 bits", "optimizer", n_elements * (3 * step.element_bytes + CUT))


def host_ops(step: Step) -> Iterator[Op]:
    """The copies to an optimizer on the host and back. The time of its update on the host is not known."""
    updated = updated_elements(step)
    for name, n_bytes in (("gradients to the host", FP32_BYTES), ("weights from the host", step.element_bytes)):
        yield Op(Work(name, "wire", None, 0, 0, float(updated * n_bytes), "copy", 0), COPIES, "update")


def sum_ops(step: Step, n_gradients: int) -> Iterator[Op]:
    """The addition of one micro-batch's gradients to fp32 sums, as the mean over a step, and setting these to zero.

    Where sums are not set to zero, a step's first gradients overwrite the last step's sums, which are not read.
    """
    n_weights, part = sum(step.weights.values()), "gradients: sums"
    sharding = sharding_for(step.parallel, step.precision)
    if sharding.scatters:  # packed for the collective; what it gives is read, and added to this rank's part
        packed = step.element_bytes + (FP32_BYTES if step.parallel.grad_reduce_dtype == "fp32" else step.element_bytes)
        part_bytes = 3 * FP32_BYTES * n_gradients - FP32_BYTES * n_gradients / step.n_micro_batches
        yield moved(ACCUMULATE, part, round(n_weights * packed + part_bytes))
        return
    added = n_weights * (step.element_bytes + 2 * FP32_BYTES)
    if not sharding.zeroes_sums:
        yield moved(ACCUMULATE, part, round(added - n_weights * FP32_BYTES / step.n_micro_batches))
        return
    yield moved(ACCUMULATE, part, added)
    yield moved("gradients zeroed", part, n_gradients * FP32_BYTES)


def moved(name: str, part: str, n_bytes: int) -> Op:
    """An operation of the update that only reads and writes."""
    return Op(Work(name, "other", None, n_bytes, 0), part, "update")


def wire_ops(step: Step, mesh: Mesh) -> Iterator[Op]:
    """The communication that traced passes lack: gradients and weights among replicas, sums over tp, pp's messages.

    Raises UserError for a ZeRO stage of which the traffic is not known.
    """
    tp_sums = around_ring("all-reduce", FP32_BYTES * elements_summed_over_tp(step), step.parallel.tp)
    try:
        terms = [
            *zero_traffic(step),
            *matrices_traffic(step),
            Traffic("tp", "gradients of what tp does not cut", "all-reduce", tp_sums),
        ]
    except ValueError as error:
        raise UserError([f"parallel.zero={step.parallel.zero}: {error}; try parallel.zero=1 with --as"]) from None
    axes = {"replicas": "ZeRO", "edp": "ZeRO", "tp": "tp", "pp": "pp"}
    for term in [*terms, *pp_traffic(step)]:
        if term.sent_bytes:
            sent, axis = float(term.sent_bytes), axes[term.axis]
            collective = term.collective
            work = Work(f"{collective}: {term.what}", "wire", None, round(2 * sent), 0, sent, collective)
            yield Op(work, f"communication: {axis}", "update")


def bubble_seconds(config: RunConfig, micro_batch_seconds: float) -> float:
    """Seconds that a pipeline's rank waits at the ends of a step: (pp - 1) micro-batches, over the stages of a rank.

    This is the formula of Narayanan et al. 2021 (arXiv:2104.04473, section 2.2). For zero-bubble schedules it is an
    upper bound.
    """
    pp = config.parallel.pp
    return 0.0 if pp == 1 else (pp - 1) * micro_batch_seconds / chunks(config.parallel.pipeline)


def whole_memory(estimate: Estimate) -> Memory:
    """The micro-batch's memory with the masters, optimizer states and gradient sums added, which ZeRO keeps.

    The traced memory is changed in place, so call this once.
    """
    memory, states = estimate.traced.memory, estimate.states
    kept = {"masters": states.masters, "optimizer state": states.optimizer, "gradients": states.gradients}
    for now in (*memory.held, memory.at_peak):
        now |= {holder: now[holder] + n_bytes for holder, n_bytes in kept.items()}
    return memory
