"""Judges each node of a job by what was measured: ok, slow or broken.

What the hardware should reach is not known here, so each figure is compared with the median of the others', since the
nodes of one job are meant to be alike. A link may be slow or broken because of either end, so a node is judged by the
best of its links to other nodes.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from parallel.preflight.findings import Device, Disk, Findings, Link

# A figure below this share of the others' median makes a node slow. GPUs of one model with nothing else on them are
# alike in products and memory; links depend on what else uses the switches, and a shared disk on all its users.
LEAST = {"products": 0.8, "memory": 0.8, "within": 0.7, "across": 0.5, "disk": 0.1}
# Processes share a CPU with each other and with anything else, so only a large difference is a sign of a fault.
LEAST_ON_CPU = {"products": 0.2, "memory": 0.2, "within": 0.1, "across": 0.1, "disk": 0.1}
STEADY = 0.5  # a GPU's worst repeat over its best; below this it throttles
ROOM = 0.9  # a GPU's free memory over the others' median; below this something else is on it
BRIEF_SECONDS = 2.0  # a write or read that took no longer than this is not called slow: it is too short to judge

Key = TypeVar("Key")
State = Literal["ok", "slow", "broken", "not measured"]


@dataclass(frozen=True)
class Verdict:
    """A node's state, and the reasons for it in words."""

    node: str
    state: State
    reasons: tuple[str, ...] = ()

    @property
    def is_bad(self) -> bool:
        """Whether a run should leave the node out."""
        return self.state in ("slow", "broken")


@dataclass(frozen=True)
class Judgement:
    """A verdict for each node, in order, and notes on what could not be found out."""

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def bad_nodes(self) -> list[str]:
        """The names of the nodes that a run should leave out."""
        return [verdict.node for verdict in self.verdicts if verdict.is_bad]


def judge(found: Findings) -> Judgement:
    """The verdict on each node. A link to a broken node is not held against the other node."""
    if len(found.nodes) > 2 and set(found.silent) == set(found.nodes[1:]):
        return _lead_is_cut_off(found)
    broken = {node: list(lines) for node, lines in found.failures.items()}
    _add(broken, unshared_disks(found.disks, found.nodes, gone=broken))
    _add(broken, broken_links(found, gone=broken))
    slow: dict[str, list[str]] = {}
    for reasons in (slow_devices(found.devices), slow_links(found, gone=broken), slow_disks(found.disks)):
        _add(slow, reasons)
    verdicts = [
        Verdict(node, "broken", (*broken[node], *slow.get(node, ())))
        if node in broken
        else Verdict(node, "slow", tuple(slow[node]))
        if node in slow
        else Verdict(node, "ok")
        for node in found.nodes
    ]
    return Judgement(tuple(verdicts), tuple(untold(found)))


def _lead_is_cut_off(found: Findings) -> Judgement:
    lead, *others = found.nodes
    line = f"none of the other {len(others)} nodes reached it, though it leads"
    verdicts = [Verdict(lead, "broken", (line,)), *(Verdict(node, "not measured") for node in others)]
    return Judgement(tuple(verdicts), ("the others were not measured, for want of the node that leads",))


def _add(reasons: dict[str, list[str]], more: Mapping[str, list[str]]) -> None:
    for node, lines in more.items():
        reasons.setdefault(node, []).extend(lines)


def below(values: Mapping[Key, float], least: float) -> dict[Key, float]:
    """The keys whose value is below ``least`` times the median of the other values, with that median."""
    ordered = sorted(values.values())
    found = {}
    for key, value in values.items():
        here = ordered.index(value)
        others = ordered[:here] + ordered[here + 1 :]
        if others and value < least * statistics.median(others):
            found[key] = statistics.median(others)
    return found


def slow_devices(devices: Iterable[Device]) -> dict[str, list[str]]:
    """Node -> reasons, for nodes with a device that is slower than the others, throttles, or is in use."""
    by_rank = {device.rank: device for device in devices}
    on_gpu = any(device.kind == "cuda" for device in by_rank.values())
    least = LEAST if on_gpu else LEAST_ON_CPU
    reasons: dict[str, list[str]] = {}

    def compare(figure: Callable[[Device], float], share: float, what: str, unit: str) -> None:
        for rank, median in below({rank: figure(device) for rank, device in by_rank.items()}, share).items():
            device = by_rank[rank]
            line = f"rank {rank} ({device.name}): {what} {figure(device):.3g} {unit}, the others' median {median:.3g}"
            reasons.setdefault(device.node, []).append(line)

    compare(lambda device: device.matmul_tflops, least["products"], "matrix products", "TFLOP/s")
    compare(lambda device: device.memory_gb_per_second, least["memory"], "memory", "GB/s")
    if on_gpu:
        compare(lambda device: device.memory_gib, ROOM, "free memory", "GiB")
        for device in by_rank.values():
            if device.matmul_worst_tflops < STEADY * device.matmul_tflops:
                fell = f"{device.matmul_tflops:.3g} to {device.matmul_worst_tflops:.3g} TFLOP/s"
                line = f"rank {device.rank} ({device.name}): matrix products fell from {fell} while they were measured"
                reasons.setdefault(device.node, []).append(line)
    return reasons


