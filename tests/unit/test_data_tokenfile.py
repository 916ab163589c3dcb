"""Token files: the format byte for byte, and every damage refused by name."""

import struct
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DataError
from data.tokenfile import HEADER, MAGIC, TokenFile, token_dtype
from data.tokenwriter import TokenFileWriter
from data_reference import write_foreign_file, write_token_file

DOCUMENTS = [[5, 6, 7], [8], [9, 10]]


def test_bytes_are_megatrons(tmp_path: Path) -> None:
    write_token_file(tmp_path / "x", DOCUMENTS)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 9, 10)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "x.idx").read_bytes() == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


@given(lengths=st.lists(st.integers(0, 5), max_size=30), wide=st.booleans())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], wide: bool) -> None:
    folder = tmp_path_factory.mktemp("t")
    documents = [[100 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    file = TokenFile(write_token_file(folder / "x", documents, np.int32 if wide else np.uint16))
    assert file.tokens.tolist() == [t for d in documents for t in d]
    assert file.n_documents == len(documents)
    starts = [sum(lengths[:i]) for i, n in enumerate(lengths) if n]
    assert file.all_starts().tolist() == starts
    for start in range(0, file.n_tokens, 3):
        stop = min(start + 4, file.n_tokens)
        assert file.document_starts(start, stop) == [s - start for s in starts if start < s < stop]


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=8))
def test_foreign_documents_of_several_sequences(
    tmp_path_factory: pytest.TempPathFactory, shape: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("t")
    documents = [[[1] * n for n in document] for document in shape]
    file = TokenFile(write_foreign_file(folder / "x", documents))
    ends = np.cumsum([sum(document) for document in shape]).tolist()
    starts = sorted({start for start, end in zip([0, *ends], ends, strict=False) if end > start})
    assert file.all_starts().tolist() == starts
    assert [0, *file.document_starts(0, file.n_tokens)] == (starts or [0])


def test_index_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.tokenwriter.CHUNK", 4)
    lengths = [3, 0, 1, 2, 5, 1, 1, 0, 9]
    file = TokenFile(write_token_file(tmp_path / "x", [[1] * n for n in lengths]))
    foreign = TokenFile(write_foreign_file(tmp_path / "y", [[[1] * n] for n in lengths]))
    assert (tmp_path / "x.idx").read_bytes() == (tmp_path / "y.idx").read_bytes()
    assert file.all_starts().tolist() == foreign.all_starts().tolist()


def test_dtype_follows_the_vocabulary() -> None:
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.int32


def _patched(offset: int, value: bytes):
    def damage(data: bytes) -> bytes:
        return data[:offset] + value + data[offset + len(value) :]

    return damage


POINTERS, INDICES = HEADER.size + 12, HEADER.size + 36
DAMAGES = {
    "empty idx": ("idx", lambda d: b"", "header alone takes 34"),
    "short header": ("idx", lambda d: d[:20], "header alone takes 34"),
    "magic": ("idx", _patched(0, b"X"), repr(MAGIC)),
    "version": ("idx", _patched(9, struct.pack("<Q", 2)), "only version 1 can be read"),
    "dtype code": ("idx", _patched(17, b"\x07"), "dtype code 7"),
    "truncated idx": ("idx", lambda d: d[:-8], "take 102"),
    "longer idx": ("idx", lambda d: d + b"\x00", "take 102"),
    "sequence count": ("idx", _patched(18, struct.pack("<Q", 1 << 60)), "sequences and 4 document indices"),
    "no document indices": ("idx", _patched(26, struct.pack("<Q", 0)), "0 document indices"),
    "first pointer": ("idx", _patched(POINTERS, struct.pack("<q", 2)), "first sequence at byte 0"),
    "negative length": ("idx", _patched(HEADER.size + 8, struct.pack("<i", -2)), "negative length"),
    "last pointer": ("idx", _patched(POINTERS + 16, struct.pack("<q", 10)), "describes 14"),
    "first document": ("idx", _patched(INDICES, struct.pack("<q", 1)), "document indices run from 1 to 3"),
    "last document": ("idx", _patched(INDICES + 24, struct.pack("<q", 2)), "run from 0 to 2"),
    "truncated bin": ("bin", lambda d: d[:-2], "has 10 bytes"),
    "half a token": ("bin", lambda d: d[:-1], "has 11 bytes"),
    "longer bin": ("bin", lambda d: d + b"\x00\x00", "has 14 bytes"),
    "empty bin": ("bin", lambda d: b"", "has 0 bytes"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_token_file(tmp_path / "x", DOCUMENTS)
    which, damage, expected = DAMAGES[name]
    path = tmp_path / f"x.{which}"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        TokenFile(tmp_path / "x")
    line = str(caught.value)
    assert expected in line
    assert str(tmp_path / "x.") in line
    assert "; " in line
    assert "\n" not in line


def test_missing_half_is_refused(tmp_path: Path) -> None:
    write_token_file(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin cannot be read \(No such file"):
        TokenFile(tmp_path / "x")


MIDDLE = HEADER.size + 16
IN_THE_MIDDLE = {
    **{f"offset {value}": (MIDDLE + 16, struct.pack("<q", value)) for value in (0, 6, 12, 1 << 40, -2, -(1 << 63))},
    **{f"length {value}": (HEADER.size + 8, struct.pack("<i", value)) for value in (0, 1, 3, -2, 2**31 - 1, -(2**31))},
}


@pytest.mark.parametrize("name", IN_THE_MIDDLE)
def test_what_contradicts_itself_in_the_middle_is_refused_as_it_is_read(tmp_path: Path, name: str) -> None:
    """Opening looks at the ends only. No window that touches the damage is read."""
    write_token_file(tmp_path / "x", [[1, 2], [3, 4], [5, 6], [7]])
    path = tmp_path / "x.idx"
    good = TokenFile(tmp_path / "x")
    path.write_bytes(_patched(*IN_THE_MIDDLE[name])(path.read_bytes()))
    file = TokenFile(tmp_path / "x")
    with pytest.raises(DataError, match="must say that each begins where the one before it ends"):
        file.all_starts()
    for start, stop in ((0, 7), (4, 6), (5, 6), (3, 5)):
        with pytest.raises(DataError, match=r"x\.idx: the lengths and offsets near sequence [0-3] must say"):
            file.document_starts(start, stop)
    with suppress(DataError):  # the search may have met the damage
        assert file.document_starts(0, 2) == good.document_starts(0, 2)


def test_document_indices_that_go_back_are_refused(tmp_path: Path) -> None:
    write_token_file(tmp_path / "x", [[1, 2], [3, 4], [5, 6], [7]])
    path = tmp_path / "x.idx"
    for values in ((3,), (-1,), (1 << 40,), (3 << 61, -(3 << 61))):  # the last differ by more than 64 bits hold
        path.write_bytes(_patched(MIDDLE + 32 + 8, struct.pack(f"<{len(values)}q", *values))(path.read_bytes()))
        with pytest.raises(DataError, match=r"x\.idx must number its documents' sequences within the file, ascending"):
            TokenFile(tmp_path / "x").all_starts()


def test_unfinished_writer_leaves_nothing(tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "x", np.dtype(np.uint16))
    writer.add([1, 2, 3])
    assert not (tmp_path / "x.bin").exists()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_opening_takes_constant_time(tmp_path: Path) -> None:
    """Ten billion tokens in five million documents, as sparse files with true ends."""
    n_tokens, n_documents = 10_000_000_000, 5_000_000
    with (tmp_path / "x.bin").open("wb") as file:
        file.truncate(2 * n_tokens)
    with (tmp_path / "x.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, n_documents, n_documents + 1))
        file.seek(HEADER.size + 4 * (n_documents - 1))
        file.write(np.int32(2000).tobytes())
        file.seek(HEADER.size + 12 * n_documents - 8)
        file.write(np.int64(2 * (n_tokens - 2000)).tobytes())
        file.seek(HEADER.size + 20 * n_documents)
        file.write(np.int64(n_documents).tobytes())
    start = time.process_time()
    file = TokenFile(tmp_path / "x")
    assert time.process_time() - start < 0.05
    assert file.n_tokens == n_tokens
