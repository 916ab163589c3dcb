"""The outcome of a preflight as a table and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from launcher.preflight.judge import Judgement, Verdict
from parallel.preflight.findings import Findings, Link

TITLES = (
    ("node", ""),
    ("matrix products", "TFLOP/s"),
    ("memory", "GiB"),
    ("memory", "GB/s"),
    ("all-reduce", "within GB/s"),
    ("all-reduce", "across GB/s"),
    ("all-to-all", "within GB/s"),
    ("all-to-all", "across GB/s"),
    ("disk", "write GB/s"),
    ("disk", "read GB/s"),
    ("", ""),
)
NONE = "-"


def as_json(found: Findings, judgement: Judgement, seconds: float) -> dict[str, Any]:
    """The verdicts and all measurements as JSON, as kept in RUN_DIR/preflight."""
    return {
        "bad_nodes": judgement.bad_nodes,
        "verdicts": [asdict(verdict) for verdict in judgement.verdicts],
        "notes": list(judgement.notes),
        "seconds": round(seconds, 1),
        "findings": asdict(found),
    }


def lines(found: Findings, judgement: Judgement, seconds: float) -> Iterator[str]:
    """The report's lines: a row for each node with its slowest rank and best links, then reasons, notes, a summary."""
    rows = [[title for title, _ in TITLES], [unit for _, unit in TITLES]]
    rows += [_row(found, verdict) for verdict in judgement.verdicts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *figures, state = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([first.strip().ljust(widths[0]), *figures, state.strip()]).rstrip()
    if found.whole is not None and found.whole.failure is None:
        all_reduce, all_to_all = _figures([found.whole])
        yield f"all nodes together: all-reduce {all_reduce} GB/s, all-to-all {all_to_all} GB/s"
    for verdict in judgement.verdicts:
        for reason in verdict.reasons:
            yield f"{verdict.node} is {verdict.state}: {reason}"
    yield from (f"note: {note}" for note in judgement.notes)
    bad = judgement.bad_nodes
    summary = f"leave out {', '.join(bad)}" if bad else "no node is slow or broken"
    yield f"preflight of {len(found.nodes)} node{'s' if len(found.nodes) > 1 else ''}, {seconds:.0f} s: {summary}"


def _row(found: Findings, verdict: Verdict) -> list[str]:
    node = verdict.node
    devices = [device for device in found.devices if device.node == node]
    products = memory = speed = NONE
    if devices:
        slowest = min(devices, key=lambda device: device.matmul_tflops)
        products = f"{slowest.matmul_tflops:.3g} (worst {slowest.matmul_worst_tflops:.3g})"
        memory = f"{min(device.memory_gib for device in devices):.3g}"
        speed = f"{min(device.memory_gb_per_second for device in devices):.3g}"
    within = _figures([link for link in found.within if link.nodes == (node,)])
    across = _figures([link for link in found.pairs if node in link.nodes])
    disk = next((disk for disk in found.disks if disk.node == node), None)
    write = f"{disk.gb / disk.write_seconds:.3g}" if disk else NONE
    read = f"{disk.gb / disk.read_seconds:.3g}" if disk else NONE
    return [
        node, products, memory, speed, within[0], across[0], within[1], across[1], write, read, verdict.state
    ]  # fmt: skip


def _figures(links: list[Link]) -> tuple[str, str]:
    """The best all-reduce and all-to-all among the links that worked."""
    reduces = [each.all_reduce_gb_per_second for each in links if each.all_reduce_gb_per_second is not None]
    exchanges = [each.all_to_all_gb_per_second for each in links if each.all_to_all_gb_per_second is not None]
    return tuple(f"{max(values):.3g}" if values else NONE for values in (reduces, exchanges))  # type: ignore[return-value]
