"""A traced plan as JSON, and printed as tables."""

from collections.abc import Sequence
from typing import Any

from launcher.closed_form.budget import modes_of, told
from launcher.console import say
from launcher.estimate.forecast import Forecast, Position
from launcher.estimate.order import Simulated
from launcher.plan.costs import costs_line, run_costs, tokens_of
from launcher.tables import plain_table, wide_console
from launcher.trace.parts import BUBBLE, COPIES
from modeling.counts import flops_per_token

GB = 1e9

Bar = tuple[str, int, int, float, float]  # kind, stage, micro-batch, begin, end; an update has stage and number -1


def report_of(found: Forecast, price: float | None = None) -> dict[str, Any]:
    """All figures of a plan, unrounded, in bytes and seconds. ``price`` is that of a GPU-hour."""
    config, train, seconds = found.config, found.config.train, found.step_seconds
    size = train.batches.sizes[-1]
    tokens_per_step, tokens = size * config.data.seq_len, tokens_of(config)
    flops = flops_per_token(config.model, config.data.seq_len) * tokens_per_step
    speed = tokens_per_step / seconds
    peak = found.hardware.peak_flops[train.stored]
    room = round(found.hardware.memory_gb * GB)
    most = found.fullest.memory
    slowest = max(range(len(found.positions)), key=lambda each: found.order.busy[each])
    return {
        "name": config.name,
        "gpu": found.hardware.name,
        "gpus": found.world_size,
        "gpus_per_node": max(1, config.slurm.n_tasks_per_node),
        "precision": train.precision,
        "recompute": told(modes_of(config, found.world_size)),
        "activation_gib": train.activation_gib,
        "offload_activations": train.offload_activations,
        "host_bytes": most.host,
        "host_copy_bytes": dict(found.fullest.time.traced.host_bytes),
        "offload_optimizer": config.parallel.offload_optimizer,
        "host_state_bytes": found.fullest.time.states.host,
        "host_rate": found.fullest.time.rates.wires.get(COPIES),
        "routing_imbalance": found.imbalance,
        "fits": most.peak <= room,
        "memory_bytes": room,
        "peak_bytes": most.peak,
        "holds_most": max(most.at_peak, key=lambda each: most.at_peak[each]),
        "fullest_position": found.positions.index(found.fullest),
        "slowest_position": slowest,
        "positions": [position_json(each) for each in found.positions],
        "micro_batches": found.positions[0].time.n_micro_batches,
        "step_seconds": seconds,
        "bubble_share": found.order.bubble,
        "tokens_per_step": tokens_per_step,
        "tokens_per_second": speed,
        "mfu": flops / seconds / (peak * found.world_size),
        "tokens": tokens,
        **run_costs(tokens, speed, found.world_size, found.hardware.watts, price),
        "parts": parts_json(found, slowest),
        "timeline": bars_of(found.order, [each.update_seconds for each in found.positions]),
    }


def position_json(position: Position) -> dict[str, Any]:
    """One pipeline position's memory and times, as the plan's JSON holds them."""
    memory, passes = position.memory, position.passes
    return {
        "rank": position.rank,
        "peak_bytes": memory.peak,
        "peak_phase": memory.phase,
        "between_steps_bytes": memory.between_steps,
        "held_bytes": memory.at_peak,
        "forward_seconds": passes.forward,
        "backward_seconds": passes.backward,
        "update_seconds": position.update_seconds,
    }


def parts_json(found: Forecast, slowest: int) -> dict[str, float]:
    """Seconds of a step by part at the position that computes longest; what remains of the step is its waiting."""
    parts: dict[str, float] = {}
    for (part, _), each in found.positions[slowest].time.sums.items():
        if part not in (BUBBLE, "communication: pp"):
            parts[part] = parts.get(part, 0.0) + each.seconds
    if len(found.positions) > 1:
        parts["pipeline: waiting"] = found.step_seconds - sum(parts.values())
    return parts


def bars_of(order: Simulated, updates: Sequence[float]) -> list[list[Bar]]:
    """The bars of each pipeline position: its passes that take any time, then the update."""
    rows: list[list[Bar]] = []
    for spans, end, update in zip(order.spans, order.ends, updates, strict=True):
        row: list[Bar] = [
            (each.kind, each.stage, each.micro_batch, begin, finish) for each, begin, finish in spans if finish > begin
        ]
        rows.append([*row, ("update", -1, -1, end, end + update)])
    return rows


