"""Reads metrics.jsonl as columns: the numbers of all updates, evaluations, events, and a sample of expert shares.

The experts' shares are cut out of most lines before parsing, because the shares of 256 experts in each of 100,000 rows
are gigabytes of digits. Shape letters: N updates, R rows of a block.
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
MOST_KEYS = 4096  # different keys of one run; 1000 layers have three each
MOST_SAMPLED = 256  # rows whose shares are parsed
SHARES = b'/load": ['  # only the list of a layer's shares begins so in a file that Roundtable wrote
LARGEST_STEP = 2**53


@dataclass
class RunRows:
    """The contents of a metrics.jsonl as the report needs them."""

    steps: np.ndarray  # int64 [N]
    columns: dict[str, np.ndarray]  # key -> float64 [N]; NaN where a row lacks it, or has something else
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    shared: list[dict[str, Any]] = field(default_factory=list)  # rows with shares: an even sample and the last one
    n_shared: int = 0  # rows that have shares
    n_keys_left_out: int = 0  # keys beyond MOST_KEYS


class EvenSample:
    """An evenly spaced sample of a stream of lines of unknown length: at most MOST_SAMPLED, and the last line."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.every = 1
        self.count = 0
        self.last = b""

    def add(self, line: bytes) -> None:
        """Keeps or skips the line; when more than MOST_SAMPLED are kept, every other one is removed."""
        if self.count % self.every == 0:
            self.lines.append(line)
            if len(self.lines) > MOST_SAMPLED:
                self.lines = self.lines[::2]
                self.every *= 2
        self.count, self.last = self.count + 1, line

    def rows(self) -> list[dict[str, Any]]:
        """The kept lines parsed, in order, with the last line of the stream."""
        lines = self.lines if self.lines and self.lines[-1] == self.last else [*self.lines, self.last]
        return [json.loads(line) for line in lines if line]


class Columns:
    """Collects rows of numbers into one array for each key.

    Successive rows with the same keys are converted together, in blocks of at most BLOCK_ROWS, for speed.
    """

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
        """The numbers of each key as float64 [N], N the number of rows; NaN where a row lacks the key."""
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
    """The columns of rows of equal length, as float64; null and everything else that is no number becomes NaN."""
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
    """The line with null in place of each layer's list of shares, found without parsing the line.

    The bytes that such a list begins with cannot be within a JSON string, where the quote would be escaped.
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
    """The contents of ``path`` as the report needs them, empty where there is no file.

    Raises UserError where the file is damaged. 100,000 rows of 12 layers of 256 experts take 4 s (one core,
    2026-11-23).
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
    """Each line and its row, with a step of at most LARGEST_STEP, which a browser's numbers hold exactly."""
    for line, row in read_rows(path, without_shares) if path.exists() else ():
        yield line, row | {"step": min(row["step"], LARGEST_STEP)}


def layers_of(rows: RunRows, name: str) -> dict[int, np.ndarray]:
    """The values [N] of the key ``name`` (load_max, entropy) by layer index; layers with no finite one are left out."""
    found = {}
    for key, values_N in rows.columns.items():
        match = re.fullmatch(rf"moe/layer_(\d{{1,6}})/{name}", key)
        if match and np.isfinite(values_N).any():
            found[int(match[1])] = values_N
    return dict(sorted(found.items()))
