"""Tables without frames on standard output, and losses and sizes as readable text."""

from rich.console import Console
from rich.table import Table

from launcher.console import open_console

WIDE = 1000  # columns
MOST_IN_FULL = 1e6  # a loss above it has diverged, and may have any number of digits


def wide_console() -> Console:
    """Standard output; where it is no terminal, wide enough that nothing is folded or cut."""
    console = open_console()
    if not console.is_terminal:
        console.width = WIDE
    return console


def plain_table(*titles: str) -> Table:
    """A table without frames; a title that begins with ``>`` stands over a column aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        justify = "right" if title.startswith(">") else "left"
        table.add_column(title.removeprefix(">"), justify=justify, overflow="fold")
    return table


def loss_text(value: float, places: int = 4) -> str:
    """A loss with ``places`` decimals, 2.7081; a diverged one, from MOST_IN_FULL on, with an exponent, 1.234e+30."""
    return f"{value:.4g}" if abs(value) >= MOST_IN_FULL else f"{value:.{places}f}"


def size_text(n_bytes: float) -> str:
    """A number of bytes in the largest fitting unit: 1.5 GiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes:.0f} bytes"
