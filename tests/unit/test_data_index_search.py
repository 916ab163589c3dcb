"""Document starts of many windows at once: those that are found window by window, and the same refusals."""

from pathlib import Path

import numpy as np
import pytest

import data.boundaries as boundaries
from data.boundaries import Boundaries
from data.errors import DataError
from data.index_search import find_starts
from data.tokenfile import HEADER, MAGIC, TokenFile, bin_path, idx_path


def write_file(prefix: Path, lengths: np.ndarray, first_sequences: np.ndarray | None = None) -> TokenFile:
    """A token file of sequences of these lengths, one to a document unless it is said which begin one."""
    bin_path(prefix).write_bytes(np.arange(lengths.sum(), dtype=np.uint16).tobytes())
    indices = np.arange(len(lengths) + 1) if first_sequences is None else np.append(first_sequences, len(lengths))
    pointers = 2 * (np.cumsum(lengths) - lengths)
    head = HEADER.pack(MAGIC, 1, 8, len(lengths), len(indices))
    arrays = (lengths.astype("<i4"), pointers.astype("<i8"), indices.astype("<i8"))
    idx_path(prefix).write_bytes(head + b"".join(array.tobytes() for array in arrays))
    return TokenFile(prefix)


def windows(file: TokenFile, draw: np.random.Generator, n_windows: int) -> tuple[np.ndarray, np.ndarray]:
    start_B = draw.integers(0, file.n_tokens - 1, n_windows)
    return start_B, np.minimum(start_B + draw.integers(1, 200, n_windows), file.n_tokens)


def one_by_one(file: TokenFile, start_B: np.ndarray, stop_B: np.ndarray) -> list[tuple[int, int]]:
    pairs = zip(start_B.tolist(), stop_B.tolist(), strict=True)
    return [(row, offset) for row, pair in enumerate(pairs) for offset in file.document_starts(*pair)]


KINDS = {
    "even": lambda draw: (np.full(3000, 20), None),
    "uneven": lambda draw: (np.concatenate([np.ones(4000, int), draw.integers(1, 900, 300), np.ones(50, int)]), None),
    "empty documents": lambda draw: (draw.integers(0, 3, 2000), None),
    "several sequences": lambda draw: (draw.integers(0, 40, 2000), np.sort(draw.integers(0, 2000, 500)).clip(1) - 1),
    "one": lambda draw: (np.array([50]), None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_at_once_are_those_found_one_by_one(tmp_path, kind):
    draw = np.random.default_rng(0)
    lengths, first_sequences = KINDS[kind](draw)
    if first_sequences is not None:
        first_sequences[0] = 0
    file = write_file(tmp_path / "tokens", lengths, first_sequences)
    start_B, stop_B = windows(file, draw, 500)
    row_F, offset_F = find_starts(file, start_B, stop_B)
    assert list(zip(row_F.tolist(), offset_F.tolist(), strict=True)) == one_by_one(file, start_B, stop_B)


def test_a_dataset_of_several_files_is_searched_alike(tmp_path, monkeypatch):
    draw = np.random.default_rng(1)
    files = [write_file(tmp_path / f"tokens-{n}", draw.integers(1, 60, 400 * (n + 1))) for n in range(3)]
    file_B = draw.integers(0, 3, 300)
    start_B = np.array([draw.integers(0, files[number].n_tokens - 65) for number in file_B])
    length_B = draw.integers(2, 65, 300)
    in_memory, mapped = Boundaries(files), Boundaries(files, max_in_memory=0)
    expected = [column.tolist() for column in in_memory.find(file_B, start_B, length_B)]
    assert [column.tolist() for column in mapped.find(file_B, start_B, length_B)] == expected
    monkeypatch.setattr(boundaries, "MANY_WINDOWS", 10**9)
    assert [column.tolist() for column in mapped.find(file_B, start_B, length_B)] == expected


@pytest.mark.parametrize("at", [0, 700, 1999])
@pytest.mark.parametrize("change", [-2, 2, 10**9])
def test_contradictions_are_refused_with_the_same_line(tmp_path, at, change):
    """A sequence's offset is wrong: whoever looks near it says so, in the words of the other search."""
    draw = np.random.default_rng(2)
    file = write_file(tmp_path / "tokens", np.full(2000, 20))
    content = bytearray(idx_path(tmp_path / "tokens").read_bytes())
    place = HEADER.size + 4 * 2000 + 8 * (at or 1)
    content[place : place + 8] = (int.from_bytes(content[place : place + 8], "little") + change).to_bytes(8, "little")
    idx_path(tmp_path / "tokens").write_bytes(content)
    if at == 1999:
        with pytest.raises(DataError):
            TokenFile(tmp_path / "tokens")
        return
    file = TokenFile(tmp_path / "tokens")
    start_B, stop_B = windows(file, draw, 2000)
    told = []
    for search in (one_by_one, find_starts):
        with pytest.raises(DataError, match="must say that each begins where the one before it ends") as error:
            search(file, start_B, stop_B)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_planted_search_that_takes_each_sequence_for_a_document_is_seen(tmp_path, monkeypatch):
    lengths, first_sequences = KINDS["several sequences"](np.random.default_rng(0))
    first_sequences[0] = 0
    file = write_file(tmp_path / "tokens", lengths, first_sequences)
    start_B, stop_B = windows(file, np.random.default_rng(0), 500)
    expected = one_by_one(file, start_B, stop_B)
    one_each = memoryview(np.arange(file.n_sequences + 1))
    monkeypatch.setattr(TokenFile, "index_arrays", property(lambda self: (self._pointers, self._lengths, one_each)))
    row_F, offset_F = find_starts(file, start_B, stop_B)
    assert list(zip(row_F.tolist(), offset_F.tolist(), strict=True)) != expected
