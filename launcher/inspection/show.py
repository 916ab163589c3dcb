"""Prints a short summary of an inspection on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.console import in_a_line, say
from launcher.inspection.words import (
    EXPERT_TITLES,
    LAYER_TITLES,
    LENS_TITLES,
    check_lines,
    counted,
    expert_rows,
    experts_of,
    headline,
    layer_rows,
    lens_rows,
    next_of,
)
from launcher.tables import plain_table, wide_console

MOST_ROWS = 24  # rows of a table; the page and --json have all


def print_report(report: Mapping[str, Any]) -> None:
    """Prints the checks, then the experts, then each text."""
    say(in_a_line(headline(report)))
    for _, line in check_lines(report):
        say(in_a_line(line))
    if "experts" in report:
        print_table(f"experts, by {experts_of(report)}", EXPERT_TITLES, expert_rows(report["experts"]), left=(1, 3))
    for text in report["texts"]:
        name = f"{text['name']}: {counted(len(text['tokens']), 'token')}"
        if "attention" in text:
            print_table(f"{name}; where heads look", LAYER_TITLES, layer_rows(text))
        if "lens" in text:
            print_table(f"{name}; each layer's prediction of the next token", LENS_TITLES, lens_rows(text))
            goes_on = ", ".join(f"{token!r} {100 * float(part):.1f}%" for token, part in next_of(text))
            say(in_a_line(f"likeliest tokens after the text: {goes_on}"))


def print_table(
    title: str, titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (), most: int = MOST_ROWS
) -> None:
    """Prints a table with a title. ``left`` are the columns aligned left, which hold words rather than numbers."""
    more = f" ({most} of {len(rows)}; --out and --json have all)" if len(rows) > most else ""
    say("\n" + in_a_line(title) + more)
    table = plain_table(*(each if place in left else f">{each}" for place, each in enumerate(titles)))
    for row in rows[:most]:
        table.add_row(*map(in_a_line, row))
    wide_console().print(table)
