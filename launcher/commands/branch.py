"""`roundtable branch RUN NEW --step n`: a run directory that goes on from another run's checkpoint, with its states."""

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from data.places import why_no_path, why_not_writable
from data.without import hash_of_list, parse_list
from launcher.commands.branch_without import choose, read_names
from launcher.commands.trained import find_candidates, no_checkpoint
from launcher.config.checked import load_checked
from launcher.config.dump import dump_config
from launcher.config.layout_rules import least_ranks
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.console import in_a_line, say
from launcher.errors import UserError
from launcher.new_folder import new_folder
from launcher.slurm.follow import find_run
from launcher.training.lineage import Lineage, Without, read_lineage, write_lineage
from launcher.training.newest import write_newest
from launcher.training.owner import read_run_id
from launcher.training.run_dir import check_same_run, record_folder, saved_config, start_folder
from launcher.training.run_parts import CHECKPOINTS, CONFIG, STARTED_IN, WITHOUT
from parallel.checkpoint.local import LocalFolder, sync_directory
from parallel.checkpoint.manifest import HASH_CHUNK, DamagedCheckpoint, hash_problem, read_manifest
from parallel.checkpoint.read import Checkpoint, open_checkpoint
from parallel.checkpoint.store import MANIFEST, Folder, step_name, step_of
from parallel.processes.stop import undoing


@undoing()
def branch_run(run: str, new: str, step: int, overrides: Sequence[str], without: Sequence[str] = ()) -> int:
    """Makes the run directory NEW, from which `roundtable train NEW/config.yaml` continues; returns 0.

    NEW holds a copy of RUN's checkpoint of ``step``, the config of that checkpoint with the overrides, and a record of
    its origin. ``without`` names documents, or files that list documents, which NEW lists and never sees; the copied
    checkpoint is then the last one up to ``step`` from before any of them was seen. Raises UserError or DataError where
    something is wrong, before anything is created. RUN is only read.
    """
    run_path = find_run(run).absolute()
    out, listed = checked_new(new, run_path), read_names(without)
    check_settable(overrides, new)
    config = saved_config(run_path)
    if config is None:
        raise UserError([f"RUN={run} holds no config.yaml, so it is no run directory; give a run that has trained"])
    folder = start_folder(run_path, config)
    with contextlib.chdir(folder):
        if not find_candidates(run_path, "RUN")[1]:
            raise UserError([no_checkpoint("RUN", run_path)])
        choice = choose(run_path, step, listed) if listed else None
        checkpoint = open_verified(run_path, choice.step if choice is not None else step)
        left_out = choice.text if choice is not None else own_list(checkpoint)
        with naming_config(checkpoint):
            changed = branched_config(checkpoint, run_path, out, overrides, lists=left_out is not None)
        record = choice.record if choice is not None else own_record(left_out, run_path)
        lineage = Lineage(str(run_path), checkpoint.step, record, read_run_id(run_path))
        write_branch(out, changed, checkpoint, folder, lineage, left_out)
    begins = f"{new} branches from {run} at step {lineage.step}"
    say(in_a_line(begins if choice is None else f"{begins}: {choice.words()}"))
    steps = changed.train.steps
    first = f" after you raise train.steps above {steps}, which it has already reached"
    reached = first if lineage.step >= steps else ""
    say(in_a_line(f"`{shlex.join(['roundtable', 'train', f'{new}/{CONFIG}'])}` goes on from there{reached}"))
    return 0


def own_list(checkpoint: Checkpoint) -> str | None:
    """The text of the list of documents that the run itself leaves out, from its checkpoint; None where it has none."""
    copy = checkpoint.attached(WITHOUT)
    return copy.read_text(encoding="utf-8") if copy is not None else None


def own_record(left_out: str | None, run_path: Path) -> Without | None:
    """The record for a list of left-out documents that a branch takes over from its run; None where there is none.

    It is the run's own record, where its lineage has one; else it says that no step has seen any of the documents.
    """
    if left_out is None:
        return None
    lineage = read_lineage(run_path)
    if lineage is not None and lineage.without is not None:
        return lineage.without
    listed = parse_list(left_out.encode(), WITHOUT)
    return Without(len({each.document for each in listed}), hash_of_list(listed), first_seen=None, known_from=1)


def checked_new(new: str, run_path: Path) -> Path:
    """NEW as an absolute path. Raises UserError where it exists already, cannot be made, or would lie in the run."""
    rule = why_no_path(new, created=True)
    if rule is None and os.path.lexists(new):
        rule = "must be a new folder, and is there already"
    if rule is None and not os.path.abspath(new).isprintable():
        rule = "must have a whole path of text, as config.yaml will name it"
    rule = rule or why_not_writable(new)
    if rule is None and Path(new).resolve().is_relative_to(run_path.resolve()):
        rule = "must lie outside the run directory, which is only read"
    if rule is not None:
        raise UserError([f"NEW={new} {rule}; choose another"])
    return Path(new).absolute()


def check_settable(overrides: Sequence[str], new: str) -> None:
    """Raises UserError for overrides of name, run_dir and checkpoint.dir, which follow from NEW."""
    given = [override for override in overrides if override.partition("=")[0] in ("name", "run_dir", "checkpoint.dir")]
    if given:
        rule = f"must be left out: NEW={new} says where the branch and its checkpoints lie, and its name"
        raise UserError([f"{override} {rule}; give another NEW" for override in given])


