"""The results of a preflight, as plain values that can be written as JSON. Rank 0 has all of them.

GB are 10^9 bytes, GiB 2^30. Speeds are the best of several repeats, since other work on a machine only makes one
slower.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Device:
    """Measurements of one rank's GPU, or of its share of the CPU."""

    rank: int
    node: str
    kind: str  # cuda or cpu
    name: str
    matmul_tflops: float  # bf16
    matmul_worst_tflops: float  # the worst of the repeats
    memory_gib: float  # the amount that was filled with a pattern and read back
    memory_gb_per_second: float  # bytes written plus bytes read
    host_free_gib: float  # free host memory of the node


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bus bandwidths of collectives among the ranks of one node, of two, or of all nodes; the slowest rank's count."""

    nodes: tuple[str, ...]
    all_reduce_gb_per_second: float | None = None
    all_to_all_gb_per_second: float | None = None
    failure: str | None = None  # why there is no figure


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The times of one node's write to the run directory's disk (with fsync) and of its read of another node's file."""

    node: str
    gb: float  # the size of a node's file
    write_seconds: float
    read_seconds: float
    reads_from: str  # the node that wrote the file; its own name where there is no other
    misses: tuple[str, ...]  # nodes that have written files which this node does not see


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All results of a preflight. ``nodes`` are in the order of their ranks, so the first one has rank 0."""

    nodes: tuple[str, ...]
    devices: tuple[Device, ...] = ()
    within: tuple[Link, ...] = ()
    pairs: tuple[Link, ...] = ()
    whole: Link | None = None  # all nodes at once; None where that is a node or a pair
    disks: tuple[Disk, ...] = ()
    silent: tuple[str, ...] = ()  # nodes of which a rank never answered
    failures: dict[str, tuple[str, ...]] = field(default_factory=dict)  # node: what went wrong on it, in words
