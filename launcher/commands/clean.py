"""`roundtable runs --clean`: token files and tokenizers that no run needs, and what interrupted work left.

A folder is removed only if it is certain to be Roundtable's, old and unneeded:

- It lies in a token_dir below the current folder: one that lies elsewhere may be shared by runs that are not seen here.
- It is no link, belongs to this user, and holds what `prepare` writes.
- No run in the given folders, at any depth, has a saved config that uses it or names a path in it, and all of these
  configs can be read.
- It has not changed for a day: `prepare` may be at work in it, or its run is still to be started.
- No process on this machine has one of its files open.

Runs in other folders are known only if they are named, so the list is shown and confirmed first.
"""

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from data.cleaning.groups import groups_of
from data.cleaning.inputs import other_files
from data.cleaning.kept import SETTINGS
from data.config import DataConfig
from data.errors import DataError
from data.files import RECURSIVE
from data.manifest import INPUTS, MANIFEST
from data.partial import partial_suffix
from data.prepared import readable_stem, source_folder
from data.sources import HUGGING_FACE, expand_path, is_raw
from data.tokenfile import bin_path
from data.tokenizer import INFO, tokenizer_folder
from launcher.commands.runs import RUNS_DIR, run_paths, running_where, tree_size
from launcher.config.tree import RunConfig
from launcher.console import in_a_line, say, tell
from launcher.errors import UserError
from launcher.tables import size_text
from launcher.training.run_dir import saved_config, start_folder
from launcher.training.run_parts import CHECKPOINTS, LOCK

OLD_SECONDS = 86400
HASH_LETTERS = 16
TOKENIZER = "tokenizer-"


@dataclass(frozen=True)
class Leftover:
    """A folder that no run needs: its path, what it is in words, and its size on disk in bytes."""

    path: Path
    what: str
    bytes: int


def clean(directories: list[str], *, yes: bool) -> int:
    """Lists what no run needs, asks, and removes it; returns 0, or 1 where the user does not agree.

    ``yes``: removes without asking. Raises UserError where a run's config cannot be read, since what that run needs is
    then unknown.
    """
    found, untouched = find_leftovers(directories)
    for line in untouched:
        say(f"skipped: {in_a_line(line)}")
    if not found:
        say("nothing to remove")
        return 0
    for leftover in found:
        say(f"{size_text(leftover.bytes):>10}  {in_a_line(str(leftover.path))}  ({leftover.what})")
    total = size_text(sum(leftover.bytes for leftover in found))
    say(f"No run in {' or '.join(directories or [RUNS_DIR])} needs these. Runs elsewhere were not looked at.")
    if not yes and not _ask(f"Remove them, {total} in all? [y/N] "):
        return 1
    still = {leftover.path for leftover in find_leftovers(directories)[0]}  # a run may have been started meanwhile
    removed = [leftover for leftover in found if leftover.path in still and _remove(leftover.path)]
    say(f"removed {len(removed)} of {len(found)}, {size_text(sum(leftover.bytes for leftover in removed))}")
    return 0


def _ask(question: str) -> bool:
    if not sys.stdin.isatty():
        say("nothing was removed: there is no terminal to ask on; --yes removes without asking")
        return False
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def find_leftovers(directories: Sequence[str]) -> tuple[list[Leftover], list[str]]:
    """What can be removed, and a line for each token_dir that was left alone, with the reason."""
    runs = [path for directory in directories or [RUNS_DIR] for path in run_paths(directory, deep=True)]
    configs = read_configs(runs)
    named = named_paths(configs)
    found: list[Leftover] = []
    untouched: list[str] = []
    own = [config for run, config in configs.items() if _starts_here(run, config)]
    others = {
        (start_folder(run, config) / config.data.token_dir).resolve(): run
        for run, config in configs.items()
        if config not in own
    }
    token_dirs = {DataConfig().token_dir, *(config.data.token_dir for config in configs.values())}
    for token_dir in sorted(token_dirs):
        reason = why_not_judged(Path(token_dir))
        if reason is None and (other := others.get(Path(token_dir).resolve())) is not None:
            reason = f"is also that of {other}, whose paths are read from another folder; go there"
        if reason is None:
            found += token_leftovers(Path(token_dir), own, named)
        elif os.path.lexists(token_dir):
            untouched.append(f"data.token_dir={token_dir} {reason}")
    for run in runs:
        found += run_leftovers(run)
    for folder in sorted({*map(Path, directories or [RUNS_DIR]), *(run.parent for run in runs)}):
        found += folder_leftovers(folder)
    return found, untouched


