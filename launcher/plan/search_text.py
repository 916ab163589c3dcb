"""A search's layouts printed as text, from the JSON of ``launcher.plan.search.searched_json`` alone."""

import shlex
from pathlib import Path
from typing import Any

from launcher.console import say
from launcher.plan.costs import costs_line
from launcher.tables import plain_table, wide_console


def print_search(found: dict[str, Any], out: Path | None, gpu: str) -> None:
    """Prints the table, why the first layout is first, and what to do next. ``gpu`` is the option as it was given."""
    layouts = found["layouts"]
    n_traced = sum(row["trace"] is not None for row in layouts)
    by = (
        f"closed forms, and by traces of {n_traced} of the best, which decide their order"
        if n_traced
        else "closed forms"
    )
    say(
        f"PLAN by {by}, no measurement: {found['gpus']:,} {found['gpu']}; {found['planned']:,} legal layouts, "
        f"{found['did_not_fit']:,} of which do not fit"
    )
    table = plain_table(
        "layout", ">seconds a step", ">low", ">high", ">tokens/s/GPU", ">GiB", ">chance to fit", ">traced s", ">GiB"
    )
    for plan in layouts:
        times = (f"{plan[key]:,.3f}" for key in ("step_seconds", "step_seconds_low", "step_seconds_high"))
        words = " ".join(each.removeprefix("parallel.").removeprefix("train.") for each in plan["overrides"])
        figures = f"{plan['tokens_per_second_per_gpu']:,.0f}", f"{plan['peak_gb']:.1f}", f"{plan['chance_to_fit']:.0%}"
        table.add_row(words, *times, *figures, *traced_words(plan["trace"]))
    wide_console().print(table)
    for number, plan in enumerate(layouts, 1):
        if plan["not_traced"] and plan["not_traced"] not in ("--traces=0", "not among the first"):
            say(f"layout {number} is planned by closed forms only, without a trace: {plan['not_traced']}")
    first = layouts[0]
    by = "by its trace" if first["trace"] is not None else "by closed forms"
    say(f"\nthe first, {by}: {costs_line(first | (first['trace'] or {}), found['tokens'])}")
    if found["corrected_by"]:
        say(f"corrected by {'; '.join(found['corrected_by'])}")
    if found["why"] is not None:
        say(f"\n{found['why']}")
    if out is not None:
        told = shlex.quote(str(out))
        say(f"written to {out}; `roundtable plan {told} --gpu {shlex.quote(gpu)} --gpus {found['gpus']}` traces it")
    else:
        say(f"the first: {' '.join(first['overrides'])}")


def traced_words(trace: dict[str, Any] | None) -> tuple[str, str]:
    """The seconds and GiB of a trace as text; empty without a trace."""
    if trace is None:
        return "", ""
    return f"{trace['step_seconds']:,.3f}", f"{trace['peak_gb']:.1f}{'' if trace['fits'] else ', too much'}"
