"""Records that identify a run's token files without reading them whole, so that 10 TB cost no more than their list."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from data.config import DataConfig
from data.errors import refuse
from data.manifest import FileRecord
from data.prepared import Prepared
from data.remote_index import token_prefix
from data.sources import is_url
from data.tokenfile import bin_path, idx_path, is_token_file, mask_path, sampled_hash

Record = dict[str, object]  # of one token file: the bytes of its .bin, and a hash of .bin, .idx and .mask
OLD_ONES = "put the old files back, or the text that they were prepared from"
OTHER_RUN = "or train on the new ones in another run (another name, or `roundtable branch`)"


@dataclass(frozen=True)
class Recorded:
    """The records of the token files of one config key, by the files' names in ``folder``."""

    key: str
    path: str  # the key's value
    folder: Path
    files: dict[str, Record]


def records_of_files(config: DataConfig, prepared: Prepared) -> dict[str, dict[str, Record]]:
    """Config key -> token file's name -> record that identifies the file, for each source and data.heldout_path.

    The records of files prepared here come from their manifest; those of other files have hashes of samples of them.
    Files at URLs are left out, since ``data.remote_index`` records what their stores report.
    """
    return {each.key: each.files for each in _recorded(config, prepared)}


def check_files(config: DataConfig, prepared: Prepared, before: Mapping[str, Mapping[str, Record]], kept: Path) -> None:
    """Raises DataError where a token file differs from its record ``before``; ``kept`` is the path of the record."""
    for now in _recorded(config, prepared):
        old = before.get(now.key, now.files)
        for name in {**old, **now.files}:
            if old.get(name) != now.files.get(name):
                how = _how(old.get(name), now.files.get(name))
                rule = f"is not the one that the run began with ({how}; see {kept})"
                found = f"{now.key}.path={now.path!r}" if now.key.endswith("]") else f"{now.key}={now.path!r}"
                raise refuse(f"{found}: {bin_path(now.folder / name)}", rule, f"{OLD_ONES}, {OTHER_RUN}")


def _recorded(config: DataConfig, prepared: Prepared) -> Iterator[Recorded]:
    for number, part in enumerate(prepared.sources):
        key, path = f"data.sources[{number}]", part.source.path
        if part.manifest is not None:
            yield Recorded(key, path, part.path, {each.name: _of_manifest(each) for each in part.manifest.files()})
        elif not is_url(path):
            yield Recorded(key, path, part.path.parent, {part.path.name: _of_samples(part.path)})
    path = config.heldout_path
    if path is not None and not is_url(path) and is_token_file(prefix := token_prefix(config, path)):
        yield Recorded("data.heldout_path", path, prefix.parent, {prefix.name: _of_samples(prefix)})


def _of_manifest(file: FileRecord) -> Record:
    found: Record = {"bin_bytes": file.bin_bytes, "bin": file.bin_xxh3, "idx": file.idx_xxh3}
    return found if file.mask_xxh3 is None else {**found, "mask": file.mask_xxh3}


def _of_samples(prefix: Path) -> Record:
    paths = {"bin": bin_path(prefix), "idx": idx_path(prefix), "mask": mask_path(prefix)}
    hashes = {end: f"{sampled_hash(path):016x}" for end, path in paths.items() if end != "mask" or path.exists()}
    return {"bin_bytes": bin_path(prefix).stat().st_size, **hashes}


def _how(old: Record | None, new: Record | None) -> str:
    """The difference between two records of a file, in a few words."""
    if old is None or new is None:
        return "which had none of this name" if old is None else "it is gone"
    if old.get("bin_bytes") != new.get("bin_bytes"):
        return f"its .bin had {old.get('bin_bytes')} bytes and has {new.get('bin_bytes')}"
    return "another " + " and ".join(f".{end}" for end in ("bin", "idx", "mask") if old.get(end) != new.get(end))