def _starts_here(run: Path, config: RunConfig) -> bool:
    """Whether the config's relative paths are read from the current folder."""
    return start_folder(run, config).resolve() == Path.cwd().resolve()


def named_paths(configs: Mapping[Path, RunConfig]) -> set[Path]:
    """The files and folders that the saved configs name in their data sections, links followed.

    For a prefix of token files both the prefix and the target of its .bin are given; for a glob the pattern.
    """
    found: set[Path] = set()
    for run, config in configs.items():
        data, start = config.data, start_folder(run, config)
        names = [source.path.removeprefix(HUGGING_FACE) for source in data.sources]
        names += [name for name in (data.heldout_path, data.tokenizer, data.without) if name is not None]
        if data.cleaning is not None:
            names += map(str, other_files(data.cleaning).values())
        paths = [start / expand_path(name) for name in names]
        found |= {path.resolve() for each in paths for path in (each, bin_path(each))}
    return found


def read_configs(runs: Sequence[Path]) -> dict[Path, RunConfig]:
    """The runs' saved configs. Raises UserError with a line for each that is damaged or missing."""
    configs: dict[Path, RunConfig] = {}
    problems = []
    for run in runs:
        try:
            config = saved_config(run)
        except (UserError, OSError, ValueError) as error:
            reason = error.problems[0] if isinstance(error, UserError) else str(error)
            problems.append(f"{run} must have a config that can be read, to know which tokens it needs: {reason}")
            continue
        if config is None:
            problems.append(
                f"{run} must have a config.yaml, to know which tokens it needs; put it back, or move the run"
            )
        else:
            configs[run] = config
    if problems:
        raise UserError(problems)
    return configs


def why_not_judged(token_dir: Path) -> str | None:
    """Why nothing in the folder may be removed from here; None where it may."""
    here, real = Path.cwd().resolve(), token_dir.resolve()
    if not real.is_dir():
        return "is not there"
    if not real.is_relative_to(here) or real == here:
        return "lies outside of the current folder, so runs elsewhere may use it"
    if real.stat().st_uid != os.geteuid():
        return "belongs to another user"
    return None


def token_leftovers(token_dir: Path, configs: Sequence[RunConfig], named: Collection[Path]) -> Iterator[Leftover]:
    """Sources' folders, tokenizers and partial folders in one token_dir that no config uses or names a path in."""
    needed, stems = needed_folders(token_dir, configs)
    in_use = open_files()
    sources_stay = False
    tokenizers = []
    for path in sorted(token_dir.iterdir()):
        kind = kind_of(path)
        if kind is None:
            continue
        is_needed = path.name in needed or path.name[: -HASH_LETTERS - 1] in stems or is_named(path, named)
        if kind == "tokenizer" and not is_needed:
            tokenizers.append(path)
        elif is_needed or not is_old(path) or is_open(path, in_use):
            sources_stay = sources_stay or (kind == "token files" and not is_needed)
        else:
            yield Leftover(path, kind, tree_size(path)[0])
    if not sources_stay:  # unneeded token files that stay were made with one of these tokenizers
        for path in tokenizers:
            if is_old(path) and not is_open(path, in_use):
                yield Leftover(path, "tokenizer", tree_size(path)[0])


def needed_folders(token_dir: Path, configs: Sequence[RunConfig]) -> tuple[set[str], set[str]]:
    """The names of the token_dir's folders that the configs use, and beginnings of names that cannot be known fully."""
    needed: set[str] = set()
    stems: set[str] = set()
    for config in configs:
        if Path(config.data.token_dir).resolve() != token_dir.resolve():
            continue
        data = config.data
        needed |= {group.folder.name for group in groups_of(data)}
        tokenizer = tokenizer_folder(data, config.model.vocab_size)
        if tokenizer is not None:
            needed.add(tokenizer.name)
        if data.tokenizer is not None:  # its folder may have changed or gone since: then its copy has another name
            stems.add(f"{TOKENIZER}{Path(data.tokenizer).name[:50] or 'local'}")
        for source in data.sources:
            if not is_raw(source):
                continue
            try:
                assert tokenizer is not None
                needed.add(source_folder(data, source, tokenizer).name)
            except DataError:  # no tokenizer to know the name by
                stems.add(readable_stem(source.path))
    return needed, stems


