"""Counts the bytes that this process sends in collectives, by axis and purpose.

The methods of torch's process groups are wrapped, below torch.distributed's functions, so that the collectives of
DeepSpeed and of the pipeline count too. gloo's own count of a group's operations shows whether any was missed.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from launcher.traffic.step import Collective, around_ring
from parallel.mesh import Mesh

Key = tuple[str, str, Collective]  # axis, what, collective

# The issuer of a collective (the innermost function of Roundtable, DeepSpeed's runtime or torch's pipelines) -> what it
# sends, and over which axes it may do so. A name that stands for a whole file ends with "*".
ISSUERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "parallel/collectives.py:_all_gather": ("positions", ("tp",)),
    "parallel/collectives.py:_begin_reduce_scatter": ("positions", ("tp",)),
    "parallel/collectives.py:sum_together": ("gradients of what tp does not cut", ("tp",)),
    "parallel/collectives.py:gather_parts": ("matrices that the update needs whole", ("tp",)),
    "parallel/collectives.py:exchange_elements": ("matrices that the update needs whole", ("replicas", "edp")),
    "parallel/collectives.py:_SumForward.forward": ("balance sums", ("tp", "cp")),
    "parallel/collectives.py:_SumBothWays.forward": ("means of cut norms", ("tp",)),
    "parallel/collectives.py:_SumBothWays.backward": ("means of cut norms", ("tp",)),
    "parallel/collectives.py:RowExchange.start": ("tokens", ("ep",)),
    "parallel/tensor.py:losses_and_gradient": ("loss over the vocabulary", ("tp",)),
    "parallel/expert.py:exchange_counts": ("counts", ("ep",)),
    "parallel/context_parallel/ulysses.py:_all_to_all": ("heads", ("cp",)),
    "parallel/context_parallel/ring.py:pass_on": ("keys and values", ("cp",)),
    "torch/distributed/pipelining/*": ("hidden states", ("pp",)),
    "parallel/pipeline/tied.py:add_other_copy": ("tied embedding", ("pp",)),
    "deepspeed/runtime/engine.py:DeepSpeedEngine.allreduce_bucket": ("gradients", ("replicas", "edp")),
    "deepspeed/runtime/zero/stage_1_and_2.py:DeepSpeedZeroOptimizer.allreduce_bucket": (
        "gradients",
        ("replicas", "edp"),
    ),
    "parallel/zero/buckets.py:Flight.__init__": ("gradients", ("replicas", "edp")),
    "deepspeed/runtime/comm/coalesced_collectives.py:*": ("gradients", ("replicas", "edp")),
    "deepspeed/runtime/utils.py:all_gather_into_tensor_dp_groups": ("weights", ("replicas", "edp")),
    "deepspeed/runtime/zero/partition_parameters.py:*": ("weights", ("replicas", "edp")),
    "deepspeed/runtime/zero/stage_1_and_2.py:DeepSpeedZeroOptimizer.has_overflow": ("overflow", ("replicas",)),
    "deepspeed/runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3.has_overflow": ("overflow", ("replicas",)),
    "deepspeed/runtime/zero/stage_1_and_2.py:DeepSpeedZeroOptimizer._model_parallel_all_reduce": (
        "overflow",
        ("model",),
    ),
    "deepspeed/runtime/zero/stage3.py:DeepSpeedZeroOptimizer_Stage3._model_parallel_all_reduce": (
        "overflow",
        ("model",),
    ),
    "parallel/mesh.py:sum_over_ranks": ("metrics", ("world",)),
    "parallel/mesh.py:max_over_ranks": ("metrics", ("world",)),
    "parallel/zero/norm.py:global_norm": ("gradient norm", ("world",)),
}
ROOT = str(Path(__file__).parents[2]) + "/"
SPEAKERS = ("parallel/", "launcher/", "modeling/", "tests/", "deepspeed/runtime/", "torch/distributed/pipelining/")
KINDS: dict[str, Collective] = {
    "allreduce": "all-reduce",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
}
OTHERS = (
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)
FREE = ("recv",)  # bytes are counted on the sending rank


@dataclass
class Counted:
    """The bytes that one process sent between ``start`` and ``stop``, and what could not be explained."""

    sent: dict[Key, Fraction] = field(default_factory=dict)  # what sends nothing is left out
    strangers: list[str] = field(default_factory=list)  # collectives that no line of ISSUERS explains
    missed: int = 0  # operations that gloo counted and this counter did not see


class TrafficCounter:
    """Counts collectives between ``start`` and ``stop``. Create one per process, since it wraps torch's classes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.is_on = False
        self.seen: list[tuple[str, str, tuple[int, ...], Fraction]] = []  # issuer, method, ranks, bytes
        self.before = 0
        for method in (*KINDS, *OTHERS):
            if hasattr(dist.ProcessGroup, method):
                setattr(dist.ProcessGroup, method, self.counted(method, getattr(dist.ProcessGroup, method)))

    def counted(self, method: str, original: Any) -> Any:
        """The process groups' ``method``, wrapped to record each call while counting is on."""

        def run(group: Any, *arguments: Any, **named: Any) -> Any:
            if self.is_on:
                ranks = tuple(distributed_c10d.get_process_group_ranks(group))
                self.seen.append((issuer(), method, ranks, sent_bytes(method, group, arguments)))
            return original(group, *arguments, **named)

        return run

    def start(self) -> None:
        """Begins to count."""
        self.seen.clear()
        self.before, self.is_on = operations(), True

    def stop(self) -> Counted:
        """What was sent since ``start``, by axis, purpose and collective."""
        self.is_on = False
        counted = Counted(missed=operations() - self.before - len(self.seen))
        sums: Counter[Key] = Counter()
        for name, method, ranks, n_bytes in self.seen:
            what, axes = explained(name)
            axis = next((axis for axis in axes if self.is_within(ranks, axis, method)), None)
            if axis is None or (method not in KINDS and method not in FREE):
                counted.strangers.append(f"{method} by {name} over ranks {ranks}")
            elif n_bytes:
                sums[axis, what, KINDS[method]] += n_bytes  # type: ignore[assignment]
        counted.sent = {key: Fraction(total) for key, total in sums.items()}
        return counted

    def is_within(self, ranks: tuple[int, ...], axis: str, method: str) -> bool:
        """Whether it is of all ranks along the axis, or a transfer between two of them."""
        return self.ranks_of(axis) == ranks or (method in ("send", "recv") and {*ranks} < {*self.ranks_of(axis)})

    def ranks_of(self, axis: str) -> tuple[int, ...]:
        """The ranks along one of this rank's axes."""
        return tuple(range(self.mesh.world_size)) if axis == "world" else getattr(self.mesh, axis).ranks


