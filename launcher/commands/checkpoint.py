"""`roundtable checkpoint verify` and `show`: whether checkpoints are whole, and what they hold. Nothing is changed."""

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from launcher.console import in_a_line, open_console, say, tell, text_column
from launcher.errors import UserError
from launcher.tables import loss_text, plain_table, size_text, wide_console
from launcher.training.lineage import Lineage, lineage_line, read_lineage
from launcher.training.run_dir import CHECKPOINTS, checkpoints_of, refusing_unreachable
from launcher.watch.metrics import encode_json
from parallel.checkpoint.manifest import DamagedCheckpoint, Manifest, check_sizes, is_there, read_manifest
from parallel.checkpoint.places import is_remote, list_checkpoints, open_folder, open_store
from parallel.checkpoint.retention import heldout_loss
from parallel.checkpoint.store import Folder
from parallel.checkpoint.verify import Findings, bytes_of, examine, tensor_bytes

MOST_NOTES = 5  # lines about files that are not in a manifest
STEP_NAME = re.compile(r"\.?step-\d+(\.damaged(-\d+)?|(\.[\w-]+)?\.partial)?")


@dataclass(frozen=True)
class Found:
    """The checkpoints that DIR names: one, or all of a run, oldest first, and the leftovers beside them."""

    directories: list[Folder]
    is_run: bool
    set_aside: list[Folder]  # damaged ones that a run has renamed
    partial: list[Folder]  # what an interrupted save left


def find(path: str) -> Found:
    """The checkpoints at a path or URL; raises UserError where it is neither a checkpoint nor a run that has one."""
    if not is_remote(path) and not os.path.isdir(path):
        raise UserError([f"DIR={path} is not a folder; give a run directory, or one of its {CHECKPOINTS}/step-N"])
    with refusing_unreachable("DIR", path):
        folder = open_folder(path if is_remote(path) else Path(path).absolute())
        if STEP_NAME.fullmatch(folder.name) or is_there(folder):
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
    if found.is_run:
        wrong = [directory for directory, findings in results.items() if findings.problems]
        results = without_deleted(path, results, wrong)
    is_whole = not any(findings.problems for findings in results.values())
    if as_json:
        rows = [
            {
                "checkpoint": str(each),
                "whole": not findings.problems,
                "problems": findings.problems,
                "unlisted": findings.unlisted,
            }
            for each, findings in results.items()
        ]
        say(encode_json({"whole": is_whole, "checkpoints": rows}))
    else:
        for directory, findings in results.items():
            for line in _told(directory, findings):
                say(line)
        for directory in found.set_aside:
            say(f"{directory}: set aside as damaged by the run; not checked")
    return 0 if is_whole else 1


def without_deleted(path: str, results: dict[Folder, Any], wrong: list[Folder]) -> dict[Folder, Any]:
    """The results without ``wrong`` checkpoints that a training run has deleted meanwhile, each named on stderr.

    Raises UserError where no result is left.
    """
    there = {folder.name for folder in list_checkpoints(checkpoints_of(path))} if wrong else set()
    deleted = [folder for folder in wrong if folder.name not in there]
    for folder in deleted:
        tell(f"{folder.location} was deleted while it was looked at; left out")
    if len(deleted) == len(results):
        raise UserError([f"DIR={path} must keep a checkpoint while it is looked at, and has deleted all; try again"])
    return {folder: result for folder, result in results.items() if folder not in deleted}


def _told(directory: Folder, findings: Findings) -> Iterator[str]:
    """Lines on one checkpoint: the verdict, then each problem, then files that are not in the manifest."""
    manifest = findings.manifest
    if findings.problems or manifest is None:
        yield f"{directory}: DAMAGED"
    else:
        size = size_text(bytes_of(manifest))
        yield f"{directory}: intact (step {manifest.step}, {len(manifest.files)} files, {size})"
    yield from (f"  {line}" for line in findings.problems)
    for file in findings.unlisted[:MOST_NOTES]:
        yield f"  note: {directory.path(file)} is not in the manifest, and nothing reads it"
    if len(findings.unlisted) > MOST_NOTES:
        yield f"  note: {len(findings.unlisted) - MOST_NOTES} more files are not in the manifest either"


