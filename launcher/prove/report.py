"""How a proof's outcome is shown: a table, what it points at, and JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.closed_form.budget import modes_of, told
from launcher.config.tree import RunConfig
from launcher.prove.checks import Check
from parallel.mesh import Degrees

TABLE_WIDTH = 160  # where the output is no terminal


@dataclass(frozen=True)
class Outcome:
    """Everything that is shown of a proof. ``died`` is the text of the ranks' failure where they did not finish."""

    config: RunConfig  # the shrunk one
    n_ranks: int
    steps: int
    checks: Sequence[Check]
    ties: int
    diagnosis: Sequence[str]
    seconds: float
    folder: Path | None  # the proof's files, where they are kept
    died: str | None = None

    @property
    def proven(self) -> bool:
        """Whether every check passed."""
        return self.died is None and bool(self.checks) and all(check.passed for check in self.checks)


def layout_words(config: RunConfig, n_ranks: int) -> str:
    """The layout in one line: "4 processes: pp=2 (zbv), cp=2 (ring), ZeRO 1, bf16, recompute none"."""
    degrees = Degrees.of(config.parallel, n_ranks)
    kinds = {"pp": f" ({config.parallel.pipeline.name})", "cp": f" ({config.parallel.cp_attention})"}
    kinds |= {"ep": f" ({config.parallel.ep_chunks} chunks)"} if config.parallel.ep_chunks > 1 else {}
    kinds["tp"] = " (overlapped)" * config.parallel.tp_overlap
    axes = {name: getattr(degrees, name) for name in ("pp", "dp", "cp", "tp", "ep")}
    shown = [f"{name}={degree}{kinds.get(name, '')}" for name, degree in axes.items() if degree > 1] or ["no axis"]
    precision, recompute = config.train.precision, config.train.recompute
    if config.train.activation_gib is not None:
        recompute = told(modes_of(config, n_ranks))
    offloaded = ", activations on the host" * config.train.offload_activations
    stage = f"ZeRO {config.parallel.zero}{' with its optimizer on the host' * config.parallel.offload_optimizer}"
    state = f"{stage}, {precision}, recompute {recompute}{offloaded}"
    return f"{n_ranks} processes: {', '.join(shown)}, {state}"


def print_outcome(outcome: Outcome, console: Console) -> None:
    """The table, the diagnosis and the verdict, to ``console``."""
    console.print(layout_words(outcome.config, outcome.n_ranks), highlight=False)
    if outcome.checks:
        console.print(table_of(outcome))
    for line in outcome.diagnosis:
        console.print(Text(f"  {line}"), soft_wrap=True)
    if outcome.died is not None:
        console.print(Text(outcome.died), soft_wrap=True)
    console.print(verdict(outcome), soft_wrap=True)


def table_of(outcome: Outcome) -> Table:
    """A table with a row for each check."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    for title in ("phase", "check", "worst"):
        table.add_column(title, overflow="fold")
    for title in ("error", "bound"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("note", overflow="fold")
    for check in outcome.checks:
        word = Text("ok", style="green") if check.passed else Text("FAILED", style="bold red")
        cells = (check.phase, check.name, check.worst, number(check.error), number(check.bound))
        table.add_row(*map(Text, cells), word, Text(check.note))
    return table


def number(value: float) -> str:
    """An error or a bound as short text."""
    if value == 0 or (value == int(value) and 1 <= value < 1000 if math.isfinite(value) else False):
        return f"{int(value)}"
    return f"{value:.1e}" if value < 0.1 else f"{value:.3g}"


def verdict(outcome: Outcome) -> Text:
    """The last line of the report: proven, or how many checks fail."""
    failed = sum(not check.passed for check in outcome.checks)
    where = f"; kept in {outcome.folder}" if outcome.folder is not None else ""
    ties = f"{outcome.ties} router ties decided as on one process; " if outcome.config.model.moe is not None else ""
    if outcome.proven:
        text = f"proven: {len(outcome.checks)} checks over {outcome.steps} steps; {ties}{outcome.seconds:.0f} s{where}"
        return Text(text, style="bold green")
    if outcome.died is not None:
        return Text(
            f"not proven: the processes failed or hung before the end; {outcome.seconds:.0f} s{where}", style="bold red"
        )
    text = f"not proven: {failed} of {len(outcome.checks)} checks failed; {ties}{outcome.seconds:.0f} s{where}"
    return Text(text, style="bold red")


def to_json(outcome: Outcome) -> str:
    """The outcome as a JSON object, for scripts. An error that is not finite is null."""
    degrees = Degrees.of(outcome.config.parallel, outcome.n_ranks)
    body: dict[str, Any] = {
        "proven": outcome.proven,
        "ranks": outcome.n_ranks,
        "steps": outcome.steps,
        "layout": {name: getattr(degrees, name) for name in ("pp", "dp", "cp", "tp", "ep")},
        "zero": outcome.config.parallel.zero,
        "precision": outcome.config.train.precision,
        "ties": outcome.ties,
        "checks": [
            {
                "phase": check.phase,
                "check": check.name,
                "worst": check.worst,
                "error": check.error if math.isfinite(check.error) else None,
                "bound": check.bound,
                "passed": check.passed,
                "note": check.note,
            }
            for check in outcome.checks
        ],
        "diagnosis": list(outcome.diagnosis),
        "died": outcome.died,
        "seconds": outcome.seconds,
        "folder": None if outcome.folder is None else str(outcome.folder),
    }
    return json.dumps(body, indent=2)
