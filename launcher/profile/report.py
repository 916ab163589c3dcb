"""The result of a profile or an estimate as JSON and as tables, which are made from the JSON alone."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from launcher.console import in_a_line
from launcher.tables import plain_table, size_text, wide_console
from launcher.trace.ops import Phase
from launcher.trace.parts import PARTS
from launcher.trace.recorder import Memory
from launcher.trace.roofline import Rates, Sum

PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "update")
N_TOP = 12  # operations shown
TERA, GIGA, MILLI = 1e12, 1e9, 1e-3


def rows_of(seconds: Mapping[tuple[str, str], float], sums: Mapping[tuple[str, str], Sum]) -> list[dict[str, Any]]:
    """One row for each part of the step, in the order of PARTS: its seconds by phase, its work, and what bounds it.

    ``seconds`` are by (part, phase), ``sums`` the work with its least time at the machine's rates. Shares sum to one.
    """
    whole = sum(seconds.values())
    unknown = {part for part, _ in (*seconds, *sums)} - set(PARTS)
    assert not unknown, unknown
    rows = []
    for part in PARTS:
        by_phase = {phase: seconds.get((part, phase), 0.0) for phase in PHASES}
        mine = [each for (name, _), each in sums.items() if name == part]
        if not any(by_phase.values()) and not mine:
            continue
        taken, least = sum(by_phase.values()), sum(each.seconds for each in mine)
        rows.append(
            {
                "part": part,
                "seconds": taken,
                "share": taken / whole if whole else 0.0,
                **{f"{phase}_seconds": by_phase[phase] for phase in PHASES},
                "flops": sum(each.flops for each in mine),
                "bytes": sum(each.bytes for each in mine),
                "sent_bytes": sum(each.sent_bytes for each in mine),
                "launches": sum(each.launches for each in mine),
                "least_seconds": least,
                "roofline": least / taken if taken and least else None,
                "bound": bound_of(mine),
            }
        )
    return rows


def bound_of(sums: list[Sum]) -> str | None:
    """The bound (such as memory) that accounts for most of the least time of several sums; None without any."""
    times: dict[str, float] = {}
    for each in sums:
        for bound, seconds in each.by_bound.items():
            times[bound] = times.get(bound, 0.0) + seconds
    return max(times, key=lambda bound: times[bound]) if times else None


def rates_json(rates: Rates) -> dict[str, Any]:
    """The machine's rates that the roofline uses, as JSON."""
    return {
        "name": rates.name,
        "product_flops_per_second": dict(rates.products),
        "memory_bytes_per_second": rates.bandwidth,
        "launch_seconds": rates.launch_seconds,
        "wire_bytes_per_second": dict(rates.wires),
    }


def memory_json(memory: Memory) -> dict[str, Any]:
    """The peak of memory as JSON: its bytes, its phase, and the bytes by purpose."""
    held = {holder: n_bytes for holder, n_bytes in memory.at_peak.items() if n_bytes}
    return {"peak_bytes": memory.peak_bytes, "peak_phase": memory.peak_phase, "at_peak_bytes": held}


def top_of(times: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    """The N_TOP operations that take longest, from (part, operation) -> seconds."""
    longest = sorted(times.items(), key=lambda each: -each[1])[:N_TOP]
    return [{"part": part, "operation": name, "seconds": seconds} for (part, name), seconds in longest]


def print_report(found: dict[str, Any]) -> None:
    """Prints the whole report."""
    console = wide_console()
    for line in found["says"]:
        console.print(Text(in_a_line(line)))
    console.print()
    print_parts(console, found)
    console.print()
    print_top(console, found)
    if len(found["ranks"]) > 1:
        console.print()
        print_ranks(console, found["ranks"])
    console.print()
    print_memory(console, found["memory"])


def print_parts(console: Console, found: dict[str, Any]) -> None:
    """Prints the table by part, with a line of sums; phases that the step does not have are left out."""
    rows = found["parts"]
    phases = [phase for phase in PHASES if any(row[f"{phase}_seconds"] for row in rows)]
    measured = found["kind"] == "measured"
    title = "part" if len(found["ranks"]) < 2 else "part (rank 0)"
    last = (">of roofline", "bound") if measured else ("bound",)
    whole = {key: sum(row[key] for row in rows) for key in ("seconds", "flops", "bytes", "launches", "share")}
    unit, unit_name = (TERA, "TFLOP/s") if whole["flops"] > TERA * whole["seconds"] else (GIGA, "GFLOP/s")
    table = plain_table(
        title, ">ms", ">share", *(f">{phase}" for phase in phases), ">GFLOP", ">GB", ">launches", f">{unit_name}", *last
    )
    for row in rows:
        rate = row["flops"] / row["seconds"] / unit if row["flops"] and row["seconds"] else None
        cells = [row["part"], number(row["seconds"] / MILLI), f"{row['share']:.1%}"]
        cells += [number(row[f"{phase}_seconds"] / MILLI) for phase in phases]
        cells += [number(row["flops"] / GIGA), number(row["bytes"] / GIGA), f"{row['launches']:,.0f}"]
        cells += ["" if rate is None else f"{rate:.3g}"]
        cells += ["" if row["roofline"] is None else f"{row['roofline']:.0%}"] if measured else []
        table.add_row(*cells, row["bound"] or "")
    sums = [sum(row[f"{phase}_seconds"] for row in rows) / MILLI for phase in phases]
    table.add_row(
        Text("sum", "bold"),
        number(whole["seconds"] / MILLI),
        f"{whole['share']:.1%}",
        *(number(each) for each in sums),
        number(whole["flops"] / GIGA),
        number(whole["bytes"] / GIGA),
        f"{whole['launches']:,.0f}",
        f"{whole['flops'] / whole['seconds'] / unit:.3g}" if whole["seconds"] else "",
    )
    console.print(table)


def number(value: float) -> str:
    """A number as text with at least three digits; empty for zero."""
    if not value:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def print_top(console: Console, found: dict[str, Any]) -> None:
    """Prints the table of the operations that take longest."""
    table = plain_table("operation", "part", ">ms", ">share")
    for row in found["top"]:
        share = row["seconds"] / found["seconds"]
        table.add_row(Text(in_a_line(row["operation"])), row["part"], number(row["seconds"] / MILLI), f"{share:.1%}")
    console.print(table)


def print_ranks(console: Console, ranks: list[dict[str, Any]]) -> None:
    """Prints each rank's time by part; with more than eight ranks, the least and the most time of each part."""
    names = list(dict.fromkeys(part for part in PARTS for rank in ranks if part in rank["parts"]))
    few = len(ranks) <= 8
    titles = [f">{rank['place']}" for rank in ranks] if few else [">least", ">most"]
    table = plain_table("ms by part", *titles)
    for name in names:
        values = [rank["parts"].get(name, 0.0) / MILLI for rank in ranks]
        table.add_row(name, *(number(each) for each in (values if few else (min(values), max(values)))))
    console.print(table)


def print_memory(console: Console, memory: dict[str, Any]) -> None:
    """Prints the peak of memory in one line."""
    held = ", ".join(f"{holder} {size_text(n_bytes)}" for holder, n_bytes in memory["at_peak_bytes"].items())
    console.print(f"memory of tensors: {size_text(memory['peak_bytes'])} at most, in {memory['peak_phase']}: {held}")
