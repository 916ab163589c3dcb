"""Printing plans of published rows as a table."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from launcher.console import in_a_line, say
from launcher.tables import plain_table, wide_console


def print_plans(plans: Sequence[dict[str, Any]]) -> None:
    """Prints a table with a line for each planned row, then the reason for each row without a plan."""
    table = plain_table("row", ">seconds a step", ">low", ">high", ">tokens/s/GPU", ">GiB", "chance to fit")
    refused = []
    for plan in plans:
        name = Text(in_a_line(str(plan["id"])))
        if plan["step_seconds"] is None:
            refused.append(plan)
            continue
        times = (f"{plan[key]:,.3f}" for key in ("step_seconds", "step_seconds_low", "step_seconds_high"))
        speed, held = f"{plan['tokens_per_second_per_gpu']:,.0f}", f"{plan['peak_gb']:.1f}"
        table.add_row(name, *times, speed, held, f"{plan['chance_to_fit']:.0%}")
    wide_console().print(table)
    for plan in refused:
        say(in_a_line(f"no plan for {plan['id']}: {plan['reason']}"))
