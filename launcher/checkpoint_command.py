"""`roundtable checkpoint verify` and `show`: whether checkpoints are whole, and what they hold. Nothing is changed."""

import json
import re
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from launcher.errors import UserError
from launcher.run_dir import CHECKPOINTS, checkpoints_of
from parallel.checkpoint.folder import MANIFEST, Folder, is_remote, open_folder, open_store
from parallel.checkpoint.manifest import DamagedCheckpoint, Manifest, read_manifest
from parallel.checkpoint.retention import heldout_loss_of, looks_whole
from parallel.checkpoint.verify import bytes_of, problems_of, tensor_bytes
from parallel.checkpoint.write import list_checkpoints

WIDE = 1000  # columns
STEP_NAME = re.compile(r"\.?step-\d+(\.damaged(-\d+)?|(\.[\w-]+)?\.partial)?")


@dataclass(frozen=True)
class Found:
    """What DIR names: one checkpoint, or a run's, oldest first, and the leftovers beside them."""

    directories: list[Folder]
    is_run: bool
    set_aside: list[Folder]  # damaged ones that a run has renamed
    partial: list[Folder]  # what an interrupted save left


def find(path: str) -> Found:
    """The checkpoints that a path or URL names; raises UserError where it names neither one nor a run with one."""
    if not is_remote(path) and not Path(path).is_dir():
        raise UserError([f"DIR={path} is not a folder; give a run directory, or one of its {CHECKPOINTS}/step-N"])
    folder = open_folder(path if is_remote(path) else Path(path).absolute())
    if STEP_NAME.fullmatch(folder.name) or folder.size(MANIFEST) is not None:
        return Found([open_folder(path)], False, [], [])
    store = open_store(checkpoints_of(path))
    found = Found(list_checkpoints(store), True, store.set_aside_ones(), store.leftovers())
    if not found.directories:
        names = ", ".join(each.name for each in found.set_aside)
        left = f"only damaged ones ({names})" if names else "no checkpoint"
        raise UserError([f"DIR={path} holds {left}; give a run directory with {CHECKPOINTS}/step-N, or one of these"])
    return found


def verify(path: str, *, as_json: bool) -> int:
    """Re-checks the certificate and every hash; prints each damaged file. Returns 0 where all is whole, else 1."""
    found = find(path)
    results = dict(zip(found.directories, _check_all(found.directories), strict=True))
    if as_json:
        rows = [{"checkpoint": str(each), "whole": not lines, "problems": lines} for each, lines in results.items()]
        print(json.dumps({"whole": not any(results.values()), "checkpoints": rows}))
    else:
        for directory, lines in results.items():
            print(f"{directory}: {'DAMAGED' if lines else _summary(directory)}")
            for line in lines:
                print(f"  {line}")
        for directory in found.set_aside:
            print(f"{directory}: set aside as damaged by the run; not checked")
    return 1 if any(results.values()) else 0


