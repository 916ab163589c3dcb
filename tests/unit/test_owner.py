"""Whose checkpoints lie in checkpoint.dir: one run's, of all that are there, whenever they begin."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.guard.fence import StaleRun, raise_fence
from launcher.training import run_dir
from launcher.training.owner import Owner, check_owner, keeping, owner_of, read_run_id
from launcher.training.run_parts import CHECKPOINTS, CONFIG, RUN_ID, TOKEN_FILES
from owners import config_of, start
from parallel.checkpoint.store import OWNER


def put_checkpoint(place: Path, config: RunConfig) -> None:
    """What passes for one, of this config."""
    folder = place / "step-00000004"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(dump_config(config))


def refusal(config: RunConfig) -> str:
    """The line with which a start is refused, after which nothing has changed."""
    paths = [config.run_path.parent, Path(config.checkpoint_location)]
    before = [sorted(path.rglob("*")) for path in paths]
    with pytest.raises(UserError) as refused:
        start(config)
    assert [sorted(path.rglob("*")) for path in paths] == before
    (line,) = refused.value.problems
    return line


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def first(tmp_path: Path, place: Path) -> RunConfig:
    """The config of a run that has begun."""
    config = config_of(tmp_path / "runs", "first", place)
    start(config)
    return config


def test_a_run_marks_its_place_and_goes_on_there(first: RunConfig, place: Path) -> None:
    name = start(first)
    assert owner_of(place) == (name, str(first.run_path))
    assert [path.name for path in place.iterdir()] == [OWNER]


def test_a_second_run_is_refused_before_either_has_saved(first: RunConfig, place: Path, tmp_path: Path) -> None:
    second = config_of(tmp_path / "runs", "second", place)
    line = refusal(second)
    assert line.startswith(f"checkpoint.dir={place} must be this run's alone, and is kept by the run in ")
    assert line.partition("in ")[2].startswith(f"{first.run_path}; choose another; init_from=")
    assert not second.run_path.exists()


def test_a_run_that_has_begun_elsewhere_is_refused_too(first: RunConfig, place: Path, tmp_path: Path) -> None:
    """The same model, data and seed: its config gives nothing away."""
    elsewhere = config_of(tmp_path / "runs", "second", tmp_path / "other")
    start(elsewhere)
    put_checkpoint(place, first)
    assert f"kept by the run in {first.run_path}" in refusal(config_of(tmp_path / "runs", "second", place))


def test_a_run_s_own_folder_of_checkpoints_is_nobody_else_s(tmp_path: Path) -> None:
    own = config_of(tmp_path / "runs", "first", None)
    start(own)
    assert not (own.run_path / CHECKPOINTS / OWNER).exists()
    second = config_of(tmp_path / "runs", "second", own.run_path / CHECKPOINTS)
    assert f"kept by the run in {own.run_path}" in refusal(second)


@pytest.mark.parametrize("part", [RUN_ID, CONFIG, TOKEN_FILES])
def test_a_start_that_finds_no_room_marks_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A disk that is full when this part of the run directory is written."""
    replaced = run_dir.move_into_place

    def move(temporary: Path, path: Path) -> None:
        if path.name == part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        replaced(temporary, path)

    monkeypatch.setattr(run_dir, "move_into_place", move)
    monkeypatch.setattr(run_dir, "token_files", lambda _: "{}")
    config = config_of(tmp_path / "runs", "first", place)
    place.mkdir()
    assert f"must be writable, and is not ({config.run_path / part}: No space left on device)" in refusal(config)
    assert not config.run_path.exists() and list(place.iterdir()) == []


def test_a_run_that_was_moved_goes_on_and_says_where_it_is(first: RunConfig, place: Path, tmp_path: Path) -> None:
    name = read_run_id(first.run_path)
    moved = config_of(tmp_path / "runs", "moved", place)
    first.run_path.rename(moved.run_path)
    assert start(moved) == name
    assert owner_of(place) == (name, str(moved.run_path))