def issuer() -> str:
    """The innermost function on the stack in one of SPEAKERS' folders: "parallel/mesh.py:sum_over_ranks"."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        short = file.rpartition("site-packages/")[2] if "site-packages/" in file else file.removeprefix(ROOT)
        if short.startswith(SPEAKERS) and "/traffic_counter.py" not in short:
            return f"{short}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "nobody"


def explained(name: str) -> tuple[str, tuple[str, ...]]:
    """What an issuer sends, and over which axes; ("", ()) where it is not in ISSUERS."""
    for pattern, meaning in ISSUERS.items():
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return meaning
    return "", ()


def sent_bytes(method: str, group: Any, arguments: tuple[Any, ...]) -> Fraction:
    """The bytes that the collective sends to other ranks, as launcher.traffic counts them; 0 for other methods."""
    match KINDS.get(method):
        case "all-reduce":
            return around_ring("all-reduce", sum(tensor.nbytes for tensor in arguments[0]), group.size())
        case "all-gather":  # (output, input)
            return around_ring("all-gather", arguments[0].nbytes, group.size())
        case "reduce-scatter":
            return around_ring("reduce-scatter", arguments[1].nbytes, group.size())
        case "all-to-all":  # (output, input, output's rows by rank, input's rows by rank); no rows: equal parts
            given: Tensor = arguments[1]
            rows = arguments[3]
            if not rows:
                return around_ring("all-to-all", given.nbytes, group.size())
            row_bytes = given[0].nbytes if len(given) else 0
            return Fraction((sum(rows) - rows[group.rank()]) * row_bytes)
        case "send":
            return Fraction(sum(tensor.nbytes for tensor in arguments[0]))
        case _:
            return Fraction(0)


def operations() -> int:
    """The number of operations that gloo has started in all groups of this process, by its own count."""
    groups: list[Any] = [group for group in distributed_c10d._world.pg_map if dist.get_rank(group) >= 0]
    return sum(group._get_sequence_number_for_group() for group in groups)