def slow_links(found: Findings, gone: Mapping[str, object]) -> dict[str, list[str]]:
    """Node -> reasons, for nodes whose collectives are slow within the node, or with every other node they met.

    With fewer than three nodes that met, it cannot be told which end of a link is slow, so none is called slow.
    """
    least = LEAST if any(device.kind == "cuda" for device in found.devices) else LEAST_ON_CPU
    reasons: dict[str, list[str]] = {}
    for figure, name in ((_all_reduce, "all-reduce"), (_all_to_all, "all-to-all")):
        within = {link.nodes[0]: figure(link) for link in found.within if link.failure is None}
        for node, median in below(within, least["within"]).items():
            line = f"{name} within the node {within[node]:.3g} GB/s, the others' median {median:.3g}"
            reasons.setdefault(node, []).append(line)
        across = best_across(found.pairs, gone, figure)
        if len(across) < 3:
            continue
        for node, median in below(across, least["across"]).items():
            n_partners = sum(node in link.nodes and link.failure is None for link in found.pairs)
            line = f"{name} with each of {n_partners} partners at most {across[node]:.3g} GB/s"
            reasons.setdefault(node, []).append(f"{line}, the others' median {median:.3g}")
    return reasons


def best_across(pairs: Iterable[Link], gone: Mapping[str, object], figure: Callable[[Link], float]) -> dict[str, float]:
    """Each node's best figure among its links to nodes that are not ``gone``; failed links are left out."""
    best: dict[str, float] = {}
    for link in pairs:
        if link.failure is None and not any(node in gone for node in link.nodes):
            for node in link.nodes:
                best[node] = max(best.get(node, 0.0), figure(link))
    return best


def _all_reduce(link: Link) -> float:
    assert link.all_reduce_gb_per_second is not None
    return link.all_reduce_gb_per_second


def _all_to_all(link: Link) -> float:
    assert link.all_to_all_gb_per_second is not None
    return link.all_to_all_gb_per_second


def slow_disks(disks: Iterable[Disk]) -> dict[str, list[str]]:
    """Node -> reasons, for nodes that write to or read from the shared disk far slower than the others."""
    by_node = {disk.node: disk for disk in disks}
    reasons: dict[str, list[str]] = {}
    for what, seconds in (("writes", lambda disk: disk.write_seconds), ("reads", lambda disk: disk.read_seconds)):
        speeds = {node: disk.gb / seconds(disk) for node, disk in by_node.items()}
        for node, median in below(speeds, LEAST["disk"]).items():
            if seconds(by_node[node]) > BRIEF_SECONDS:
                line = f"{what} the shared disk at {speeds[node]:.3g} GB/s, the others' median {median:.3g}"
                reasons.setdefault(node, []).append(line)
    return reasons


def unshared_disks(disks: Iterable[Disk], nodes: Iterable[str], gone: Mapping[str, object]) -> dict[str, list[str]]:
    """Node -> reasons, for nodes whose run directory is not on the others' disk, by whose file is not seen where."""
    missing = [(disk.node, other) for disk in disks for other in disk.misses]
    reasons = {}
    for node, partners in culprits(missing, nodes, gone).items():
        names = ", ".join(partners)
        reasons[node] = [f"the run directory is not on a disk that it shares with {names}: files are not seen"]
    return reasons


def broken_links(found: Findings, gone: Mapping[str, object]) -> dict[str, list[str]]:
    """Node -> reasons, for nodes whose own ranks fail together, or that fail with other nodes."""
    reasons = {
        link.nodes[0]: [f"its ranks do not come together: {link.failure}"]
        for link in found.within
        if link.failure is not None and link.nodes[0] not in gone
    }
    failed = {link.nodes: link.failure for link in found.pairs if link.failure is not None}
    for node, partners in culprits(failed, found.nodes, {**gone, **reasons}).items():
        why = next(failure for pair, failure in failed.items() if node in pair)
        reasons[node] = [f"cannot work with {', '.join(partners)}: {why}"]
    return reasons


def culprits(
    failed: Iterable[tuple[str, ...]], nodes: Iterable[str], gone: Mapping[str, object]
) -> dict[str, list[str]]:
    """The nodes to blame for failed pairs, each with the nodes it failed with; without them no pair fails.

    The node with the most failed pairs is taken first, and so on. Pairs with a node that is ``gone`` do not count. Of
    two nodes that fail equally often the later one is blamed, since the first leads, and the others have reached it.
    """
    left = [frozenset(pair) for pair in failed if not any(node in gone for node in pair)]
    order = list(nodes)
    found: dict[str, list[str]] = {}
    while left:
        worst = max(order, key=lambda node: (sum(node in pair for pair in left), order.index(node)))
        found[worst] = sorted(
            {node for pair in left if worst in pair for node in pair if node != worst}, key=order.index
        )
        left = [pair for pair in left if worst not in pair]
    return found


def untold(found: Findings) -> Iterable[str]:
    """Notes on what could not be found out, with so few nodes or because all together failed."""
    if len(found.devices) == 1:
        yield "one process alone: its figures are not compared with anything"
    met = {node for link in found.pairs for node in link.nodes}
    if len(met) == 2:
        names = " and ".join(sorted(met, key=found.nodes.index))
        yield f"{names} met only each other: if that is slow, which of them is to blame cannot be told"
    elif len(found.nodes) == 1:
        yield "one node: nothing between nodes was measured"
    if found.whole is not None and found.whole.failure is not None:
        yield f"all nodes together failed: {found.whole.failure}"