def is_named(path: Path, named: Collection[Path]) -> bool:
    """Whether one of the paths, which may be globs, is the folder or lies in it."""
    return any(may_lead_to(path.resolve().parts, each.parts) for each in named)


def may_lead_to(folder: Sequence[str], named: Sequence[str]) -> bool:
    """Whether a path, which may be a glob, is the folder or may lie in it; each as its parts."""
    for part, wanted in zip(folder, named, strict=False):
        if wanted == RECURSIVE:
            return True
        if part != wanted and not fnmatchcase(part, wanted):
            return False
    return len(named) >= len(folder)


def kind_of(path: Path) -> str | None:
    """What a folder in a token_dir is, in words; None for a link, another user's, and what Roundtable does not make."""
    if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
        return None
    name, partial, process = path.name.partition(".partial-")
    if partial:
        return "partial, its process has ended" if _was_ours(process) else None
    digest = name[-HASH_LETTERS:]
    if len(name) <= HASH_LETTERS or name[-HASH_LETTERS - 1] != "-" or not set(digest) <= set("0123456789abcdef"):
        return None
    if name.startswith(TOKENIZER):
        return "tokenizer" if (path / INFO).is_file() else None
    if (path / SETTINGS).is_file():
        return "cleaned texts"
    return "token files" if (path / MANIFEST).is_file() or (path / INPUTS).is_file() else None


def _was_ours(process: str) -> bool:
    """Whether NODE-PID names a process of this machine that has ended."""
    node, _, pid = process.rpartition("-")
    return node == os.uname().nodename and pid.isdigit() and not Path(f"/proc/{pid}").exists()


def is_old(path: Path) -> bool:
    """Whether the folder, and all in it, have not changed for a day."""
    newest = max(tree_size(path)[1], path.stat().st_mtime)
    return time.time() - newest > OLD_SECONDS


def open_files() -> set[str]:
    """The files that this user's processes on this machine have open or mapped."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.update(line.split(maxsplit=5)[5] for line in _maps(process) if line.count(" /"))
        with contextlib.suppress(OSError):
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(handle))
    return found


def _maps(process: Path) -> list[str]:
    return [line for line in (process / "maps").read_text(errors="replace").splitlines() if len(line.split()) > 5]


def is_open(path: Path, files: set[str]) -> bool:
    """Whether one of the files lies in the folder."""
    below = f"{path.resolve()}/"
    return any(file.startswith(below) for file in files)


def run_leftovers(run: Path) -> Iterator[Leftover]:
    """Partial checkpoints of interrupted saves in the run directory; none while a process trains there."""
    folder = run / CHECKPOINTS
    if running_where(run) is not None or folder.is_symlink() or not folder.is_dir():
        return
    for path in sorted(folder.glob(".step-*.partial")):
        if path.is_dir() and not path.is_symlink() and is_old(path):
            yield Leftover(path, "of an interrupted save", tree_size(path)[0])


def folder_leftovers(folder: Path) -> Iterator[Leftover]:
    """Partial folders that an interrupted import, export, average or branch has left beside runs."""
    for path in sorted(folder.glob(".*.partial-*")):
        if kind_of(path) is not None and is_old(path):
            yield Leftover(path, "of an interrupted import, export, average or branch", tree_size(path)[0])


def _remove(path: Path) -> bool:
    """Renames the folder and deletes it, so that it is never seen half deleted; False where that is not possible."""
    with _lock_of_run(path) as is_free:
        if not is_free:
            return False
        hidden = path if path.name.endswith(".partial") else path.with_name(f"{path.name}.{partial_suffix()}")
        try:
            path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            tell(f"{path} cannot be removed ({error.strerror or error})")
            return False
    return True


@contextlib.contextmanager
def _lock_of_run(path: Path) -> Iterator[bool]:
    """Locks the run that a checkpoint's folder lies in, until the block ends, and yields whether that was possible.

    Yields True without locking where the folder is not a run's checkpoint, or the run has no lock file.
    """
    lock = path.parent.parent / LOCK
    if path.parent.name != CHECKPOINTS or not lock.is_file():
        yield True
        return
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
