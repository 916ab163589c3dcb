"""Tables without frames on standard output, and sizes as people read them."""

from rich.console import Console
from rich.table import Table

from launcher.console import open_console

WIDE = 1000  # columns
MOST_IN_FULL = 1e6  # a loss above it has diverged, and is of any length


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
    """A loss as people read it: 2.7081; of a diverged one its magnitude, 1.234e+30."""
    return f"{value:.4g}" if abs(value) >= MOST_IN_FULL else f"{value:.{places}f}"


def size_text(n_bytes: float) -> str:
    """Bytes as people read them: 1.5 GiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes:.0f} bytes"
