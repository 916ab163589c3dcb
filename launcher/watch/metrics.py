"""Writes and reads metrics.jsonl: one JSON object a line, in the order of the steps.

Three kinds of rows, told apart by their keys: an update has ``loss``, an evaluation has ``eval_loss`` and no ``loss``,
and an event has ``event``. Every row has ``step``. Numbers are written unrounded (Python's repr, which reads back to
the same double). JSON has no NaN or infinity: they are written as the strings "NaN", "Infinity" and "-Infinity", as
W&B and protobuf's JSON do, and ``read_metrics`` gives the floats back.
"""

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from launcher.console import tell
from launcher.errors import UserError
from launcher.guard.fence import ENDS, StaleRun

Guard = Callable[[], AbstractContextManager[Any]]

LONGEST_LINE = 64 << 20  # bytes; a row of 1000 layers of 1000 experts has 20 MB
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """The writer of metrics.jsonl. Only rank 0 opens one; each row reaches the operating system in ``write``.

    Rows for which a full disk has no room wait in memory. Each later ``write`` and ``sync`` tries to write them again.
    """

    def __init__(self, path: Path, guard: Guard = nullcontext) -> None:
        """Opens ``path`` for appending and creates it where it is missing; its directory must exist.

        Each row is written within ``guard()``, a context manager that raises where a later start owns the run.
        """
        self.path = path
        self._guard = guard
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._lock = threading.Lock()  # a checkpoint's writer syncs while training goes on

    @classmethod
    def resume(cls, path: Path, step: int, guard: Guard = nullcontext) -> Self:
        """The writer of a run restored at ``step`` (0: from the start); later rows and a torn last line are removed.

        The shortened file replaces the old one by a rename, so that a kill in between leaves one of the two whole.
        Where nothing has to be removed, the file is not touched. Raises UserError where a line other than the last is
        damaged or out of order; the file is then left as it is.
        """
        with guard():
            file = cls(path, guard)
            try:
                if not _ends_by(path, step):
                    file._drop(step)
            except BaseException:
                file.close()
                raise
            return file

    def rewind(self, step: int) -> None:
        """Removes the rows of steps after ``step``, for a run that rolls back to it; event rows stay."""
        with self._lock, self._guard():
            self._drop(step, keeps_events=True)

    def _drop(self, step: int, keeps_events: bool = False) -> None:
        """Removes the rows after ``step``: by a renamed copy, or in place where a full disk has no room for a copy."""
        shortened = self.path.with_name(self.path.name + ".tmp")
        try:
            self._drain()
            self._file.close()
            try:
                _copy_rows(self.path, shortened, step, keeps_events)
                shortened.replace(self.path)
            finally:
                shortened.unlink(missing_ok=True)
                self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            end, self._waiting = _split_rows(self.path, self._waiting, step, keeps_events)
            self._file.truncate(end)
            self._drain_what_fits()

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row; after ``close`` it does nothing. A process killed in between may leave a torn last line.

        Writing after ``close`` is allowed because the watchdog's thread closes the file of a run that ends, while the
        main thread may still have rows to write.
        """
        line = encode_row(row).encode() + b"\n"
        with self._lock:
            if self._file.closed:
                return
            with self._guard():
                self._waiting += line
                self._drain_what_fits()

    def sync(self) -> None:
        """Forces all rows to disk with fsync.

        Called before a checkpoint is committed, so that a power cut cannot lose rows of steps before the checkpoint.
        Raises OSError where a full disk still has no room for all rows.
        """
        with self._lock, self._guard():
            self._drain()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file and prints how many rows a full disk had no room for; a second call does nothing."""
        with self._lock:
            try:
                if self._waiting:
                    with self._guard():
                        self._drain_what_fits()
                if self._waiting:
                    n_rows = self._waiting.count(b"\n")
                    rows = f"{n_rows} row{'s' if n_rows > 1 else ''} found no room on a full disk and"
                    tell(f"{self.path}: the last {rows} {'are' if n_rows > 1 else 'is'} lost; free some space there")
            finally:
                self._waiting = b""
                self._file.close()

    def _drain(self) -> None:
        """Writes the waiting bytes. Raises StaleRun where ``path`` no longer names the file that is open here."""
        if not _is_at(self._file, self.path):
            raise StaleRun(f"{self.path} was taken away or replaced while the run trained{ENDS}")
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def _drain_what_fits(self) -> None:
        """Writes as many waiting bytes as the disk has room for; the rest stays in memory."""
        try:
            self._drain()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _is_at(file: FileIO, path: Path) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl, with NaN and infinities as floats; a torn last line is ignored.

    Raises UserError where any other line is not a row, or an update's step is not above those before it.
    """
    return [{key: _decode(value) for key, value in row.items()} for _, row in read_rows(path)]


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with tensors and NumPy values turned into Python numbers and lists, for all that take rows.

    Tensors must lie on the CPU or be cheap to wait for: this is where a CUDA value is fetched.
    """
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in row.items()}


