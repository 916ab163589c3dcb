"""docs/plan-table.md and the constants of `plan --rows`, from published rows; run as a program, writes both."""

from pathlib import Path

from launcher.closed_form.evaluate import Evaluation, evaluate
from launcher.closed_form.forecast import FILE, fitted
from launcher.closed_form.page import page
from launcher.closed_form.rows import read_rows

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "published" / "rows.jsonl"
PAGE = ROOT / "docs" / "plan-table.md"
DIGITS = 4  # of a constant: enough for the page's figures, and few enough to be equal on every machine


def constants_text(found: Evaluation) -> str:
    """The constants as YAML."""
    lines = [
        "# Written by `make plan-table` from benchmarks/published/rows.jsonl; docs/plan-table.md says what each is."
    ]
    for name, values in (("seconds", found.fitted), ("memory", found.fitted_memory)):
        lines += [f"{name}:", *(f"  {key}: {as_float(value)}" for key, value in values.items())]
    lines.append("intervals:  # logarithms of measurement over plan between which most rows lie")
    for kind, edges in found.told.items():
        lines.append(f"  {kind}: [{', '.join(as_float(each) for each in edges)}]")
    return "\n".join(lines) + "\n"


def as_float(value: float) -> str:
    """The number as text that YAML reads as a float."""
    return f"{value:.{DIGITS - 1}e}"


def write() -> None:
    """Fits and writes the constants, then the page, whose anchors use the constants."""
    found = evaluate(read_rows(ROWS))
    FILE.write_text(constants_text(found))
    fitted.cache_clear()
    PAGE.write_text(page(found))


if __name__ == "__main__":
    write()
