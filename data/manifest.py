"""The JSON files that preparation writes besides tokens: a record for each shard, and at last a manifest.

A folder without a manifest is unfinished. All JSON is written under a temporary name, synced and renamed, so that a
half-written file never appears under its own name.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from data.errors import problem, refuse
from data.partial import written_whole
from data.tokenfile import bin_path, idx_path, mask_path

FORMAT = 1  # version of the folder, increased when the same input would give other bytes
MASKED_FORMAT = 2  # version of a folder with masks of targets, so that readers which know no masks refuse it
MANIFEST = "manifest.json"
INPUTS = "inputs.json"
CLEANED_FROM = "cleaned_from.json"
# fields left out where they are null: those on masks and on cleaning
ABSENT = ("n_targets", "mask_bytes", "mask_xxh3", "cleaning")


@dataclass(frozen=True)
class FileRecord:
    """One token file: its name within the folder (without .bin and .idx), its content's counts, sizes and hashes."""

    name: str
    n_tokens: int
    n_documents: int
    largest_id: int
    bin_bytes: int
    idx_bytes: int
    bin_xxh3: str
    idx_xxh3: str
    n_targets: int | None = None  # tokens that are targets; None: all of them, and there is no mask
    mask_bytes: int | None = None
    mask_xxh3: str | None = None

    def halves(self, folder: Path) -> Iterator[tuple[Path, int, str]]:
        """(path, bytes, xxh3) of each of its files."""
        yield bin_path(folder / self.name), self.bin_bytes, self.bin_xxh3
        yield idx_path(folder / self.name), self.idx_bytes, self.idx_xxh3
        if self.mask_bytes is not None and self.mask_xxh3 is not None:
            yield mask_path(folder / self.name), self.mask_bytes, self.mask_xxh3


@dataclass(frozen=True)
class SourceManifest:
    """The manifest of a prepared source. ``train`` and ``heldout`` list its token files in order."""

    format: int
    inputs_xxh3: str  # of inputs.json: the corpus's files and sizes
    largest_id: int
    train: tuple[FileRecord, ...]
    heldout: tuple[FileRecord, ...]
    # if the corpus was cleaned: counts of documents read, kept, dropped by reason and changed by stage, and the folder
    cleaning: dict[str, Any] | None = None

    def files(self) -> tuple[FileRecord, ...]:
        """Every token file, training ones first."""
        return self.train + self.heldout


def as_tree(record: Any) -> dict[str, Any]:
    """A manifest or a record of files as a dict for JSON, in which null fields of ABSENT are left out."""
    return asdict(record, dict_factory=_without_absent)


def _without_absent(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None or name not in ABSENT}


def write_json(path: Path, tree: Any) -> None:
    """Writes the tree as JSON, atomically and durably."""
    with written_whole(path) as file:
        file.write(json.dumps(tree, indent=1).encode() + b"\n")


def remove_abandoned(folder: Path) -> None:
    """Deletes partial files and folders in ``folder`` left by processes of this machine that no longer live."""
    for partial in folder.glob("*.partial-*"):
        node, _, pid = partial.name.partition(".partial-")[2].rpartition("-")
        if node == os.uname().nodename and not Path(f"/proc/{pid}").exists():
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink(missing_ok=True)


def write_source_manifest(folder: Path, manifest: SourceManifest) -> None:
    """Writes the folder's manifest, the last step of preparing a source."""
    write_json(folder / MANIFEST, as_tree(manifest))


def read_source_manifest(folder: Path) -> SourceManifest | None:
    """The folder's manifest, or None where preparation has not finished. Raises DataError where it is damaged."""
    path = folder / MANIFEST
    try:
        tree = json.loads(path.read_text())
        train, heldout = (tuple(FileRecord(**record) for record in tree.pop(key)) for key in ("train", "heldout"))
        manifest = SourceManifest(train=train, heldout=heldout, **tree)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise refuse(str(path), f"is damaged ({error})", f"remove {folder} and prepare again") from error
    if manifest.format not in (FORMAT, MASKED_FORMAT):
        found = f"{path}: format {manifest.format}"
        raise refuse(found, f"is not this version's, {FORMAT}", f"remove {folder} and prepare again")
    return manifest


def size_problems(folder: Path, manifest: SourceManifest) -> list[str]:
    """One line for each token file that is missing or whose size is not the recorded one. Reads no contents."""
    found = []
    for record in manifest.files():
        for path, expected, _ in record.halves(folder):
            size = path.stat().st_size if path.is_file() else None
            if size != expected:
                is_what = "is missing" if size is None else f"has {size} bytes"
                found.append(_changed(path, is_what, f"the manifest records {expected} bytes", folder))
    return found


def hash_problems(folder: Path, manifest: SourceManifest) -> list[str]:
    """One line for each token file whose bytes do not hash to what was recorded. Reads everything."""
    found = size_problems(folder, manifest)
    if found:
        return found
    for record in manifest.files():
        for path, _, expected in record.halves(folder):
            actual = hash_file(path)
            if actual != expected:
                found.append(_changed(path, f"hashes to {actual}", f"the manifest records {expected}", folder))
    return found


def hash_file(path: Path) -> str:
    """The file's xxh3 (128 bits, hexadecimal)."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _changed(path: Path, found: str, recorded: str, folder: Path) -> str:
    return problem(f"{path} {found}", f"but {recorded}", f"remove {folder} and prepare again")
