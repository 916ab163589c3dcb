"""A search's layouts as people read them. Everything here is told from the JSON alone."""

from pathlib import Path
from typing import Any

from launcher.console import say
from launcher.tables import plain_table, wide_console


def print_search(found: dict[str, Any], out: Path | None) -> None:
    """The table, why the first is the first, and what to do next."""
    say(
        f"PLAN by closed forms, no measurement: {found['gpus']:,} {found['gpu']}; {found['planned']:,} legal layouts, "
        f"{found['did_not_fit']:,} of which do not fit"
    )
    table = plain_table("layout", ">seconds a step", ">from", ">to", ">tokens/s/GPU", ">GB", ">fits")
    for plan in found["layouts"]:
        times = (f"{plan[key]:,.3f}" for key in ("step_seconds", "step_seconds_low", "step_seconds_high"))
        words = " ".join(each.removeprefix("parallel.").removeprefix("train.") for each in plan["overrides"])
        figures = f"{plan['tokens_per_second_per_gpu']:,.0f}", f"{plan['peak_gb']:.1f}", f"{plan['chance_to_fit']:.0%}"
        table.add_row(words, *times, *figures)
    wide_console().print(table)
    if found["why"] is not None:
        say(f"\n{found['why']}")
    if out is not None:
        say(f"written to {out}; `roundtable plan {out}` traces it")
    else:
        say(f"the first: {' '.join(found['layouts'][0]['overrides'])}")
