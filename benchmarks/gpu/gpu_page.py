"""Writes docs/performance.md from the files of benchmarks/gpu/results: what was measured on GPUs, and nothing else.

    python benchmarks/gpu/gpu_page.py [--check]

A cell without a measurement says so. A dry run's file is refused: no figure of it counts.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "gpu" / "results"
PAGE = ROOT / "docs" / "performance.md"
NOT_MEASURED = "not measured"
PART_TITLES = {1: "correctness", 2: "whole runs", 3: "baselines", 4: "one change at a time", 5: "several GPUs"}
KERNELS = "kernels: "  # with which a check's name begins
MODELS = ("Llama 3 8B", "Qwen3-30B-A3B")

HEAD = """# Performance on GPUs

This page is written by `benchmarks/gpu/gpu_page.py` from the files in `benchmarks/gpu/results`, which `make gpu` wrote
on the hardware and the day that head each column. [docs/cuda.md](cuda.md) says how to run it. What has not been
measured says so; no figure here is an estimate.

The models have published widths and as many layers as fit on one card: of Llama 3 8B 16 (9 below 100 GiB), of
Qwen3-30B-A3B 6 (4 below 100 GiB). Tokens are random, sequences 8,192 long and of one document, one in a micro-batch
and eight in a step, bf16 with fp32 masters and AdamW under ZeRO 1. MFU is of the card's dense bf16 peak, recomputation
not counted. The models of transformers hold bf16 weights alone, with torch's scaled dot-product attention, and are
timed forward and backward.
"""


class Row(NamedTuple):
    """One row: its label, and the figure that stands in it, or several with | between them, as between their units."""

    label: str
    part: int
    check: str
    figure: str
    unit: str


class Table(NamedTuple):
    """One table."""

    title: str
    rows: Sequence[Row]


class Bad(Exception):
    """A file that must not be a source; the message is one line."""


def of_model(name: str) -> Table:
    """A model's step and its peers."""
    ours, rows = f"{name}: roundtable", []
    for label, figure, unit in (
        ("step", "step_ms", "ms"),
        ("of a profiled one, which takes longer, without any kernel", "idle_ms", "ms"),
        ("tokens", "tokens_per_second", "tokens/s"),
        ("MFU", "mfu", "%"),
        ("peak memory", "peak_gib", "GiB"),
        ("waits of the host for the GPU", "waits", "a step"),
        ("one micro-batch, forward and backward", "micro_batch_ms", "ms"),
    ):
        rows.append(Row(label, 3, ours, figure, unit))
    for mode in ("eager", "compiled"):
        check = f"{name}: transformers {mode}"
        rows.append(Row(f"the same in transformers, {mode}", 3, check, "micro_batch_ms", "ms"))
        rows.append(Row(f"its peak memory, {mode}", 3, check, "peak_gib", "GiB"))
    return Table(name, rows)


