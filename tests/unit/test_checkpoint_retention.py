"""Which checkpoints stay."""

import contextlib
import errno
import math
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.checkpoint import local
from parallel.checkpoint.local import LocalStore
from parallel.checkpoint.manifest import Manifest, hash_file, read_manifest, write_manifest
from parallel.checkpoint.places import list_checkpoints, step_directory
from parallel.checkpoint.retention import Retention, heldout_loss_of, looks_whole, steps_to_delete

losses = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.sets(st.integers(1, 60)),
    st.dictionaries(st.integers(1, 60), losses),
    st.integers(1, 5),
    st.none() | st.integers(1, 20),
    st.integers(0, 4),
    st.data(),
)
def test_every_rule_keeps_its_own_and_nothing_else_stays(steps, known, last, every, best, data):
    good = data.draw(st.sampled_from([None, *sorted(steps)]))
    rules = {"keep_last": last, "keep_every_steps": every, "keep_best": best, "last_good": good}
    deleted = steps_to_delete(steps, known, **rules)
    stay = steps - set(deleted)
    assert deleted == sorted(steps - stay)
    newest = sorted(steps)[-last:]
    assert set(newest) <= stay
    assert good is None or good in stay
    assert every is None or {step for step in steps if step % every == 0} <= stay
    finite = {step: known[step] for step in steps if math.isfinite(known.get(step, math.nan))}
    assert len(stay & set(finite)) >= min(best, len(finite))
    for step in deleted:  # whatever goes is older than the last ones and beaten by as many as are to stay
        assert step < min(newest)
        assert every is None or step % every
        if step in finite:
            assert sum((loss, other) < (finite[step], step) for other, loss in finite.items() if other in stay) >= best
    for step in stay:  # and whatever stays has its reason
        is_best = step in finite and sum((loss, other) < (finite[step], step) for other, loss in finite.items()) < best
        assert step in newest or step == good or (every is not None and step % every == 0) or is_best
    assert steps_to_delete(stay, known, **rules) == []  # once is enough


def make(checkpoints, step, loss=None):
    """A checkpoint with one file, and a held-out loss at its step."""
    directory = step_directory(checkpoints, step)
    directory.mkdir(parents=True)
    file = directory / "shard-00000.safetensors"
    file.write_bytes(bytes(100 + step))
    scalars = {"consumed": 0, "skipped": [], "tokens": 0, "updates": 0, "loss_scaler": {}}
    scalars |= {"heldout": [step, loss] if loss is not None else [step - 1, 0.0]}
    files = {file.name: {"bytes": 100 + step, "xxh3_128": hash_file(file)}}
    write_manifest(Manifest(step=step, scalars=scalars, tensors={}, kinds={}, files=files), directory)
    return directory


class Killed(BaseException):
    """Stands for a kill: no handler of errors takes it."""


def save_again(checkpoints, step, loss):
    """Writes an attempt at a checkpoint of this step, as a saver does; returns the function that commits it."""
    store, name = LocalStore(checkpoints), f"step-{step:08d}"
    partial, _ = store.begin(name, f"1-{loss}")
    made = make(checkpoints.parent / "made", step, loss)
    shutil.copytree(made, partial.directory, dirs_exist_ok=True)
    shutil.rmtree(made)
    content = (partial.directory / "manifest.json").read_bytes()
    return lambda: store.commit(name, f"1-{loss}", content)


def test_a_kill_at_any_moment_of_saving_a_step_again_leaves_it_whole(tmp_path, monkeypatch):
    """It comes before the first change of a name, then before the second one, until the save ends without one."""
    checkpoints, left = tmp_path / "checkpoints", []

    def killing(change):
        def counted(*paths):
            if not left:
                raise Killed
            left.pop()
            return change(*paths)

        return counted

    make(checkpoints, 4, 5.0)
    for n_changes in range(3):
        left[:] = [None] * n_changes
        commit = save_again(checkpoints, 4, 3.0 - n_changes)
        with monkeypatch.context() as patched, contextlib.suppress(Killed):
            patched.setattr(os, "rename", killing(os.rename))
            patched.setattr(local, "exchanged", killing(getattr(local, "exchanged", None)), raising=False)
            commit()
        assert steps_in(checkpoints) == [4] and looks_whole(step_directory(checkpoints, 4))
    assert heldout_loss_of(step_directory(checkpoints, 4)) == 1.0
    assert Retention(keep_last=1).apply(checkpoints) == []
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000004"]


def test_a_step_is_saved_again_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "exchanged", lambda *paths: False)
    checkpoints = tmp_path / "checkpoints"
    make(checkpoints, 4, 5.0)
    save_again(checkpoints, 4, 3.0)()
    assert heldout_loss_of(step_directory(checkpoints, 4)) == 3.0
    Retention(keep_last=1).apply(checkpoints)
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000004"]


