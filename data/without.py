"""Documents that are left out of a run: the file that lists them, and finding them in windows of tokens.

A list has one JSON object a line. Each names one document as `roundtable data show` does, SOURCE/FILE:NUMBER, and may
state its half-open range of tokens in that file, which must then be right:

    {"document": "books/train-00000:17", "tokens": [340, 412]}

Other fields are ignored. Shape letters: B samples, L documents' parts that are left out.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.batch import NOTHING
from data.document_names import DocumentNames
from data.errors import DataError, problem, reason_of, refuse
from data.tokenfile import TokenFile

LARGEST_BYTES = 1 << 24  # the largest size of a list: some 200,000 documents
WRITE_ONE = "give a list as `roundtable blame --leave-out` writes it"
PREPARE_AGAIN = "give the list that was made for these token files"


@dataclass(frozen=True)
class Listed:
    """One line of a list of documents to leave out."""

    document: str  # SOURCE/FILE:NUMBER
    tokens: tuple[int, int] | None = None


@dataclass(frozen=True)
class LeftOut:
    """A document that is left out: its tokens are [first, stop) of a file of the dataset."""

    document: str
    file: int
    first: int
    stop: int


def read_list(path: str | Path, key: str) -> list[Listed]:
    """The documents that a file lists, in its order. ``key`` is the option or key by which the user named the file.

    Raises DataError where the file is missing or no such list.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise refuse(f"{key}={path}", "must be a file that lists documents, and is none", WRITE_ONE)
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise refuse(f"{key}={path}", f"cannot be read ({reason_of(error)})", WRITE_ONE) from error
    return parse_list(content, f"{key}={path}")


def parse_list(content: bytes, found: str) -> list[Listed]:
    """The documents that these bytes list. Raises DataError where they are no list; ``found`` names their origin."""
    if len(content) > LARGEST_BYTES:
        raise refuse(found, f"must have at most {LARGEST_BYTES:,} bytes", WRITE_ONE)
    listed = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        parsed = _parse_line(line)
        if parsed is None:
            rule = f'must hold a document on each line, {{"document": "SOURCE/FILE:NUMBER"}}, and line {number} is none'
            raise refuse(found, rule, WRITE_ONE)
        listed.append(parsed)
    if not listed:
        raise refuse(found, "must list a document, and lists none", WRITE_ONE)
    return listed


def _parse_line(line: bytes) -> Listed | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("document"), str):
        return None
    tokens = row.get("tokens")
    if tokens is None:
        return Listed(row["document"])
    if not (isinstance(tokens, list) and len(tokens) == 2 and all(type(each) is int for each in tokens)):
        return None
    return Listed(row["document"], (tokens[0], tokens[1]))


def list_text(documents: Iterable[LeftOut], more: Iterable[dict[str, Any]] | None = None) -> str:
    """The content of a file that lists these documents; ``more`` are further fields of each line."""
    rows = [{"document": each.document, "tokens": [each.first, each.stop]} for each in documents]
    further = [{} for _ in rows] if more is None else more
    return "".join(json.dumps(row | beside) + "\n" for row, beside in zip(rows, further, strict=True))


def hash_of_list(listed: Iterable[Listed]) -> str:
    """sha256 of the set of listed documents, independent of order and repetition; "" for none."""
    names = sorted({each.document for each in listed})
    return hashlib.sha256("\n".join(names).encode()).hexdigest() if names else ""


def hash_of_file(path: str | None) -> str:
    """``hash_of_list`` of the file that data.without names; "" for None. Raises DataError where it is no list."""
    return hash_of_list(read_list(path, "data.without")) if path is not None else ""


def find_listed(names: DocumentNames, listed: Iterable[Listed], key: str) -> list[LeftOut]:
    """The listed documents with their places in the token files, each once, in the order of the files.

    Raises DataError with a line for each (at most five) that does not exist, or whose tokens are not those listed.
    """
    found, problems = {}, []
    for each in listed:
        try:
            place = names.find(each.document, key)
        except DataError as error:
            problems += error.problems
            continue
        tokens = place.first, place.stop
        if each.tokens not in (None, tokens):
            rule = f"must be tokens {list(each.tokens or ())} of its file, as listed, and is {list(tokens)}"
            problems.append(problem(f"{key}={each.document}", rule, PREPARE_AGAIN))
        name = names.of_document(place.file, place.document)
        found[place.file, place.document] = LeftOut(name, place.file, *tokens)
    if problems:
        raise DataError(*problems[:5])
    return [found[place] for place in sorted(found)]


def file_problem(path: str) -> str | None:
    """The line about a data.without that is no file; None where it is one. The file is not read."""
    if os.path.isfile(path):
        return None
    return problem(f"data.without={path!r}", "must be a file that lists documents, and is none", WRITE_ONE)


class LeftOutParts:
    """Finds the parts of left-out documents in windows of tokens, by two binary searches for each window."""

    def __init__(self, files: Sequence[TokenFile], documents: Sequence[LeftOut] = ()) -> None:
        self.documents = tuple(documents)
        self._base = np.cumsum([0, *(file.n_tokens for file in files)])
        ranges = sorted({(self._base[each.file] + each.first, self._base[each.file] + each.stop) for each in documents})
        held = np.array([each for each in ranges if each[0] < each[1]], np.int64).reshape(-1, 2)
        self._first_L, self._stop_L = held.T.copy()  # documents do not overlap, so both ascend

    def within(self, file_B: np.ndarray, start_B: np.ndarray, length_B: np.ndarray) -> np.ndarray:
        """int64 [3, L]: the window, the first token in it and the end, of each part of a document that is left out.

        Sorted by window and token. Window b holds ``length_B[b]`` tokens of file ``file_B[b]`` from ``start_B[b]`` on.
        """
        if not len(self._first_L):
            return NOTHING
        start_B = self._base[file_B] + start_B
        low_B = self._stop_L.searchsorted(start_B, side="right")
        count_B = np.maximum(self._first_L.searchsorted(start_B + length_B, side="left") - low_B, 0)
        row_L = np.arange(len(start_B)).repeat(count_B)
        which_L = np.arange(len(row_L)) + (low_B - count_B.cumsum() + count_B)[row_L]
        first_L = np.maximum(self._first_L[which_L] - start_B[row_L], 0)
        return np.array((row_L, first_L, np.minimum(self._stop_L[which_L] - start_B[row_L], length_B[row_L])))

    def holds(self, file: int, token: int) -> bool:
        """Whether this token of a file belongs to a document that is left out."""
        one = np.array([file]), np.array([token]), np.array([1])
        return self.within(*one).shape[1] > 0