def _check_all(directories: list[Folder]) -> list[Findings]:
    """The findings on each checkpoint; shows a bar over their bytes on a terminal, else a line for each."""
    console = open_console(stderr=True)
    if not console.is_terminal:
        results = []
        for number, directory in enumerate(directories, 1):
            if len(directories) > 1:
                tell(f"checking {directory.name} ({number} of {len(directories)})")
            results.append(examine(directory))
        return results
    columns = (text_column("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("checking", total=sum(map(_bytes_to_read, directories)))
        results = []
        for directory in directories:
            progress.update(task, description=f"checking {directory.name}")
            results.append(examine(directory, lambda count: progress.advance(task, count)))
    return results


def _bytes_to_read(directory: Folder) -> int:
    try:
        return bytes_of(read_manifest(directory))
    except DamagedCheckpoint:
        return 0


def show(path: str, *, as_json: bool) -> int:
    """Prints what a checkpoint holds, or a run's list of checkpoints. Returns 0; 1 where the manifest is damaged."""
    found = find(path)
    if found.is_run:
        _show_run(path, found, None if is_remote(path) else read_lineage(Path(path)), as_json)
        return 0
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        tell(f"{path} is damaged: {error}")
        return 1
    if as_json:
        say(encode_json(describe(path, manifest)))
    else:
        _show_one(path, manifest)
    return 0


def describe(path: str, manifest: Manifest) -> dict[str, Any]:
    """The contents of one checkpoint as ``show --json`` prints them."""
    kinds_of: dict[str, list[str]] = {name: [] for name in manifest.tensors}
    pieces_of = dict.fromkeys(manifest.tensors, 0)
    for kind, names in manifest.kinds.items():
        for name in names:
            kinds_of[name].append(kind)
    for piece in manifest.pieces:
        pieces_of[piece.name] += 1
    for cut in manifest.cuts:
        pieces_of[cut.name] += len(cut.kinds) * sum(count for count, *_ in cut.runs)
    return {
        "checkpoint": str(path),
        "step": manifest.step,
        "tokens": manifest.scalars["tokens"],
        "samples": manifest.scalars["consumed"],
        "eval_loss": heldout_loss(manifest),
        "written_by": manifest.scalars["written_by"],
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
    console = wide_console()
    console.print(path, soft_wrap=True)
    console.print(f"step {about['step']}, {about['samples']:,} samples and {about['tokens']:,} tokens seen")
    if about["eval_loss"] is not None:
        console.print(f"held-out loss {loss_text(about['eval_loss'])}")
    if about["written_by"] is not None:
        console.print(f"written by {_layout_words(about['written_by'])}")
    console.print(f"{size_text(about['bytes'])} in {len(about['files'])} files\n")
    kinds = plain_table("kind", ">tensors", ">size")
    for kind, amount in about["kinds"].items():
        kinds.add_row(kind, str(amount["tensors"]), size_text(amount["bytes"]))
    console.print(kinds, "")
    tensors = plain_table("tensor", "shape", ">elements", "kinds", ">pieces")
    for name, tensor in about["tensors"].items():
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        kind_words = ", ".join(tensor["kinds"])
        tensors.add_row(name, shape, f"{prod(tensor['shape']):,}", kind_words, str(tensor["pieces"]))
    console.print(tensors, "")
    files = plain_table("file", ">size")
    for file, size in about["files"].items():
        files.add_row(file, size_text(size))
    console.print(files)


def _show_run(path: str, found: Found, lineage: Lineage | None, as_json: bool) -> None:
    results = {directory: _run_row(directory) for directory in found.directories}
    wrong = [directory for directory, row in results.items() if not row["looks_whole"]]
    results = without_deleted(path, results, wrong)
    rows = list(results.values())
    if as_json:
        beside = {"set_aside": list(map(str, found.set_aside)), "partial": list(map(str, found.partial))}
        beside |= {} if lineage is None else {"branched_from": asdict(lineage)}
        say(encode_json({"checkpoints": rows, **beside}))
        return
    if lineage is not None:
        say(in_a_line(lineage_line(lineage)))
    console = wide_console()
    table = plain_table("checkpoint", "state", ">tokens", ">held-out loss", ">size", "written by")
    for directory, row in results.items():
        loss = "" if row["eval_loss"] is None else loss_text(row["eval_loss"])
        tokens = "" if row["tokens"] is None else f"{row['tokens']:,}"
        size = "" if row["bytes"] is None else size_text(row["bytes"])
        words = "" if row["written_by"] is None else _layout_words(row["written_by"])
        table.add_row(directory.name, "intact" if row["looks_whole"] else "DAMAGED", tokens, loss, size, words)
    for directory in found.set_aside:
        table.add_row(directory.name, "set aside as damaged")
    for directory in found.partial:
        table.add_row(directory.name, "left by an interrupted save, or being written")
    console.print(table)
    told = "intact: the manifest is valid, and each file has its listed size"
    console.print(f"\n{told}; `roundtable checkpoint verify` reads every byte")


def _run_row(directory: Folder) -> dict[str, Any]:
    try:
        manifest: Manifest | None = read_manifest(directory)
    except DamagedCheckpoint:
        manifest = None
    scalars = manifest.scalars if manifest is not None else {}
    return {
        "checkpoint": str(directory),
        "looks_whole": manifest is not None and not check_sizes(manifest, directory, manifest.files),
        "step": manifest.step if manifest is not None else None,
        "tokens": scalars.get("tokens"),
        "eval_loss": heldout_loss(manifest) if manifest is not None else None,
        "bytes": bytes_of(manifest) if manifest is not None else None,
        "written_by": scalars.get("written_by"),
    }


def _layout_words(layout: dict[str, Any]) -> str:
    degrees = [f"{axis} {layout[axis]}" for axis in ("pp", "dp", "cp", "tp", "ep") if layout[axis] > 1]
    ranks = f"{layout['ranks']} process{'es' if layout['ranks'] > 1 else ''}"
    return ", ".join([ranks, *degrees, f"ZeRO {layout['zero']}", layout["precision"]])
