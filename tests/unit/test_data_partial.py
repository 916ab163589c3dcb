"""Files that are there whole or not at all."""

from pathlib import Path

import pytest

from data.cleaning.config import NearConfig
from data.cleaning.near import find_pairs
from data.partial import move_into_place, written_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with written_whole(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old" and len(names(tmp_path)) == 2
    assert path.read_bytes() == b"new" and names(tmp_path) == ["a"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write() -> None:
        with written_whole(path) as file:
            file.write(b"new")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a"]


def test_what_was_written_gets_its_name_and_folder(tmp_path: Path) -> None:
    (tmp_path / "written").write_bytes(b"new")
    move_into_place(tmp_path / "written", tmp_path / "pairs/a")
    assert (tmp_path / "pairs/a").read_bytes() == b"new" and names(tmp_path) == ["pairs"]


def test_a_bucket_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("datatrove")
    (tmp_path / "bucket_000").mkdir()
    (tmp_path / "bucket_000/00000.minhash.sig").write_bytes(b"torn")
    with pytest.raises(Exception, match=r"."):
        find_pairs(NearConfig(buckets=1), tmp_path, 0, 1)
    assert names(tmp_path) == ["bucket_000"]