def _check_all(directories: list[Folder]) -> list[list[str]]:
    """The problems of each; a bar over their bytes on a terminal, a line for each checkpoint elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        results = []
        for number, directory in enumerate(directories, 1):
            if len(directories) > 1:
                print(f"checking {directory.name} ({number} of {len(directories)})", file=sys.stderr, flush=True)
            results.append(problems_of(directory))
        return results
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking", total=sum(map(_bytes_to_read, directories)))
        results = []
        for directory in directories:
            progress.update(task, description=f"checking {directory.name}")
            results.append(problems_of(directory, lambda count: progress.advance(task, count)))
    return results


def _bytes_to_read(directory: Folder) -> int:
    try:
        return bytes_of(read_manifest(directory))
    except DamagedCheckpoint:
        return 0


def _summary(directory: Folder) -> str:
    manifest = read_manifest(directory)
    return f"whole (step {manifest.step}, {len(manifest.files)} files, {_size(bytes_of(manifest))})"


def show(path: str, *, as_json: bool) -> int:
    """Prints what a checkpoint holds, or a run's list of checkpoints. Returns 0; 1 where the manifest is damaged."""
    found = find(path)
    if found.is_run:
        _show_run(found, as_json)
        return 0
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        print(f"{path} is damaged: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(describe(path, manifest)))
    else:
        _show_one(path, manifest)
    return 0


def describe(path: str, manifest: Manifest) -> dict[str, Any]:
    """Everything that ``show --json`` says of one checkpoint."""
    kinds_of: dict[str, list[str]] = {name: [] for name in manifest.tensors}
    pieces_of = dict.fromkeys(manifest.tensors, 0)
    for kind, names in manifest.kinds.items():
        for name in names:
            kinds_of[name].append(kind)
    for piece in manifest.pieces:
        pieces_of[piece.name] += 1
    return {
        "checkpoint": str(path),
        "step": manifest.step,
        "tokens": manifest.scalars.get("tokens"),
        "samples": manifest.scalars.get("consumed"),
        "eval_loss": heldout_loss_of(path),
        "written_by": manifest.scalars.get("written_by"),
        "scalars": manifest.scalars,
        "bytes": bytes_of(manifest),
        "kinds": {
            kind: {"tensors": len(names), "bytes": tensor_bytes(manifest, kind)}
            for kind, names in manifest.kinds.items()
        },
        "tensors": {
            name: {"shape": shape, "kinds": kinds_of[name], "pieces": pieces_of[name]}
            for name, shape in manifest.tensors.items()
        },
        "files": {file: expected["bytes"] for file, expected in manifest.files.items()},
    }


def _show_one(path: str, manifest: Manifest) -> None:
    about = describe(path, manifest)
    console = _console()
    console.print(f"{path}", markup=False, soft_wrap=True)
    console.print(f"step {about['step']}, {about['samples']:,} samples and {about['tokens']:,} tokens seen")
    if about["eval_loss"] is not None:
        console.print(f"held-out loss {about['eval_loss']:.4f}")
    if about["written_by"] is not None:
        console.print(f"written by {_layout_words(about['written_by'])}")
    console.print(f"{_size(about['bytes'])} in {len(about['files'])} files\n")
    kinds = _table("kind", ">tensors", ">size")
    for kind, amount in about["kinds"].items():
        kinds.add_row(kind, str(amount["tensors"]), _size(amount["bytes"]))
    console.print(kinds, "")
    tensors = _table("tensor", "shape", ">elements", "kinds", ">pieces")
    for name, tensor in about["tensors"].items():
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        kind_words = ", ".join(tensor["kinds"])
        tensors.add_row(name, shape, f"{prod(tensor['shape']):,}", kind_words, str(tensor["pieces"]))
    console.print(tensors, "")
    files = _table("file", ">size")
    for file, size in about["files"].items():
        files.add_row(file, _size(size))
    console.print(files)


def _show_run(found: Found, as_json: bool) -> None:
    rows = [_run_row(directory) for directory in found.directories]
    if as_json:
        beside = {"set_aside": list(map(str, found.set_aside)), "partial": list(map(str, found.partial))}
        print(json.dumps({"checkpoints": rows, **beside}))
        return
    console = _console()
    table = _table("checkpoint", "state", ">tokens", ">held-out loss", ">size", "written by")
    for directory, row in zip(found.directories, rows, strict=True):
        loss = "" if row["eval_loss"] is None else f"{row['eval_loss']:.4f}"
        tokens = "" if row["tokens"] is None else f"{row['tokens']:,}"
        size = "" if row["bytes"] is None else _size(row["bytes"])
        words = "" if row["written_by"] is None else _layout_words(row["written_by"])
        table.add_row(directory.name, "whole" if row["looks_whole"] else "DAMAGED", tokens, loss, size, words)
    for directory in found.set_aside:
        table.add_row(directory.name, "set aside as damaged")
    for directory in found.partial:
        table.add_row(directory.name, "left by an interrupted save, or being written")
    console.print(table)
    console.print("\nwhole: the manifest and the files' sizes hold; `roundtable checkpoint verify` reads every byte")


def _run_row(directory: Folder) -> dict[str, Any]:
    try:
        manifest: Manifest | None = read_manifest(directory)
    except DamagedCheckpoint:
        manifest = None
    scalars = manifest.scalars if manifest is not None else {}
    return {
        "checkpoint": str(directory),
        "looks_whole": looks_whole(directory),
        "step": manifest.step if manifest is not None else None,
        "tokens": scalars.get("tokens"),
        "eval_loss": heldout_loss_of(directory),
        "bytes": bytes_of(manifest) if manifest is not None else None,
        "written_by": scalars.get("written_by"),
    }


def _layout_words(layout: dict[str, Any]) -> str:
    degrees = [f"{axis} {layout[axis]}" for axis in ("pp", "dp", "cp", "tp", "ep") if layout[axis] > 1]
    ranks = f"{layout['ranks']} process{'es' if layout['ranks'] > 1 else ''}"
    return ", ".join([ranks, *degrees, f"ZeRO {layout['zero']}", layout["precision"]])


def _console() -> Console:
    """Standard output; where it is no terminal, wide enough that nothing is folded or cut."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


def _table(*titles: str) -> Table:
    """A table without frames; a title that begins with ``>`` stands over a column aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        justify = "right" if title.startswith(">") else "left"
        table.add_column(title.removeprefix(">"), justify=justify, overflow="fold")
    return table


def _size(n_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} bytes"