def tables() -> list[Table]:
    """All of the page."""
    from gpu_baselines import HEAD_POWERS
    from gpu_changes import CHANGES

    kinds = [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")]
    ceilings = [Row("copy within the card's memory, read and written", 3, "copy", "copy", "GB/s")]
    ceilings += [
        Row(f"product of 8,192-wide matrices, {short}", 3, "matmul", f"matmul {kind}", "TFLOP/s")
        for kind, short in kinds
    ]
    quickstart = [
        Row("seconds, preparing the text included", 2, "quickstart: train, export, generate", "seconds", "s"),
        Row("held-out loss", 2, "quickstart: train, export, generate", "eval_loss", ""),
        Row("tokens", 2, "quickstart: train, export, generate", "tokens_per_second", "tokens/s"),
    ]
    head = [
        Row(f"2^{power} logits at once: {what}", 3, "head chunks", f"2^{power} {unit}", unit)
        for power in HEAD_POWERS
        for what, unit in (("time", "ms"), ("peak memory", "GiB"))
    ]
    changes = [
        Row(f"{name}, {change.name}", 4, f"{name}: {change.name}", "step_ms|mfu|peak_gib", "ms|% MFU|GiB")
        for name in MODELS
        for change in CHANGES
    ]
    return [
        Table("Ceilings", ceilings),
        Table("The quickstart on one GPU", quickstart),
        *map(of_model, MODELS),
        Table("The head and its loss, forward and backward", head),
        Table("A step with one change", changes),
    ]


def kernels(measured: Mapping[str, Sequence[dict[str, Any]]]) -> Table:
    """All that part 3 has timed alone."""
    figures = {
        (each["check"], each["name"]): each["unit"]
        for contents in measured.values()
        for content in contents
        for each in content["figures"]
        if each["check"].startswith(KERNELS)
    }
    rows = [
        Row(f"{check.removeprefix(KERNELS)}: {name}", 3, check, name, unit) for (check, name), unit in figures.items()
    ]
    return Table("Kernels, each alone: of 8,192 tokens, in rows of one, five or sixteen documents", sorted(rows))


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The files' contents by hardware and day; raises Bad for one that must not be a source."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text())
            label = f"{content['hardware']['name']}, {content['date'][:10]}"
            is_real = content["dry"] is False and content["hardware"]["count"] > 0
            _ = content["checks"], content["figures"], content["part"]
        except (ValueError, KeyError, TypeError) as error:
            raise Bad(
                f"{path}: is not a file that make gpu wrote ({type(error).__name__}: {error}); remove it"
            ) from None
        if not is_real:
            raise Bad(f"{path}: is of a dry run, of which no figure counts; remove it")
        found.setdefault(label, []).append(content)
    return found


def page(folder: Path) -> str:
    """The page's text."""
    measured = results(folder)
    columns = list(measured) or ["one GPU"]
    parts = [HEAD, heading("Checks", columns, "part")]
    for number, title in PART_TITLES.items():
        cells = [checks_cell(measured.get(column, []), number) for column in columns]
        parts.append(line([f"{number} {title}", *cells]))
    for table in [*tables(), kernels(measured)]:
        parts.append(heading(table.title, columns, ""))
        for row in table.rows:
            parts.append(line([row.label, *(cell(measured.get(column, []), row) for column in columns)]))
    if measured:
        parts.append("\nVersions and commits:\n")
        parts += [f"- {label}: {told(contents)}" for label, contents in measured.items()]
    return "\n".join(parts) + "\n"


def heading(title: str, columns: Sequence[str], first: str) -> str:
    """A table's title and head."""
    return f"\n## {title}\n\n{line([first, *columns])}\n{line(['---'] * (len(columns) + 1))}"


def line(cells: Sequence[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def checks_cell(contents: Sequence[dict[str, Any]], part: int) -> str:
    """How the part's checks ended, each the last time."""
    last = {row["check"]: row["status"] for content in contents if content["part"] == part for row in content["checks"]}
    counts = [(status, sum(each == status for each in last.values())) for status in ("passed", "failed", "skipped")]
    return ", ".join(f"{count} {status}" for status, count in counts if count) or "not run"


def cell(contents: Sequence[dict[str, Any]], row: Row) -> str:
    """The figures that were measured last by a check that passed, or that none was."""
    told = []
    for figure, unit in zip(row.figure.split("|"), row.unit.split("|"), strict=True):
        values = [
            each["value"]
            for content in contents
            if content["part"] == row.part and (row.check, "passed") in statuses(content)
            for each in content["figures"]
            if (each["check"], each["name"]) == (row.check, figure) and each["value"] is not None
        ]
        told += [f"{values[-1]:,.4g} {unit}".strip()] if values else []
    return ", ".join(told) or NOT_MEASURED


def statuses(content: dict[str, Any]) -> set[tuple[str, str]]:
    """The checks of a file, and how each ended."""
    return {(each["check"], each["status"]) for each in content["checks"]}


def told(contents: Sequence[dict[str, Any]]) -> str:
    """The versions and the commits of the files of one column."""
    versions = {f"{name} {version}" for content in contents for name, version in content["versions"].items()}
    commits = sorted({content["commit"] for content in contents})
    return f"{', '.join(sorted(versions))}; commit {', '.join(commits)}"


def main() -> int:
    """Writes the page, or with --check says whether it is as it would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the page differs")
    arguments = parser.parse_args()
    try:
        text = page(RESULTS)
    except Bad as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    for folder in (ROOT / "tests" / "support", ROOT):
        sys.path.insert(0, str(folder))
    sys.exit(main())
