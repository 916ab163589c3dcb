"""The page docs/plan-table.md: the error of the closed forms on published rows, and plans of well-known runs."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from launcher.closed_form.anchors import anchor_rows
from launcher.closed_form.evaluate import COVERED, Case, Error, Evaluation, wrong_verdicts
from launcher.closed_form.memory import MEMORY_CONSTANTS
from launcher.closed_form.recipes import RECIPES
from launcher.closed_form.rows import ran_out
from launcher.closed_form.seconds import CONSTANTS
from launcher.closed_form.systems import SYSTEMS

DESCRIPTION = ("model", "hw", "layout", "batch")  # the parts of a row that a plan is made from
TARGETS = {"dense": (0.10, 0.25), "MoE forced": (0.15, 0.25)}  # median and 90th percentile of errors aimed at
MEMORY_TARGET = 0.05
HEAD = "| rows | of | median | 90th percentile | worst | bias | in their interval |\n|---|---|---|---|---|---|---|\n"
AXES: dict[str, Callable[[Case], bool]] = {
    "tp > 1": lambda case: case.job.tp > 1,
    "pp > 1": lambda case: case.job.pp > 1,
    "cp > 1": lambda case: case.job.cp > 1,
    "ep > 1": lambda case: case.job.ep > 1,
    "ZeRO 3": lambda case: case.job.zero == 3,
    "one node": lambda case: case.job.n_gpus <= case.gpu.node_gpus,
    "512 GPUs or more": lambda case: case.job.n_gpus >= 512,
    "recomputation": lambda case: case.job.recompute == "full",
    "8 or 4 bits": lambda case: case.job.precision in ("fp8", "mxfp8", "fp4"),
    "sequences of 8,192 or more": lambda case: case.job.seq_len >= 8192,
}


def page(found: Evaluation) -> str:
    """The page docs/plan-table.md as Markdown."""
    return "\n".join(
        [*introduction(found), *time_tables(found), *memory_tables(found), *constants(found), *lists(found)]
    )


def introduction(found: Evaluation) -> list[str]:
    """The page's introduction: which rows are compared, and how errors are computed."""
    n_rows = len(found.cases) + len(found.unplanned)
    return [
        "# The plan against published measurements",
        "",
        "`make plan-table` writes this page and `launcher/closed_form/files/constants.yaml` from "
        "`benchmarks/published/rows.jsonl`; a test recomputes both. [plan](plan.md) says what is computed.",
        "",
        f"{n_rows} rows of {len({case.publisher for case in found.cases})} publishers; {len(found.time)} have a time "
        f"and {len(found.memory)} a peak of memory that a plan can be compared with. **Every figure below is of rows "
        "whose publisher (all of its tables) was left out of the fit**. What is told of a publisher's software is read "
        "from its code, recipes and issues, and listed below; nothing of it is inferred from steps. Errors are of "
        "seconds of a step, plan over measurement less one; bias is the median with its sign. The forms themselves "
        "(which terms there are, where constants begin, and which facts were looked for) were written by people who "
        "had seen all rows: what is left out is the fit, not that.",
        "",
        "No row has natural routing and known dims, so there is no line for it; the anchors below have one figure.",
        "",
    ]


def line(name: str, errors: Sequence[Error]) -> str:
    """One row of the page's table of errors, as Markdown."""
    sizes = np.abs([each.relative for each in errors])
    bias = np.median([each.relative for each in errors])
    covered = np.mean([each.is_covered for each in errors])
    figures = (
        f"{np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {sizes.max():.1%} | {bias:+.1%} | {covered:.0%}"
    )
    return f"| {name} | {len(errors)} | {figures} |"


def table(groups: Iterable[tuple[str, Sequence[Error]]]) -> list[str]:
    """A table with a line for each group that has rows."""
    return [HEAD.rstrip(), *(line(name, errors) for name, errors in groups if errors), ""]


def time_tables(found: Evaluation) -> list[str]:
    """Errors of time by kind, source, GPU and axis."""
    time = found.time
    kinds = sorted({each.case.job.kind for each in time}, key=("dense", "MoE forced", "MoE natural").index)

    def by(name: Callable[[Case], str]) -> list[str]:
        names = sorted({name(each.case) for each in time})
        pairs = [(one, kind) for one in names for kind in kinds]
        return table(
            (f"{one}, {kind}", [e for e in time if name(e.case) == one and e.case.job.kind == kind])
            for one, kind in pairs
        )

    return [
        "## Time",
        "",
        aims(time),
        "",
        *table((f"**{kind}**", [each for each in time if each.case.job.kind == kind]) for kind in kinds),
        *repeats(time, kinds),
        "By publisher:",
        "",
        *by(lambda case: case.publisher),
        "By GPU:",
        "",
        *by(lambda case: case.gpu.hardware.name),
        "By axis:",
        "",
        *table((name, [each for each in time if holds(each.case)]) for name, holds in AXES.items()),
    ]


def aims(time: Sequence[Error]) -> str:
    """A paragraph on the errors that were aimed at, and the kinds of rows that miss them."""
    told, missed = [], []
    for kind, wanted in TARGETS.items():
        sizes = np.abs([each.relative for each in time if each.case.job.kind == kind])
        told.append(f"{wanted[0]:.0%} and {wanted[1]:.0%} for {kind}")
        if len(sizes) and (np.median(sizes) > wanted[0] or np.quantile(sizes, 0.9) > wanted[1]):
            missed.append(kind)
    verdict = f"Missed by {' and '.join(missed)}." if missed else "Both kinds of rows meet it."
    return (
        f"Aimed at: a median and a 90th percentile of {', '.join(told)}. {verdict} Nearly all MoE rows are of one "
        "publisher; the fit that predicts them has eight others, of another generation of GPUs and in 16 bits, so what "
        "Blackwell and 8 bits do to experts is where the constants begin."
    )


