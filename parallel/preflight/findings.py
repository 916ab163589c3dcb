"""What a preflight measured: plain numbers, as JSON keeps them. Rank 0 has them all.

GB are 10^9 bytes, GiB 2^30. Speeds are the best of several repeats: what else runs on a machine only makes one slower.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's GPU, or its share of a processor."""

    rank: int
    node: str
    kind: str  # cuda or cpu
    name: str
    matmul_tflops: float  # bf16
    matmul_worst_tflops: float  # the worst of the repeats
    memory_gib: float  # so much was filled with a pattern and read back
    memory_gb_per_second: float  # written and read
    host_free_gib: float  # of the node


@dataclass(frozen=True, kw_only=True)
class Link:
    """What the ranks of one node, of two, or of all nodes reached together: the slowest rank's bus bandwidth."""

    nodes: tuple[str, ...]
    all_reduce_gb_per_second: float | None = None
    all_to_all_gb_per_second: float | None = None
    failure: str | None = None  # why there is no figure


@dataclass(frozen=True, kw_only=True)
class Disk:
    """One node's write to the run directory's disk (with fsync), and its read of what another node wrote."""

    node: str
    gb: float  # the size of a node's file
    write_seconds: float
    read_seconds: float
    reads_from: str  # its own name where there is no other
    misses: tuple[str, ...]  # nodes that have written, and whose files it does not see


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything. ``nodes`` are in the order of their ranks, so that the first one leads."""

    nodes: tuple[str, ...]
    devices: tuple[Device, ...] = ()
    within: tuple[Link, ...] = ()
    pairs: tuple[Link, ...] = ()
    whole: Link | None = None  # all nodes at once; None where that is a node or a pair
    disks: tuple[Disk, ...] = ()
    silent: tuple[str, ...] = ()  # nodes of which a rank never answered
    failures: dict[str, tuple[str, ...]] = field(default_factory=dict)  # node: what went wrong on it, in words
