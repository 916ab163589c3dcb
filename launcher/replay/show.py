"""Prints a replay's report on the terminal: tables, and the documents' tokens coloured by their losses."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from launcher.console import escaped, in_a_line, say
from launcher.replay.report import DocumentSeen
from launcher.tables import plain_table, wide_console

MOST_ROWS = 20  # rows shown of a table on the terminal; --json has all
# Backgrounds for losses from so many nats on: from pale yellow to dark red, black letters on all but the last.
SHADES = ((0.5, "#fff7bc"), (1.5, "#fee391"), (3.0, "#fec44f"), (5.0, "#fe9929"), (8.0, "#ec7014"), (12.0, "#cc4c02"))


def shade_of(loss: float) -> str | None:
    """The background colour for a token of this loss; None for a low one. NaN gets the colour of the highest losses."""
    if math.isnan(loss):
        return SHADES[-1][1]
    return next((shade for least, shade in reversed(SHADES) if loss >= least), None)


def print_report(report: Mapping[str, Any]) -> None:
    """Prints the report: the verdict, then tables of documents, expensive tokens, layers, tensors and routers."""
    layout = ", ".join(f"{key} {value}" for key, value in report["layout"].items())
    begin = f"checkpoint step {report['from']}" if report["from"] else "the initial weights"
    say(in_a_line(f"{report['run']}, step {report['step']}, executed from {begin} on ({layout})"))
    print_verdict(report)
    if report["event"] is not None:
        say(in_a_line(f"the step's event: {report['event']['event']}, action {report['event']['action']}"))
    highest_first = sorted(report["documents"], key=lambda row: -as_number(row["loss"]))
    keys = ("source", "file", "document", "tokens", "loss")
    print_table("documents, the highest loss first", keys, highest_first)
    keys = ("loss", "token", "before", *(("text_before", "text") if has_text(report) else ()), "source", "document")
    print_table("most expensive tokens", keys, report["most_expensive_tokens"])
    print_table("layers", ("layer", "grad_norm", "update_over_weight"), report["layers"], most=None)
    largest = sorted(report["gradients"], key=lambda row: -as_number(row["grad_norm"]))
    print_table(
        "tensors, the largest gradient first", ("tensor", "grad_norm", "weight_norm", "update_over_weight"), largest
    )
    if report["routers"]:
        print_table(
            "routers: token-expert pairs by expert", ("layer", "busiest", "counts"), report["routers"], most=None
        )


def print_verdict(report: Mapping[str, Any]) -> None:
    """Prints whether the recorded steps were reproduced, else the first difference; then the notes."""
    n_steps, exact = len(report["steps"]), all(each["exact"] for each in report["steps"])
    bounds = report["steps"][-1]["bounds"]
    how = (
        "bit for bit" if exact else f"within {bounds['loss']:.1e} (loss) and {bounds['grad_norm']:.1e} (gradient norm)"
    )
    first = report["first_difference"]
    if first is None:
        say(f"reproduced: {n_steps} recorded step{'s' * (n_steps > 1)}, {how}")
    else:
        bound = "bit for bit" if not first["bound"] else f"bound {first['bound']:.1e}, relative"
        what = f"{first['key']} is {first['recorded']} in the record, {first['replayed']} in the replay"
        say(in_a_line(f"NOT reproduced: step {first['step']}: {what} ({bound})"))
    for note in report["notes"]:
        say(in_a_line(note))


def has_text(report: Mapping[str, Any]) -> bool:
    """Whether the report has tokens as text, which it has where there is a tokenizer."""
    return any("text" in row for row in report["most_expensive_tokens"])


def as_number(value: Any) -> float:
    """A sort key: infinity for a value that is not finite (a string there), minus infinity for a missing one."""
    return float("-inf") if value is None else float("inf") if isinstance(value, str) else value


def print_table(
    title: str, keys: Sequence[str], rows: Sequence[Mapping[str, Any]], most: int | None = MOST_ROWS
) -> None:
    """Prints a table with a title, at most the first ``most`` rows (None: all)."""
    table = plain_table(*(key.replace("_", " ") for key in keys))
    for row in rows[:most]:
        table.add_row(*(in_a_line(shown(row[key])) for key in keys))
    more = f" ({most} of {len(rows)}; --json has all)" if most is not None and len(rows) > most else ""
    say(f"\n{title}{more}")
    wide_console().print(table)


def shown(value: Any) -> str:
    """The text of a table's cell."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_documents(documents: Sequence[DocumentSeen], text_of: Callable[[int], str] | None) -> None:
    """Prints the step's documents, each token on a background by its loss; ids where ``text_of`` is None."""
    console = wide_console()
    for document in documents:
        say("\n" + in_a_line(f"document {document.document} of {document.file} ({document.source})"))
        for part in document.parts:
            text = Text()
            for token, loss in zip(part.tokens, [0.0, *part.losses], strict=True):
                shade = shade_of(loss)
                style = "" if shade is None else f"black on {shade}"
                text.append(f"{token} " if text_of is None else escaped(text_of(token)), style)
            console.print(text, soft_wrap=True)