@contextlib.contextmanager
def naming_config(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns errors about the copy of a checkpoint's config into errors about the checkpoint's own file."""
    copy = checkpoint.attached(CONFIG)
    try:
        yield
    except UserError as error:
        if copy is None:
            raise
        own = checkpoint.folder.path(CONFIG)
        raise UserError([line.replace(str(copy), own) for line in error.problems]) from None


def open_verified(run_path: Path, step: int) -> Checkpoint:
    """The run's checkpoint of this step, every hash compared. Raises UserError where it is not there, or damaged."""
    folders: dict[int | None, Folder] = {step_of(each.name): each for each in find_candidates(run_path, "RUN")[1]}
    if step not in folders:
        there = ", ".join(str(each) for each in folders) or "none"
        raise UserError([f"--step={step} must be that of a checkpoint of {run_path} ({there}); give one of those"])
    try:
        checkpoint = open_checkpoint(folders[step], verify=False)
        checkpoint.verify()
    except DamagedCheckpoint as error:
        line = f"RUN={run_path}: its checkpoint {step_name(step)} is damaged ({error}); give another --step"
        raise UserError([line]) from None
    if step == 0 and checkpoint.manifest.scalars["written_by"] is None:
        rule = "must be one that training wrote, and holds imported or averaged weights, no optimizer's states"
        raise UserError([f"--step={step} of {run_path} {rule}; begin a run with init_from={run_path} instead"])
    return checkpoint


def branched_config(
    checkpoint: Checkpoint, run_path: Path, out: Path, overrides: Sequence[str], *, lists: bool
) -> RunConfig:
    """The branch's config: that which the checkpoint was saved under, with the overrides and the paths of ``out``.

    ``lists``: the branch has a list of documents that it leaves out. Raises UserError for an override of what would
    make it another run: the model, the data, the seed, the optimizer's name.
    """
    base = checkpoint.attached(CONFIG) or run_path / CONFIG
    for override in overrides:
        if override.partition("=")[0] == "data.without":
            raise UserError([f"{override} must be given as --without: the branch gets a list of its own; do so"])
    without = f"data.without={quoted(out / WITHOUT)}" if lists else "data.without=null"
    own = [f"run_dir={quoted(out)}", f"name={quoted(out.name)}", "checkpoint.dir=null", without]
    given = load_config(base, [*overrides, *own])
    check_same_run(load_config(base), base, given, int(checkpoint.manifest.scalars["consumed"]))
    return load_checked(base, [*overrides, *own], world_size=least_ranks(given.parallel), data=False)


def quoted(text: Path | str) -> str:
    """The text in quotes, so that YAML reads it as text even if it looks like a number, a list or a comment."""
    return json.dumps(str(text), ensure_ascii=False)


def write_branch(
    out: Path, config: RunConfig, checkpoint: Checkpoint, folder: Path, lineage: Lineage, left_out: str | None
) -> None:
    """Writes the run directory ``out``, completely or not at all.

    ``left_out`` is the content of its list of documents that it never sees, if any. Raises UserError where the
    checkpoint is deleted or changed while it is copied.
    """
    with new_folder(out) as partial:
        (partial / CONFIG).write_text(dump_config(config))
        (partial / STARTED_IN).write_bytes(record_folder(folder))
        write_lineage(partial, lineage)
        write_newest(partial, step_name(lineage.step), str(out / CHECKPOINTS))
        if left_out is not None:
            (partial / WITHOUT).write_text(left_out, encoding="utf-8")
        target = partial / CHECKPOINTS / step_name(lineage.step)
        target.mkdir(parents=True)
        copy_checkpoint(checkpoint, LocalFolder(target))
        sync_directory(target)


def copy_checkpoint(checkpoint: Checkpoint, target: LocalFolder) -> None:
    """Copies a verified checkpoint. Raises UserError where it changes, or a live run deletes it, while it is copied."""
    hashes = {file: expected["xxh3_128"] for file, expected in checkpoint.manifest.files.items()}
    try:
        for file in (*hashes, MANIFEST):
            copied = copy_file(checkpoint.folder, file, target)
            if copied != hashes.get(file, copied):
                raise DamagedCheckpoint(hash_problem(checkpoint.folder, file))
        if read_manifest(target) != checkpoint.manifest:
            raise DamagedCheckpoint(f"{checkpoint.folder.path(MANIFEST)} is another one")
    except (FileNotFoundError, DamagedCheckpoint) as error:
        reason = f"{error.filename} is gone" if isinstance(error, FileNotFoundError) else error
        rule = f"must stay until it is copied, and was deleted or changed meanwhile ({reason})"
        remedy = "give a --step that the run keeps (checkpoint.keep_last, checkpoint.keep_every_steps)"
        raise UserError([f"--step={checkpoint.step} {rule}; {remedy}"]) from None


def copy_file(source: Folder, file: str, target: LocalFolder) -> str:
    """Copies one file between checkpoints' folders, piece by piece, and forces it to disk; returns its xxh3_128."""
    digest, view = xxhash.xxh3_128(), memoryview(bytearray(HASH_CHUNK))
    with source.open(file) as content, target.create(file) as out:
        while got := content.readinto(view):
            digest.update(view[:got])
            out.write(view[:got])
    return digest.hexdigest()