def gb(n_bytes: float) -> str:
    """Bytes as text in GB of 10^9, the unit of GPUs' data sheets."""
    return f"{n_bytes / GB:,.2f}"


def print_plan(plan: dict[str, Any]) -> None:
    """Prints the tables of memory and time, and whether the plan fits."""
    console = wide_console()
    fullest, slowest = plan["fullest_position"], plan["slowest_position"]
    position = plan["positions"][fullest]
    say(
        f"PLAN, no measurement: {plan['name']} on {plan['gpus']:,} {plan['gpu']}, {plan['gpus_per_node']} a node, "
        f"{plan['precision']}; {plan['micro_batches']} micro-batches a step"
    )
    if plan["activation_gib"] is not None:
        budget = f"train.activation_gib={plan['activation_gib']:g}"
        say(f"to keep activations within {budget}, layers recompute: {plan['recompute']}")
    if plan["offload_activations"]:
        say(offload_line(plan))
    if plan["offload_optimizer"]:
        host, n = plan["host_state_bytes"], plan["gpus_per_node"]
        say(
            f"fp32 masters and optimizer states are the host's ({gb(host)} GB a rank with their gradients, "
            f"{gb(host * n)} a node); the update on its cores takes no time in this plan"
        )
    table = plain_table(f"memory of rank {position['rank']}", ">GB", ">share")
    for holder, count in sorted(position["held_bytes"].items(), key=lambda each: -each[1]):
        table.add_row(holder, gb(count), f"{count / position['peak_bytes']:.1%}")
    table.add_row("peak", gb(position["peak_bytes"]), "100.0%")
    console.print(table)
    if len(plan["positions"]) > 1:
        console.print()
        table = plain_table(
            "pipeline position", ">first rank", ">GB at most", ">forward ms", ">backward ms", ">update ms"
        )
        for number, each in enumerate(plan["positions"]):
            times = (each[f"{name}_seconds"] * 1e3 for name in ("forward", "backward", "update"))
            table.add_row(str(number), str(each["rank"]), gb(each["peak_bytes"]), *(f"{time:,.2f}" for time in times))
        console.print(table)
    console.print()
    where = f" (position {slowest})" if len(plan["positions"]) > 1 else ""
    table = plain_table(f"time of a step{where}", ">ms", ">share")
    for part, seconds in sorted(plan["parts"].items(), key=lambda each: -each[1]):
        table.add_row(part, f"{seconds * 1e3:,.2f}", f"{seconds / plan['step_seconds']:.1%}")
    table.add_row("a step", f"{plan['step_seconds'] * 1e3:,.2f}", "100.0%")
    console.print(table)
    say(f"\n{speed_line(plan)}\n{costs_line(plan, plan['tokens'])}\n{verdict(plan)}")


def offload_line(plan: dict[str, Any]) -> str:
    """A line on offloaded activations: the host memory that they take, and the time of their copies."""
    host, sent = plan["host_bytes"], max(plan["host_copy_bytes"].values(), default=0)
    whole = f"{gb(host)} GB of page-locked memory a rank, {gb(host * plan['gpus_per_node'])} a node"
    rate = plan["host_rate"]
    counted = "takes no time in this plan: the GPU's file has no host_bytes_per_second"
    if rate is not None:
        counted = f"takes {sent / rate * 1e3:,.2f} ms at {rate / GB:,.1f} GB/s beside each pass: the longer one counts"
    return f"activations wait on the host ({whole}); {gb(sent)} GB a micro-batch each way, which {counted}"


def speed_line(plan: dict[str, Any]) -> str:
    """A line with tokens a second, MFU, and the pipeline's idle share."""
    bubble = f", pipeline idle {plan['bubble_share']:.1%} of the passes" if len(plan["positions"]) > 1 else ""
    return f"{plan['tokens_per_second']:,.0f} tokens/s, MFU {plan['mfu']:.1%}{bubble}"


def verdict(plan: dict[str, Any]) -> str:
    """A line that says whether the plan fits the device's memory."""
    room, peak = plan["memory_bytes"], plan["peak_bytes"]
    most = f"the largest part is {plan['holds_most']}"
    if plan["fits"]:
        return f"fits: {gb(peak)} of {gb(room)} GB, {gb(room - peak)} left for the allocator, NCCL and CUDA; {most}"
    return f"does not fit: {gb(peak)} GB, {gb(peak - room)} more than the {gb(room)} of a {plan['gpu']}; {most}"
