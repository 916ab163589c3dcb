"""metrics.jsonl as columns: each number of each update, evaluations, events, and a sample of the experts' shares.

Of a line only what is drawn of every step is parsed: the shares of 256 experts in each of 100,000 rows are
gigabytes of digits. Shape letters: N updates, R rows of a block.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from launcher.watch.metrics import NON_FINITE, read_rows
from launcher.watch.moe import load_keys

BLOCK_ROWS = 1024
MOST_KEYS = 4096  # different numbers of one run; 1000 layers have three each
MOST_SAMPLED = 256  # rows whose shares are parsed
SHARES = b'/load": ['  # what only the list of a layer's shares begins with, as the writer spells it
LARGEST_STEP = 2**53


@dataclass
class RunRows:
    """What a metrics.jsonl holds."""

    steps: np.ndarray  # int64 [N]
    columns: dict[str, np.ndarray]  # key -> float64 [N]; NaN where a row lacks it, or has something else
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    shared: list[dict[str, Any]] = field(default_factory=list)  # whole rows with shares, evenly spaced, the last too
    n_shared: int = 0  # rows that have shares
    n_keys_left_out: int = 0  # beyond MOST_KEYS


class EvenSample:
    """Some of many lines, evenly spaced, at most MOST_SAMPLED and the last; how many will come is not known."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.every = 1
        self.count = 0
        self.last = b""

    def add(self, line: bytes) -> None:
        """Takes the line, or passes it by; drops every other one where there are too many."""
        if self.count % self.every == 0:
            self.lines.append(line)
            if len(self.lines) > MOST_SAMPLED:
                self.lines = self.lines[::2]
                self.every *= 2
        self.count, self.last = self.count + 1, line

    def rows(self) -> list[dict[str, Any]]:
        """The lines parsed, in order."""
        lines = self.lines if self.lines and self.lines[-1] == self.last else [*self.lines, self.last]
        return [json.loads(line) for line in lines if line]


class Columns:
    """Rows of numbers gathered by key. Rows with the same keys, which nearly all are, become an array at once."""

    def __init__(self) -> None:
        self.n_rows = 0
        self.parts: dict[str, list[tuple[int, np.ndarray]]] = {}
        self.left_out: set[str] = set()
        self._keys: tuple[str, ...] = ()
        self._block: list[list[Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds one row of metrics.jsonl."""
        keys = tuple(row)
        if keys != self._keys or len(self._block) == BLOCK_ROWS:
            self._flush()
            self._keys = keys
        self._block.append(list(row.values()))
        self.n_rows += 1

    def arrays(self) -> dict[str, np.ndarray]:
        """Each key's numbers, as long as there are rows."""
        self._flush()
        found = {}
        for key, parts in self.parts.items():
            values_N = np.full(self.n_rows, math.nan)
            for first, values_R in parts:
                values_N[first : first + len(values_R)] = values_R
            found[key] = values_N
        return found

    def _flush(self) -> None:
        first = self.n_rows - len(self._block)
        for key, values_R in zip(self._keys, _columns(self._block), strict=False):
            if key in self.parts or len(self.parts) < MOST_KEYS:
                self.parts.setdefault(key, []).append((first, values_R))
            elif len(self.left_out) < MOST_KEYS:
                self.left_out.add(key)
        self._block = []


def _columns(block: list[list[Any]]) -> list[np.ndarray]:
    """The columns of rows of equal length, as float64; null is NaN, and so is what is no number."""
    try:
        values_RK = np.array(block, dtype=np.float64)
        if values_RK.ndim == 2:
            return list(values_RK.T.copy())
    except (
        ValueError,
        TypeError,
        OverflowError,
    ):  # a text, a list or an object somewhere, or a number that is no float
        pass
    columns = zip(*block, strict=True)
    return [np.array([_number(value) for value in values], dtype=np.float64) for values in columns]


def _number(value: Any) -> float:
    if isinstance(value, str):
        return NON_FINITE.get(value, math.nan)
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.inf


def without_shares(line: bytes) -> bytes:
    """The line with null in the place of each layer's list of shares; cut by ``bytes.find``, in passing.

    A text that looks like the beginning of such a list cannot be in a JSON string: there the quote is escaped.
    """
    start = line.find(SHARES)
    if start < 0:
        return line
    pieces, done = [], 0
    while start >= 0:
        begin = start + len(SHARES) - 1
        end = line.find(b"]", begin)
        if end < 0:  # a torn line
            break
        pieces += [line[done:begin], b"null"]
        done = end + 1
        start = line.find(SHARES, done)
    return b"".join([*pieces, line[done:]])


def read_run(path: Path) -> RunRows:
    """Everything that a report shows of the file; nothing where it is not there. Raises UserError where it is damaged.

    100,000 rows of 12 layers of 256 experts take 4 s (one core, 2026-11-23).
    """
    columns, sample = Columns(), EvenSample()
    rows = RunRows(np.zeros(0, np.int64), {})
    for line, row in _lines(path):
        if "event" in row:
            rows.events.append(row)
        elif "loss" in row:
            columns.add(row)
            if SHARES in line:
                sample.add(line)
        elif "eval_loss" in row:
            rows.evaluations.append({key: _number(value) for key, value in row.items()})
    rows.columns = columns.arrays()
    rows.steps = rows.columns.pop("step", np.zeros(0)).astype(np.int64)
    rows.shared = [row for row in sample.rows() if load_keys(row)]
    rows.n_shared = sample.count
    rows.n_keys_left_out = len(columns.left_out)
    return rows


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line and its row, the step made one that a browser's numbers hold."""
    for line, row in read_rows(path, without_shares) if path.exists() else ():
        yield line, row | {"step": min(row["step"], LARGEST_STEP)}


def layers_of(rows: RunRows, name: str) -> dict[int, np.ndarray]:
    """The layers' numbers of that name (load_max, entropy), by the layer's index; layers without any are left out."""
    found = {}
    for key, values_N in rows.columns.items():
        match = re.fullmatch(rf"moe/layer_(\d{{1,6}})/{name}", key)
        if match and np.isfinite(values_N).any():
            found[int(match[1])] = values_N
    return dict(sorted(found.items()))