def steps_in(checkpoints):
    return [read_manifest(directory).step for directory in list_checkpoints(checkpoints)]


def test_deletes_by_what_the_manifests_say(tmp_path):
    for step, loss in [(1, 5.0), (2, 4.0), (3, math.nan), (4, 4.5), (5, None), (6, 4.25), (7, 9.0)]:
        make(tmp_path, step, loss)
    (tmp_path / ".step-00000008.partial").mkdir()
    (tmp_path / "step-00000003.damaged").mkdir()
    assert Retention(keep_last=1, keep_every_steps=5, keep_best=2).apply(tmp_path) == [1, 3, 4]
    assert steps_in(tmp_path) == [2, 5, 6, 7]
    assert (tmp_path / "step-00000003.damaged").is_dir()
    assert not (tmp_path / ".step-00000008.partial").exists()


def test_a_later_best_replaces_the_earlier_one(tmp_path):
    retention = Retention(keep_last=1, keep_best=1)
    for step, loss in enumerate([3.0, 2.0, 2.5, 1.5, 1.75], 1):
        make(tmp_path, step, loss)
        retention.apply(tmp_path)
    assert steps_in(tmp_path) == [4, 5]


def test_a_step_that_is_saved_again_counts_with_its_new_loss(tmp_path):
    retention = Retention(keep_last=2, keep_best=1)
    for step, loss in [(1, 3.0), (2, 1.0), (2, 5.0), (3, 4.0), (4, 4.5)]:
        if step_directory(tmp_path, step).exists():  # damaged, which a rollback has found
            step_directory(tmp_path, step).rename(tmp_path / f"step-{step:08d}.damaged")
        make(tmp_path, step, loss)
        retention.apply(tmp_path)
    assert steps_in(tmp_path) == [1, 3, 4]


@pytest.mark.parametrize("damage", ["truncated", "missing file", "missing manifest", "manifest"])
def test_planted_damage_of_the_newest_keeps_the_last_good_one(tmp_path, damage):
    for step in (1, 2, 3):
        make(tmp_path, step)
    newest = step_directory(tmp_path, 3)
    match damage:
        case "truncated":
            (newest / "shard-00000.safetensors").write_bytes(b"")
        case "missing file":
            (newest / "shard-00000.safetensors").unlink()
        case "missing manifest":
            (newest / "manifest.json").unlink()
        case _:
            (newest / "manifest.json").write_text("{}")
    assert Retention(keep_last=1).apply(tmp_path) == [1]
    assert [directory.name for directory in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]


def test_nothing_is_deleted_where_none_is_whole(tmp_path):
    for step in (1, 2, 3):
        (make(tmp_path, step) / "manifest.json").unlink()
    assert Retention(keep_last=1, keep_best=1).apply(tmp_path) == []
    assert len(list_checkpoints(tmp_path)) == 3


def test_of_a_linked_checkpoint_the_link_goes(tmp_path):
    """An earlier version left hidden links, too, which nothing deleted."""
    elsewhere, checkpoints = tmp_path / "elsewhere", tmp_path / "checkpoints"
    for step in (1, 2, 3):
        make(checkpoints if step != 1 else elsewhere, step)
    step_directory(checkpoints, 1).symlink_to(step_directory(elsewhere, 1))
    (checkpoints / ".step-00000000.removed.partial").symlink_to(step_directory(elsewhere, 1))
    (checkpoints / ".step-00000001.removed.partial").symlink_to("gone")
    assert Retention(keep_last=1).apply(checkpoints) == [1, 2]
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000003"]
    assert looks_whole(step_directory(elsewhere, 1))


def test_what_cannot_be_deleted_is_named_and_keeps_nothing_else(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        make(tmp_path, step)
    for name in (".step-00000004.1-1.partial", ".step-00000005.1-2.partial"):
        (tmp_path / name).mkdir()
    delete = shutil.rmtree

    def refuse(path, *arguments, **options):
        if any(number in str(path) for number in ("0001.", "0004.")):
            raise OSError(errno.EACCES, "Permission denied", "manifest.json")
        delete(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(OSError, match=f"{tmp_path}/.step-00000001.removed.partial: .*Permission denied"):
        Retention(keep_last=1).apply(tmp_path)
    left = {".step-00000001.removed.partial", ".step-00000004.1-1.partial", "step-00000003"}
    assert {path.name for path in tmp_path.iterdir()} == left
    with pytest.raises(OSError, match=r"0001.removed.partial: .*; .*/.step-00000004.1-1.partial: "):
        Retention(keep_last=1).apply(tmp_path)
