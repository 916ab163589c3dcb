"""Shows a run's progress on stdout: a live view on a terminal, plain lines everywhere else.

Both write to stdout and take the same rows as metrics.jsonl. The live view redraws twice a second from a thread of its
own, so a long step does not freeze it. NO_COLOR and TERM=dumb are honored; plain lines never hold an escape code.
"""

import atexit
import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher.console import Unheard, is_heard, open_console, tell
from launcher.tables import loss_text
from launcher.training.batch_ramp import OF_ONE_SIZE, Batches
from launcher.watch.drawing import ASCII_BARS, BARS, duration, load_bar, load_bars, sparkline
from launcher.watch.moe import layer_of, load_keys
from launcher.watch.progress import RunProgress, event_text

REFRESHES_PER_SECOND = 2
PLAIN_SECONDS = 10.0  # at least one line in so many seconds
PLAIN_LINES = 20  # and at least so many lines in a run
SHOWN_WAIT = 0.01  # fraction of a step's time spent waiting for data; a smaller one is not shown
LEAST_BAR_WIDTH = 50  # columns: in fewer a bar would leave its own numbers no room
FRAME_LINES = 9  # the live view's lines besides the experts'


class View(ABC):
    """A display of the run that the training loop feeds. As a context manager, it restores the terminal on exit."""

    @abstractmethod
    def update(self, row: Mapping[str, Any]) -> None:
        """Shows one row of metrics.jsonl: an update, an evaluation or an event."""

    @abstractmethod
    def event(self, text: str) -> None:
        """Shows a line of text that is not a row of metrics.jsonl; after ``close`` it goes to stderr."""

    @abstractmethod
    def rewind(self, step: int) -> None:
        """Goes back to ``step``: the rows that come next are those of the steps after it."""

    @abstractmethod
    def close(self) -> None:
        """Ends the view and restores the terminal; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_view(
    total_steps: int,
    first_step: int,
    name: str,
    run_dir: Path,
    every_steps: int | None = None,
    batches: Batches = OF_ONE_SIZE,
) -> View:
    """The live view where stdout is a terminal that can be drawn on, plain lines elsewhere. Only rank 0 calls it.

    ``first_step`` is the first update of this process: 1, or the restored step + 1. ``every_steps``: only the numbers
    of multiples of it, of the first and of the last update are shown. None shows every update in the live view, and
    at least PLAIN_LINES plain lines in a run, or one in PLAIN_SECONDS.
    """
    progress = RunProgress(total_steps, first_step, name, run_dir, every_steps, batches)
    console = open_console()
    if sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return LiveView(progress, console)
    return PlainView(progress, sys.stdout)


class PlainView(View):
    """Prints plain lines: the first and last update, and between them as ``every_steps`` says.

    Without ``every_steps``, PLAIN_LINES updates evenly spaced are printed, and one wherever PLAIN_SECONDS have passed
    since the last line. Evaluations and events are always printed.
    """

    def __init__(self, progress: RunProgress, stream: TextIO) -> None:
        self._progress = progress
        self._stream: TextIO | None = stream
        self._ended = False
        self._printed_at = -PLAIN_SECONDS
        self._print(f"{progress.name}: steps {progress.first_step} to {progress.total_steps} in {progress.run_dir}")

    def update(self, row: Mapping[str, Any]) -> None:
        """Prints an update's line where one is due; evaluations and events are always printed."""
        self._progress.observe(row)
        if "loss" in row:
            if self._due(row["step"]):
                self._printed_at = time.monotonic()
                self._print(update_line(self._progress))
        elif "eval_loss" in row:
            self._print(evaluation_line(row))
        else:
            self._print(event_text(row))

    def event(self, text: str) -> None:
        """Prints the line; after ``close`` on stderr."""
        if self._ended:
            tell(text)
        self._print(text)

    def rewind(self, step: int) -> None:
        """Goes back to ``step`` without printing anything, since the rollback's event row is printed."""
        self._progress.rewind(step)

    def close(self) -> None:
        """Prints nothing more."""
        self._stream, self._ended = None, True

    def _due(self, step: int) -> bool:
        if self._progress.every_steps is not None:
            return self._progress.is_shown(step)
        first, last = self._progress.first_step, self._progress.total_steps
        round_step = step % max((last - first + 1) // PLAIN_LINES, 1) == 0
        return step in (first, last) or round_step or time.monotonic() - self._printed_at >= PLAIN_SECONDS

    def _print(self, text: str) -> None:
        if self._stream is not None and not is_heard(text, self._stream):
            self._stream = None


class LiveView(View):
    """Progress, the latest numbers, the loss as a sparkline and the experts' load, redrawn in place."""

    def __init__(self, progress: RunProgress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_SECOND, transient=False
        )
        self._live.start()
        atexit.register(self.close)  # restores the cursor even where the training loop did not close the view

    def update(self, row: Mapping[str, Any]) -> None:
        """Takes the row; the next redraw shows it."""
        self._progress.observe(row)

    def event(self, text: str) -> None:
        """Adds the line below the last events, in place of the oldest; after ``close`` it goes to stderr."""
        if self._live.is_started:
            self._progress.events.append(text)
        else:
            tell(text)

    def rewind(self, step: int) -> None:
        """Removes the steps after ``step`` from the progress bar and the sparkline."""
        self._progress.rewind(step)

    def close(self) -> None:
        """Draws the last frame, stops the redrawing thread and restores the cursor."""
        atexit.unregister(self.close)
        with contextlib.suppress(OSError, Unheard):  # the terminal itself has gone
            self._live.stop()

    def _render(self) -> RenderableType:
        bars = BARS if self._console.encoding.startswith("utf") else ASCII_BARS
        return render(self._progress, self._console.width, self._console.height, bars)


def update_line(progress: RunProgress) -> str:
    """The latest update as one plain line."""
    left = progress.seconds_left()
    parts = [
        f"step {progress.step}/{progress.total_steps}",
        *(f"{label} {value}" for label, value in _numbers(progress.update)),
    ]
    if left is not None and progress.step < progress.total_steps:
        parts.append(f"left {duration(left)}")
    return "  ".join(parts)


def render(progress: RunProgress, width: int, height: int, bars: str = BARS) -> RenderableType:
    """The live view's frame, at most ``height`` lines of ``width`` columns."""
    lines: list[RenderableType] = [_title(progress), _bar(progress, width), _number_line(progress)]
    if progress.losses.means:
        lines.append(_loss_line(progress, width, bars))
    lines += _expert_lines(progress, width, height - FRAME_LINES, bars)
    if progress.evaluation or progress.checkpoint_step is not None:
        lines.append(_landmarks(progress))
    lines += [Text(f"· {text}", style="dim", no_wrap=True, overflow="ellipsis") for text in progress.events]
    return Group(*lines)


def _numbers(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and values of an update, in the order shown; keys that the row lacks or has as null are left out."""
    formats = (
        ("loss", "loss", loss_text),
        ("lr", "lr", "{:.2e}".format),
        ("grad_norm", "grad norm", "{:#.3g}".format),
        ("tokens_per_second", "tokens/s", "{:,.0f}".format),
        ("mfu", "mfu", "{:.1%}".format),
        ("peak_gib", "peak GiB", "{:.2f}".format),
    )
    shown = [(label, form(row[key])) for key, label, form in formats if row.get(key) is not None]
    waited = row.get("loader_wait_seconds", 0.0) / row.get("step_seconds", 1.0)
    return shown + ([("waited for data", f"{waited:.0%}")] if waited >= SHOWN_WAIT else [])


def _title(progress: RunProgress) -> Text:
    return Text.assemble(
        (progress.name, "bold"), ("  " + str(progress.run_dir), "dim"), no_wrap=True, overflow="ellipsis"
    )


def _bar(progress: RunProgress, width: int) -> Table | Text:
    done = progress.step / progress.total_steps
    left = progress.seconds_left()
    if width < LEAST_BAR_WIDTH:
        words = f"{progress.step}/{progress.total_steps}  {done:.0%}" + (f"  {duration(left)}" if left else "")
        return Text(words, no_wrap=True, overflow="ellipsis")
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for ratio in (None, 1, None, None):
        grid.add_column(ratio=ratio, no_wrap=True)
    grid.add_row(
        f"step {progress.step}/{progress.total_steps}",
        ProgressBar(total=progress.total_steps, completed=progress.step),
        f"{done:4.0%}",
        Text(f"{duration(left)} left" if left is not None else "-:-- left"),
    )
    return grid


def _number_line(progress: RunProgress) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    if progress.update and progress.update["step"] != progress.step:  # only every so many steps' numbers are shown
        line.append(f"step {progress.update['step']}  ", style="dim")
    for label, value in _numbers(progress.update):
        line.append(f"{label} ", style="dim").append(value).append("  ")
    return line if line.plain else Text("waiting for the first step", style="dim")


def _loss_line(progress: RunProgress, width: int, bars: str) -> Text:
    first = progress.losses.first
    assert first is not None
    ends = f"  {loss_text(first, 3)} to {loss_text(progress.update['loss'], 3)}"
    line = sparkline(progress.losses.means, max(width - len("loss      ") - len(ends), 1), bars)
    return Text.assemble(("loss      ", "dim"), (line, "cyan"), (ends, "dim"), no_wrap=True, overflow="crop")


def _expert_lines(progress: RunProgress, width: int, room: int, bars: str) -> list[Text]:
    """One line for each MoE layer; the least balanced ones where there is no room for all.

    With many experts only some rows have their shares, so the latest known shares are shown, with their step.
    """
    row = progress.loads
    keys = load_keys(row)
    shown = sorted(sorted(keys, key=lambda key: -row[f"{key}_max"])[: max(room, 1)], key=layer_of)
    lines = [_expert_line(row, key, width, bars) for key in shown]
    notes = [f"the {len(shown)} least balanced of {len(keys)} MoE layers"] if len(shown) < len(keys) else []
    if keys and row["step"] != progress.update.get("step"):
        notes.append(f"the experts as at step {row['step']}")
    return lines + ([Text(", ".join(notes), style="dim", no_wrap=True, overflow="ellipsis")] if notes else [])


def _expert_line(row: Mapping[str, Any], key: str, width: int, bars: str) -> Text:
    label = f"layer {layer_of(key):<4}"
    ends = f"  load {row[f'{key}_min']:.2f} to {row[f'{key}_max']:.2f}"
    line = Text.assemble((label, "dim"), no_wrap=True, overflow="crop")
    loads = load_bars(row[key], max(width - len(label) - len(ends), 1))
    gap = " " if len(label) + 2 * len(loads) + len(ends) <= width else ""
    for style, cells in groupby(loads, key=_load_style):  # by the run of one color: a span for each cell costs time
        line.append("".join(load_bar(load, bars) + gap for load in cells), style=style)
    return line.append(ends, style="dim")


def _load_style(load: float) -> str:
    """Green near balance, blue for idle experts, yellow and red for crowded ones."""
    if load < 0.5:
        return "blue"
    return "green" if load <= 1.5 else "yellow" if load <= 2 else "red"


def _landmarks(progress: RunProgress) -> Text:
    """The last evaluation and the last checkpoint."""
    parts = []
    if progress.evaluation:
        parts.append(f"eval loss {loss_text(progress.evaluation['eval_loss'])} at step {progress.evaluation['step']}")
    if progress.checkpoint_step is not None:
        parts.append(f"checkpoint at step {progress.checkpoint_step}")
    return Text("    ".join(parts), no_wrap=True, overflow="ellipsis")


def evaluation_line(row: Mapping[str, Any]) -> str:
    """An evaluation as one line of text, with the loss of each held-out source where the row has them."""
    own = [f"{key.partition('/')[2]} {loss_text(value)}" for key, value in row.items() if key.startswith("eval_loss/")]
    return f"step {row['step']}: eval_loss {loss_text(row['eval_loss'])}" + (f" ({', '.join(own)})" if own else "")
