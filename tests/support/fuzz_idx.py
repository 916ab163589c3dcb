"""Fuzz target: any bytes as the .idx of a token file."""

import struct
from pathlib import Path

from data.errors import DataError
from data.tokenfile import HEADER, MAGIC, TokenFile

N_TOKENS = 12  # tokens in the .bin file, two bytes each
LENGTHS = ([12], [1] * 12, [3, 0, 4, 5], [0, 12], [5, 7, 0, 0])  # of the sequences of each seed


def seeds() -> list[bytes]:
    """Valid index files, with one document for each sequence and with one document for all of them."""
    return [_index(lengths, indices) for lengths in LENGTHS for indices in (range(len(lengths) + 1), (0, len(lengths)))]


def _index(lengths: list[int], indices) -> bytes:
    pointers = [2 * sum(lengths[:number]) for number in range(len(lengths))]
    arrays = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q", *pointers)
    return HEADER.pack(MAGIC, 1, 8, len(lengths), len(indices)) + arrays + struct.pack(f"<{len(indices)}q", *indices)


def check(data: bytes, folder: Path) -> bool:
    """Whether ``data`` is accepted as an index; document starts are looked up for every window and for the whole file.

    Exceptions other than the documented refusal escape. Raises AssertionError where a document begins outside of its
    window, or the two ways disagree.
    """
    (folder / "x.idx").write_bytes(data)
    (folder / "x.bin").write_bytes(bytes(2 * N_TOKENS))
    try:
        file = TokenFile(folder / "x")
    except DataError:
        return False
    starts = _starts(file)
    for start in range(file.n_tokens):
        for stop in range(start, file.n_tokens + 1):
            try:
                found = file.document_starts(start, stop)
            except DataError:
                assert starts is None, "a window is refused where the whole file is not"
                continue
            assert all(0 < offset < stop - start for offset in found)
            assert starts is None or found == [at - start for at in starts if start < at < stop]
    return starts is not None


def _starts(file: TokenFile) -> list[int] | None:
    """Where each document starts, or None where the index is refused."""
    try:
        return file.all_starts().tolist()
    except DataError:
        return None
