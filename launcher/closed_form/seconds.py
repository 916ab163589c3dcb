"""Seconds of a step from its amounts of work and a few constants with a physical meaning, for many jobs at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launcher.closed_form.gpus import Gpu
from launcher.closed_form.rows import Job
from launcher.closed_form.work import AMOUNTS, Work
from launcher.trace.hardware import FAMILIES

# name -> (initial value, standard deviation of its logarithm: how far the fit may be expected to move it, meaning)
CONSTANTS: dict[str, tuple[float, float, str]] = {
    "products ampere": (0.80, 0.15, "share of the peak that products in 16 bits reach"),
    "products hopper": (0.73, 0.15, "the same"),
    "products blackwell": (0.70, 0.15, "the same"),
    "products cdna": (0.50, 0.15, "the same"),
    "low fp8": (0.75, 0.15, "of products in 8 bits, over the share in 16 bits"),
    "low mxfp8": (0.75, 0.15, "the same, scaled by blocks"),
    "low fp4": (0.55, 0.20, "the same, in 4 bits"),
    "grouped": (0.80, 0.15, "of products by experts, over the share of others"),
    "attention ampere": (0.65, 0.20, "share of the peak that attention in one kernel reaches, on what the mask leaves"),
    "attention hopper": (0.50, 0.20, "the same"),
    "attention blackwell": (0.55, 0.20, "the same"),
    "attention cdna": (0.35, 0.20, "the same"),
    "memory": (0.75, 0.15, "share of the memory's bandwidth"),
    "eager": (0.80, 0.40, "bytes that kernels move beside, where they are not fused, over the bytes counted"),
    "layer": (60e-6, 0.50, "seconds that a pass over a layer takes beside its work"),
    "moe layer": (300e-6, 0.50, "seconds that a pass over a layer with experts takes beside its work"),
    "expert": (15e-6, 0.50, "seconds that a pass over one expert takes beside its work"),
    "low launches": (1.7, 0.20, "the two above in 8 or 4 bits, whose casts are kernels, too, over those in 16"),
    "near": (0.70, 0.20, "share of the links' rate within a node or domain"),
    "dispatch": (
        0.66,
        0.15,
        "share of the links' rate within a node or domain that rows on their way to experts reach",
    ),
    "dispatch far": (0.85, 0.15, "share of the network's rate that they reach"),
    "far": (0.65, 0.20, "share of the network's rate"),
    "exposed": (0.60, 0.30, "share of messages within layers that nothing hides"),
    "shards": (0.30, 0.40, "share of the messages of ZeRO 3 that delay the passes although both run at once"),
    "hidden": (0.60, 0.30, "share of a step's passes behind which sums over the replicas hide"),
    "hop": (12e-6, 0.50, "seconds for each rank that a message to all replicas passes"),
    "spread": (0.004, 0.50, "longer steps for each doubling of the nodes: the slowest GPU, congestion"),
}
NAMES = list(CONSTANTS)
LOW = ("fp8", "mxfp8", "fp4")
Constants = Mapping[str, float]


def start() -> dict[str, float]:
    """The constants' initial values in the fit."""
    return {name: first for name, (first, _, _) in CONSTANTS.items()}


class Batch:
    """The amounts of work of many jobs as arrays, and the indices of the constants for their GPUs and precisions."""

    def __init__(self, works: Sequence[Work], jobs: Sequence[Job], gpus: Sequence[Gpu]) -> None:
        families = [gpu.hardware.family for gpu in gpus]
        self.amounts = {name: np.array([getattr(work, name) for work in works]) for name in AMOUNTS}
        self.family = np.array([FAMILIES.index(family) for family in families])
        self.is_low = np.array([job.precision in LOW for job in jobs])
        self.low = np.array([LOW.index(job.precision) if job.precision in LOW else 0 for job in jobs])
        self.overlaps = np.array([job.system.overlaps for job in jobs])
        self.hides_dispatch = np.array([job.system.hides_dispatch for job in jobs])

    def take(self, which: Any) -> "Batch":
        """Some of the jobs, chosen by an index or mask of numpy."""
        part = object.__new__(Batch)
        part.amounts = {name: values[which] for name, values in self.amounts.items()}
        part.family, part.low, part.is_low = self.family[which], self.low[which], self.is_low[which]
        part.overlaps, part.hides_dispatch = self.overlaps[which], self.hides_dispatch[which]
        return part

    def parts(self, constants: Constants) -> dict[str, Any]:
        """Seconds of each job's step by part, as arrays; the parts sum to the step."""
        a, c = self.amounts, constants
        products = np.array([c[f"products {family}"] for family in FAMILIES])[self.family]
        attention = np.array([c[f"attention {family}"] for family in FAMILIES])[self.family]
        low = products * np.array([c[f"low {each}"] for each in LOW])[self.low]
        far = c["far"]
        exposed = np.where(self.overlaps, c["exposed"], 1.0)
        launched = np.where(self.is_low, c["low launches"], 1.0)
        one = {
            "products": a["products"] / products + a["low_products"] / low,
            "experts": (a["grouped"] / products + a["low_grouped"] / low) / c["grouped"],
            "attention": a["attention"] / attention,
            "memory": (a["memory"] + a["expert_memory"] + a["casts"] + a["eager_memory"] * c["eager"]) / c["memory"],
            "launches": a["layers"] * c["layer"]
            + launched * (a["moe_layers"] * c["moe layer"] + a["experts"] * c["expert"]),
            "tp, cp": exposed * (a["tp"] + a["cp"]) / c["near"],
            "pp": exposed * a["pp"] / far,
        }
        busy = sum(one.values())
        copies = a["host"] / c["near"]  # overlap with a forward pass, a third of the work, and with the backward pass
        one["host"] = np.maximum(0.0, copies - busy / 3) + np.maximum(0.0, copies - 2 * busy / 3)
        busy = busy + one["host"]
        dispatch = smooth_max(a["ep_near"] / c["dispatch"], a["ep_far"] / c["dispatch far"])  # both links at once
        one["ep"] = np.where(self.hides_dispatch, smooth_max(busy, dispatch) - busy + c["shards"] * dispatch, dispatch)
        busy = busy + one["ep"]
        shards = a["shards"] / far + a["shard_hops"] * c["hop"]
        waits = smooth_max(busy, shards) - busy + c["shards"] * shards
        one["shards: waiting"] = waits
        work_passes = a["passes"]
        found = {name: work_passes * seconds for name, seconds in one.items()}
        sums = a["replicas"] / far + a["replica_hops"] * c["hop"]
        hidden = np.where(self.overlaps, c["hidden"], 0.0) * (busy + waits)
        found["sums over replicas"] = smooth_max(sums, hidden) - hidden
        found["optimizer"] = a["update"] / c["memory"]
        whole = sum(found.values())
        found["spread"] = whole * c["spread"] * a["nodes"]
        return found

    def seconds(self, constants: Constants) -> Any:
        """Seconds of each job's step."""
        return sum(self.parts(constants).values())


def smooth_max(one: Any, other: Any) -> Any:
    """The larger of two overlapping times; where they are similar, somewhat more, as neither hides the other fully."""
    return (one**4 + other**4) ** 0.25
