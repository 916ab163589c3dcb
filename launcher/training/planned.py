"""The plan of a start's step time and memory, logged at its beginning, and its error, logged after some steps.

The plan comes from closed forms (launcher.plan.quick), which take milliseconds and touch nothing of the run. If it
fails, one warning is printed and the run goes on.
"""

import statistics
from collections.abc import Mapping
from typing import Any

import torch

from launcher.closed_form.budget import told_of_budget
from launcher.config.tree import RunConfig
from launcher.console import in_a_line, tell
from launcher.plan.quick import GRADIENTS, MATRICES, Room, quick_plan, room_on
from launcher.trace.hardware import Hardware, known_hardware, read_hardware
from launcher.training.cpu_room import cpu_room
from launcher.watch.watchers import NullWatchers, Watchers
from parallel.mesh import Mesh

MISS_AFTER = 10  # updates after which the plan is compared; the first one warms up and does not count
GIB = 2**30
HELD = {
    "weights": "weights_gib",
    "masters": "masters_gib",
    "optimizer state": "optimizer_gib",
    "sums of gradients": "gradients_gib",
    GRADIENTS: "buffers_gib",
    "activations": "activations_gib",
    "head's gradient": "head_gradient_gib",
    "logits": "logits_gib",
    MATRICES: "matrices_gib",
}
TERMS = ("step_seconds", "peak_gib", "loader_wait_seconds")


class Planned:
    """One start's plan. Without ``fields`` (other ranks than 0, metrics.plan=false, or no plan) it logs nothing."""

    def __init__(self, fields: Mapping[str, Any] | None = None, batch_size: int = 1) -> None:
        """``fields`` are those of the event; ``batch_size`` is the planned number of sequences in an update."""
        self.fields, self.batch_size = fields, batch_size
        self.rows: list[Mapping[str, Any]] = []

    def report(self, watchers: Watchers | NullWatchers, step: int) -> None:
        """Logs the event "plan", if there is one."""
        if self.fields is not None:
            watchers.event({"step": step, "event": "plan", **self.fields})

    def observe(self, row: Mapping[str, Any], watchers: Watchers | NullWatchers) -> None:
        """Collects an update's row; after ten of the planned batch size, logs the event "plan_miss"."""
        if self.fields is None or len(self.rows) == MISS_AFTER:
            return
        if row.get("batch_size", self.batch_size) < self.batch_size:  # of a batch that still grows
            return
        self.rows.append(row)
        if len(self.rows) < MISS_AFTER:
            return
        try:
            found = miss(self.fields, self.rows)
        except Exception as error:  # as for the plan itself
            tell(f"warning: the plan could not be compared with what was measured ({in_a_line(str(error))})")
            return
        watchers.event({"step": row["step"], "event": "plan_miss", **found})


def miss(planned: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields TERM, TERM_planned and TERM_miss: the measured value, the planned one, and measured / planned - 1.

    Measured are medians over ``rows`` but the first, and the largest peak memory. The plan assumes no waiting for
    samples and equal loads of all experts: ``busiest_expert`` is the mean over layers and steps of the busiest expert's
    load, relative to the mean load.
    """
    warm = rows[1:]
    found: dict[str, Any] = {}
    for term in TERMS:
        values = [row[term] for row in warm if isinstance(row.get(term), int | float)]
        if not values:
            continue
        found[term] = max(values) if term == "peak_gib" else statistics.median(values)
        if planned.get(term):
            found |= {f"{term}_planned": planned[term], f"{term}_miss": found[term] / planned[term] - 1}
    loads = [
        value for row in warm for key, value in row.items() if key.startswith("moe/") and key.endswith("/load_max")
    ]
    return found | ({"busiest_expert": statistics.fmean(loads), "busiest_expert_planned": 1.0} if loads else {})


def plan_start(config: RunConfig, mesh: Mesh) -> Planned:
    """The plan of this start. Call it right before training, since on a CPU the process's memory so far is measured."""
    if mesh.rank != 0 or not config.metrics.plan:
        return Planned()
    try:
        return Planned(fields_of(config, mesh), config.train.batches.sizes[-1])
    except Exception as error:  # whatever it is, training does not depend on it
        reason = in_a_line(f"{type(error).__name__}: {error}")
        tell(f"warning: this start could not be planned ({reason}); metrics.plan=false leaves the plan out")
        return Planned()


def report_budget(watchers: Watchers | NullWatchers, config: RunConfig, mesh: Mesh, step: int) -> None:
    """Logs the event "recompute": what each layer recomputes, where train.activation_gib decided it."""
    if config.train.activation_gib is not None:
        watchers.event({"step": step, "event": "recompute", **told_of_budget(config, mesh.world_size)})


def fields_of(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """The fields of the event "plan". ``peak_gib`` is comparable with the key of that name in metrics.jsonl."""
    on_gpu = mesh.device.type == "cuda"
    hardware = hardware_here(mesh.device) if on_gpu else None
    room = gpu_room(mesh.device, hardware) if on_gpu else cpu_room(config, mesh)
    plan = quick_plan(config, mesh.world_size, hardware, room)
    found = {HELD[name]: count / GIB for name, count in plan["bytes_by_part"].items() if count}
    found["peak_gib"] = (plan["tensor_bytes"] if on_gpu else plan["peak_bytes"]) / GIB
    for name in ("peak_bytes", "peak_bytes_low", "peak_bytes_high", "room_bytes"):
        found[name.replace("peak_bytes", "needs").replace("_bytes", "") + "_gib"] = plan[name] / GIB
    found["chance_not_to_fit"] = 1 - plan["chance_to_fit"]
    if plan["step_seconds"] is not None:
        names = ("gpu", "step_seconds", "step_seconds_low", "step_seconds_high", "tokens_per_second")
        found |= {name: plan[name] for name in names}
    return found | {"corrected_by": plan["corrected_by"]}


def hardware_here(device: torch.device) -> Hardware | None:
    """The hardware description of this GPU, found by torch's name for it; None where there is none."""
    name = torch.cuda.get_device_name(device)
    return next((found for each in known_hardware() if (found := read_hardware(each)).torch_name == name), None)


def gpu_room(device: torch.device, hardware: Hardware | None) -> Room:
    """This GPU's memory, and the overheads outside of tensors that its kind of GPU (else an H100) usually has."""
    usual = room_on(hardware if hardware is not None else read_hardware("H100"))
    return Room(float(torch.cuda.get_device_properties(device).total_memory), usual.outside, usual.reserved)