def encode_row(row: Mapping[str, Any]) -> str:
    """One line of valid JSON without its newline. Raises TypeError for a value that JSON cannot hold."""
    plain = plain_row(row)
    try:
        return json.dumps(plain, allow_nan=False)
    except ValueError:  # a NaN or an infinity somewhere: rare, so only then is every value visited
        return json.dumps({key: _encode(value) for key, value in plain.items()}, allow_nan=False)


def encode_json(value: Any, indent: int | None = None) -> str:
    """A command's result as valid JSON; NaN and infinities are the strings "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_encode(value), allow_nan=False, indent=indent)


def _copy_rows(source: Path, target: Path, last_step: int, keeps_events: bool = False) -> None:
    """Copies the lines of the rows up to ``last_step``, byte for byte, and forces them to disk."""
    with target.open("wb") as file:
        for line, row in read_rows(source):
            if row["step"] <= last_step or (keeps_events and "event" in row):
                file.write(line.rstrip(b"\n") + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _ends_by(path: Path, last_step: int) -> bool:
    """Whether the file holds nothing but whole lines of rows up to ``last_step``, so that nothing has to be removed."""
    end, line = 0, b"\n"
    for line, row in read_rows(path):
        if row["step"] > last_step:
            return False
        end += len(line)
    return line.endswith(b"\n") and end == path.stat().st_size


def _split_rows(path: Path, waiting: bytes, last_step: int, keeps_events: bool) -> tuple[int, bytes]:
    """The byte offset to truncate the file at, and the lines after it that must be written again.

    The offset is that of the first line that has to go, or that is not whole on disk. ``waiting`` are the bytes not
    yet written; they may begin with the rest of a line whose first part is already in the file.
    """
    size, position, end, kept = path.stat().st_size, 0, None, b""
    for line in _with_waiting(path, waiting):
        row = _parse(line)
        stays = row is not None and (row["step"] <= last_step or (keeps_events and "event" in row))
        if end is None and (not stays or position + len(line) > size):
            end = position
        if end is not None and stays:
            kept += line
        position += len(line)
    return size if end is None else end, kept


def _with_waiting(path: Path, waiting: bytes) -> Iterator[bytes]:
    """The file's lines, then the waiting ones; a line split between file and ``waiting`` comes as one whole line."""
    torn = b""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
            else:
                torn = line
    yield from (torn + waiting).splitlines(keepends=True)


def _encode(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case list() | tuple():
            return [_encode(item) for item in value]
        case dict():
            return {key: _encode(item) for key, item in value.items()}
        case _:
            return value


def _decode(value: Any) -> Any:
    match value:
        case str():
            return NON_FINITE.get(value, value)
        case list():
            return [_decode(item) for item in value]
        case dict():
            return {key: _decode(item) for key, item in value.items()}
        case _:
            return value


def read_rows(
    path: Path, shorten: Callable[[bytes], bytes] = lambda line: line
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line and its row, in bounded memory; a torn last line is left out.

    NaN and infinities stay the strings that the file has. ``shorten`` may remove from a line what the caller does not
    need before it is parsed; the line itself is yielded whole.
    Raises UserError for any other line that is no row, and for an update whose step is not above those before it.
    """
    damaged, newest = None, -1
    for number, line in enumerate(_lines(path), start=1):
        if damaged is not None:
            raise UserError([f"{path}: line {damaged} is not a row (a JSON object with a step); remove that line"])
        row = _parse(shorten(line))
        if row is None:
            damaged = number
            continue
        if "event" not in row and "eval_loss" not in row:
            if row["step"] <= newest:
                rule = f"has step {row['step']} after step {newest}, and each step comes once, in order"
                raise UserError([f"{path}: line {number} {rule}; remove the line that does not belong there"])
            newest = row["step"]
        yield line, row


def _lines(path: Path) -> Iterator[bytes]:
    """The file's lines; a line of more than LONGEST_LINE bytes is cut off there."""
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            yield line
            while len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The row of a line, or None where the line is torn or is not a row: an object with a step and numeric losses."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # ValueError includes JSONDecodeError and UnicodeDecodeError
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return None
    return row if all(_is_number(row[key]) for key in ("loss", "eval_loss") if key in row) else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or (isinstance(value, str) and value in NON_FINITE)