def repeats(time: Sequence[Error], kinds: Sequence[str]) -> list[str]:
    """A table of how far repeated measurements of the same description lie from their median.

    No plan that is made from descriptions alone, without the software's release, can err by much less.
    """
    groups: dict[str, list[Error]] = defaultdict(list)
    for each in time:
        groups[json.dumps([each.case.row[part] for part in DESCRIPTION], sort_keys=True)].append(each)
    lines = []
    for kind in kinds:
        runs = [[e.case.seconds or 0.0 for e in group] for group in groups.values() if group[0].case.job.kind == kind]
        often = [np.array(each) for each in runs if len(each) > 1]
        if often:
            sizes = np.concatenate([abs(np.median(each) / each - 1) for each in often])
            figures = f"{np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {sizes.max():.1%}"
            widest = max(each.max() / each.min() for each in often)
            lines.append(f"| {kind} | {len(often)} | {len(sizes)} | {figures} | {widest:.2f} |")
    return [
        "Descriptions (model, hardware, layout and batch) that were measured more than once, mostly by one release of "
        "the publisher's software after another: a plan that knew the median of each one's measurements would err by",
        "",
        "| rows | descriptions | of | median | 90th percentile | worst | slowest over fastest |",
        "|---|---|---|---|---|---|---|",
        *lines,
        "",
    ]


def memory_tables(found: Evaluation) -> list[str]:
    """Errors of planned memory, and the wrong verdicts on whether a run fits."""
    memory = found.memory
    judged = len(memory) + sum(ran_out(case.row) for case in found.cases)
    wrong = wrong_verdicts(memory, found.cases, found.fitted_memory)
    names = [
        f"`{case.row.get('id')}` ({'said to fit, and ran out' if fits else 'said not to fit, and ran'})"
        for case, fits in wrong
    ]
    origins = sorted({each.case.publisher for each in memory})
    return [
        "## Memory",
        "",
        f"Aimed at: a median of {MEMORY_TARGET:.0%}, and no more than 3% of verdicts wrong. "
        f"Wrong are {len(wrong)} of {judged} ({len(wrong) / judged:.1%}): {', '.join(names) or 'none'}.",
        "",
        *table([("**all**", memory), *((o, [each for each in memory if each.case.publisher == o]) for o in origins)]),
    ]


def constants(found: Evaluation) -> list[str]:
    """The fitted constants, the facts taken from documents and recipes, and the well-known runs."""
    rows = [f"| {name} | {first:g} | {found.fitted[name]:.3g} | {why} |" for name, (first, _, why) in CONSTANTS.items()]
    rows += [
        f"| {name} | {first:g} | {found.fitted_memory[name]:.3g} | {why} |"
        for name, (first, _, why) in MEMORY_CONSTANTS.items()
    ]
    return [
        "## Constants",
        "",
        f"Fitted to all {len(found.time)} rows with a time ({len(found.memory)} with memory), for `roundtable plan "
        "--rows`; every publisher weighs as the square root of its rows, and each constant is held to where it begins. "
        f"Intervals are made to hold {COVERED:.0%} of another publisher's rows: the middle of its errors is taken to "
        "be drawn like those of the others, by Student's t, and its rows to lie around it as theirs do. Where a kind "
        "has too few rows of others, theirs of all kinds count, wider by as much as the kind's errors are larger. The "
        "tables say how many they held.",
        "",
        "| constant | begins at | fitted | is |",
        "|---|---|---|---|",
        *rows,
        "",
        "Taken from documents, of systems whose rows do not say it:",
        "",
        *(f"- `{part}`: {why}." for part, _, why in SYSTEMS),
        "",
        "Read from the recipes behind tables of releases (scripts/performance/configs, pull requests and issues of the "
        "repository), where a row says no other:",
        "",
        *recipe_lines(),
        "",
        *anchor_rows(),
        "",
    ]


def recipe_lines() -> list[str]:
    """One line of Markdown for each recipe, with its releases, models, GPUs and settings."""
    lines = []
    for each in RECIPES:
        since = "" if each.first == "0" else f" from {each.first}"
        until = "" if each.before == "99" else f" before {each.before}"
        models, gpus = (", ".join(names) for names in (each.models, each.gpus))
        of = f" in {', '.join(each.precisions)}" if each.precisions else ""
        lines.append(f"- `{each.source}`{since}{until}, {models} on {gpus}{of}: {each.why}.")
    return lines


def lists(found: Evaluation) -> list[str]:
    """Lists of the rows that contradict themselves, that count FLOPs in an unusual way, and that have no plan."""
    wrong = [f"- `{case.row.get('id')}`: {'; '.join(case.problems)}" for case in found.cases if case.problems]
    odd = [f"- `{case.row.get('id')}`: {'; '.join(case.remarks)}" for case in found.cases if case.remarks]
    reasons: dict[str, list[str]] = {}
    for name, reason in found.unplanned:
        reasons.setdefault(reason, []).append(f"`{name}`")
    return [
        "## Rows that contradict themselves",
        "",
        "Left out of fits, and counted in the errors above:",
        "",
        *(wrong or ["- none"]),
        "",
        "Their TFLOP/s are counted as nowhere else; seconds or tokens/s are compared, so they stay in the fits:",
        "",
        *(odd or ["- none"]),
        "",
        "## Rows without a plan",
        "",
        *(f"- {reason}: {len(names)} rows, {', '.join(names)}" for reason, names in reasons.items()),
        "",
    ]