def test_a_copy_beside_its_original_is_refused(first: RunConfig, place: Path, tmp_path: Path) -> None:
    copy = config_of(tmp_path / "runs", "copy", place)
    shutil.copytree(first.run_path, copy.run_path)
    assert f"kept by the run in {first.run_path}" in refusal(copy)
    assert start(config_of(tmp_path / "runs", "copy", tmp_path / "other"))  # where it has a place of its own


def test_what_a_removed_run_left_empty_is_free(first: RunConfig, place: Path, tmp_path: Path) -> None:
    shutil.rmtree(first.run_path)
    second = config_of(tmp_path / "runs", "second", place)
    name = start(second)
    assert owner_of(place) == (name, str(second.run_path))


def test_checkpoints_of_a_removed_run_are_not_another_s(first: RunConfig, place: Path, tmp_path: Path) -> None:
    """Unless it says so: by the config in a new directory, or, where it has a name already, without the mark."""
    put_checkpoint(place, first)
    start(config_of(tmp_path / "runs", "second", tmp_path / "other"))
    name = read_run_id(first.run_path)
    shutil.rmtree(first.run_path)
    second = config_of(tmp_path / "runs", "second", place)
    line = refusal(second)
    assert f"and holds those of the run in {first.run_path}, which is gone; choose another; init_from={place} " in line
    assert line.endswith(f"; where they are this run's own, remove {place}/{OWNER}")
    third = config_of(tmp_path / "runs", "third", place)
    third.run_path.mkdir()
    (third.run_path / CONFIG).write_text(dump_config(third))
    assert check_owner(third) == name
    (place / OWNER).unlink()
    assert check_owner(second) == read_run_id(second.run_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{}", b'{"run": 1, "run_dir": "/a"}', b'{"run": "a", "run_dir": "\\u0000"}', b"[" * 60000],
    ids=lambda content: content[:20],
)
def test_a_damaged_mark_is_named_in_a_line(first: RunConfig, place: Path, content: bytes) -> None:
    (place / OWNER).write_bytes(content)
    rule = "must say which run keeps its checkpoints there"
    assert refusal(first) == f"{place}/{OWNER} {rule}; remove it once no run keeps its checkpoints there"


@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a symbolic link", "too long"])
def test_a_mark_that_is_no_file_is_named_in_a_line(first: RunConfig, place: Path, kind: str) -> None:
    mark = place / OWNER
    mark.unlink()
    match kind:
        case "a named pipe":
            os.mkfifo(mark)
        case "a folder":
            mark.mkdir()
        case "a symbolic link":
            mark.symlink_to("/dev/zero")
        case _:
            mark.write_bytes(bytes(1 << 20))
            kind = "has more than the 65536 bytes"
    assert refusal(first).startswith(f"{mark} must be a file that can be read, and ")
    assert kind in refusal(first)


def test_a_damaged_name_is_named_in_a_line(first: RunConfig) -> None:
    (first.run_path / RUN_ID).write_text("first\n")
    assert refusal(first).startswith(f"{first.run_path / RUN_ID} must hold the name that the run drew")


def test_a_run_saves_where_the_mark_is_its_own_alone(first: RunConfig, place: Path, tmp_path: Path) -> None:
    """One that was taken away is put back; another's ends the run; a damaged one fails the save."""
    fence, mark = raise_fence(first.run_path), place / OWNER
    content = mark.read_bytes()
    shutil.rmtree(place)
    with keeping(first, fence):
        assert mark.read_bytes() == content
    mark.write_bytes(b"{")
    with pytest.raises(OSError, match="must say which run keeps its checkpoints there"), keeping(first, fence):
        raise AssertionError("whose the place is cannot be told")
    other = tmp_path / "runs/other"
    mark.write_bytes(Owner("0" * 32, str(other)).text())
    with pytest.raises(StaleRun, match=f"^{place} was taken by the run in {other}; "), keeping(first, fence):
        raise AssertionError("the place is another run's")
