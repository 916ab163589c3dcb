"""From measurements to verdicts: each planted fault is found, with its node, and nothing else is."""

import dataclasses
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from launcher.preflight.judge import below, culprits, judge
from launcher.preflight.report import as_json, lines
from parallel.preflight.findings import Device, Disk, Findings, Link
from parallel.preflight.network import schedule

GPU = {"kind": "cuda", "name": "GPU", "matmul_tflops": 700.0, "matmul_worst_tflops": 650.0, "memory_gib": 70.0}


def measured(n_nodes: int = 4, gpus: int = 2, **device: Any) -> Findings:
    """What a healthy job measures; small differences, as there always are."""
    nodes = tuple(f"n{number}" for number in range(1, n_nodes + 1))
    values: dict[str, Any] = {**GPU, "memory_gb_per_second": 3000.0, "host_free_gib": 900.0, **device}
    devices = [
        Device(rank=rank, node=nodes[rank // gpus], **{**values, "matmul_tflops": 700.0 - rank})
        for rank in range(n_nodes * gpus)
    ]
    return Findings(
        nodes=nodes,
        devices=tuple(devices),
        within=tuple(link(node, speed=300.0 + number) for number, node in enumerate(nodes)),
        pairs=tuple(link(*pair, speed=40.0 + number) for number, pair in enumerate(combinations(nodes, 2))),
        whole=link(*nodes, speed=35.0) if n_nodes > 2 else None,
        disks=tuple(disk(node) for node in nodes),
    )


def link(*nodes: str, speed: float = 40.0) -> Link:
    return Link(nodes=nodes, all_reduce_gb_per_second=speed, all_to_all_gb_per_second=speed / 2)


def disk(node: str, write: float = 1.0, read: float = 1.0, misses: tuple[str, ...] = ()) -> Disk:
    return Disk(node=node, gb=1.0, write_seconds=write, read_seconds=read, reads_from="other", misses=misses)


def with_device(found: Findings, rank: int, **changes: float) -> Findings:
    devices = [dataclasses.replace(each, **(changes if each.rank == rank else {})) for each in found.devices]
    return dataclasses.replace(found, devices=tuple(devices))


def with_links(found: Findings, node: str, change: Callable[[Link], Link], *, within: bool = False) -> Findings:
    """With ``change`` made to each link that the node has a part in."""
    key = "within" if within else "pairs"
    return dataclasses.replace(
        found, **{key: tuple(change(each) if node in each.nodes else each for each in getattr(found, key))}
    )


def slowed(each: Link) -> Link:
    return link(*each.nodes, speed=4.0)


def failed(each: Link) -> Link:
    return Link(nodes=each.nodes, failure="Connection closed by peer")


def with_disk(found: Findings, *disks: Disk) -> Findings:
    new = {each.node: each for each in disks}
    return dataclasses.replace(found, disks=tuple(new.get(each.node, each) for each in found.disks))


@pytest.mark.parametrize("n_nodes", [1, 2, 3, 4, 9])
def test_healthy_nodes_pass(n_nodes):
    assert judge(measured(n_nodes)).bad_nodes == []


HEALTHY = measured()
FAULTS = {
    "slow GPU": (with_device(HEALTHY, 5, matmul_tflops=500.0), "n3", "slow", "rank 5 (GPU): matrix products 500 TFLOP"),
    "throttling GPU": (
        with_device(HEALTHY, 5, matmul_worst_tflops=300.0),
        "n3",
        "slow",
        "rank 5 (GPU): matrix products fell from 695 to 300 TFLOP/s",
    ),
    "slow memory": (with_device(HEALTHY, 0, memory_gb_per_second=2000.0), "n1", "slow", "rank 0 (GPU): memory 2e+03"),
    "memory in use": (with_device(HEALTHY, 7, memory_gib=20.0), "n4", "slow", "rank 7 (GPU): free memory 20 GiB"),
    "slow within": (
        with_links(HEALTHY, "n2", slowed, within=True),
        "n2",
        "slow",
        "all-reduce within the node 4 GB/s, the others' median 302",
    ),
    "slow cable": (
        with_links(HEALTHY, "n2", slowed),
        "n2",
        "slow",
        "all-reduce with each of 3 partners at most 4 GB/s, the others' median 45",
    ),
    "dead cable": (
        with_links(HEALTHY, "n1", failed),
        "n1",
        "broken",
        "cannot work with n2, n3, n4: Connection closed by peer",
    ),
    "ranks that do not meet": (
        with_links(HEALTHY, "n4", failed, within=True),
        "n4",
        "broken",
        "its ranks do not come together: Connection closed by peer",
    ),
    "slow write": (with_disk(HEALTHY, disk("n3", write=30.0)), "n3", "slow", "writes the shared disk at 0.0333 GB/s"),
    "slow read": (with_disk(HEALTHY, disk("n3", read=30.0)), "n3", "slow", "reads the shared disk at 0.0333 GB/s"),
    "disk of its own": (
        with_disk(
            HEALTHY,
            disk("n1", misses=("n2",)),
            disk("n2", misses=("n1", "n3", "n4")),
            disk("n3", misses=("n2",)),
            disk("n4", misses=("n2",)),
        ),
        "n2",
        "broken",
        "the run directory is not on a disk that it shares with n1, n3, n4",
    ),
    "failure": (
        dataclasses.replace(HEALTHY, failures={"n2": ("rank 2, memory: 3 words came back wrong",)}),
        "n2",
        "broken",
        "rank 2, memory: 3 words came back wrong",
    ),
    "silence of all but the lead": (
        dataclasses.replace(measured(), silent=("n2", "n3", "n4")),
        "n1",
        "broken",
        "none of the other 3 nodes reached it, though it leads",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found_and_no_other_node_is_named(name):
    found, node, state, reason = FAULTS[name]
    judgement = judge(found)
    assert judgement.bad_nodes == [node]
    verdict = next(each for each in judgement.verdicts if each.node == node)
    assert verdict.state == state
    assert verdict.reasons[0].startswith(reason)


def test_planted_two_slow_cables_of_six_are_both_found():
    found = with_links(with_links(measured(6), "n2", slowed), "n5", slowed)
    assert judge(found).bad_nodes == ["n2", "n5"]


def test_planted_dead_link_between_two_good_nodes_costs_one_of_them():
    found = measured()
    pairs = [failed(each) if each.nodes == ("n2", "n4") else each for each in found.pairs]
    assert judge(dataclasses.replace(found, pairs=tuple(pairs))).bad_nodes == ["n4"]


def test_a_partner_that_broke_down_is_not_held_against_the_others():
    found = with_links(measured(), "n3", failed)
    judgement = judge(dataclasses.replace(found, failures={"n3": ("rank 4, matrix products: no answer",)}))
    assert judgement.bad_nodes == ["n3"]


def test_what_two_nodes_cannot_tell_is_said():
    found = with_links(measured(2), "n1", slowed)
    judgement = judge(found)
    assert judgement.bad_nodes == []
    assert judgement.notes == (
        "n1 and n2 met only each other: if that is slow, which of them is to blame cannot be told",
    )
    assert judge(with_device(measured(2), 2, matmul_tflops=400.0)).bad_nodes == ["n2"], "its own speed can be told"


def test_a_brief_write_is_not_slow():
    assert judge(with_disk(HEALTHY, disk("n3", write=30.0))).bad_nodes == ["n3"]
    small = [dataclasses.replace(each, gb=0.001, write_seconds=0.01) for each in HEALTHY.disks[1:]]
    slow = dataclasses.replace(HEALTHY.disks[0], gb=0.001, write_seconds=1.0)
    assert judge(dataclasses.replace(HEALTHY, disks=(slow, *small))).bad_nodes == []


def test_processes_on_a_cpu_may_differ_more():
    cpu = measured(kind="cpu", name="CPU")
    assert judge(with_device(cpu, 5, matmul_tflops=300.0)).bad_nodes == []
    assert judge(with_device(cpu, 5, matmul_tflops=100.0)).bad_nodes == ["n3"]


def test_below_compares_each_with_the_others():
    assert below({"a": 1.0}, 0.5) == {}
    assert below({"a": 1.0, "b": 3.0}, 0.5) == {"a": 3.0}
    assert below({"a": 1.0, "b": 1.0, "c": 3.0, "d": 3.0}, 0.5) == {"a": 3.0, "b": 3.0}
    assert culprits([("a", "b"), ("b", "c")], "abc", {}) == {"b": ["a", "c"]}
    assert culprits([("a", "b"), ("b", "c")], "abc", {"b": 1}) == {}


@pytest.mark.parametrize("n_nodes", range(1, 13))
def test_each_node_meets_as_many_others_as_it_can(n_nodes):
    nodes = [f"n{number}" for number in range(n_nodes)]
    rounds = schedule(nodes)
    for pairs in rounds:
        there = [node for pair in pairs for node in pair]
        assert len(there) == len(set(there)) == n_nodes - n_nodes % 2
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    rests = n_nodes % 2
    partners = {node: sum(node in pair for pair in met) for node in nodes}
    assert all(min(3, n_nodes - 1) - rests <= count <= min(3, n_nodes - 1) for count in partners.values())


def test_the_table_has_a_row_for_each_node_and_every_reason():
    found = FAULTS["slow cable"][0]
    judgement = judge(found)
    head, units, *rows = lines(found, judgement, 12.3)
    assert [row.split()[0] for row in rows[:4]] == ["n1", "n2", "n3", "n4"]
    assert [row.split()[-1] for row in rows[:4]] == ["ok", "slow", "ok", "ok"]
    assert rows[4] == "all nodes together: all-reduce 35 GB/s, all-to-all 17.5 GB/s"
    assert rows[5].startswith("n2 is slow: all-reduce with each of 3 partners at most 4 GB/s")
    assert rows[-1] == "preflight of 4 nodes, 12 s: leave out n2"
    assert len({len(head), len(units)}) <= 2
    kept = as_json(found, judgement, 12.3)
    assert kept["bad_nodes"] == ["n2"]
    assert kept["findings"]["pairs"][0]["nodes"] == ("n1", "n2")
