"""Records of the files that cleaning reads, to detect cleaned texts or tokens that were made from other files."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from data.cleaning.config import CleaningConfig
from data.cleaning.groups import Group, groups_of
from data.config import DataConfig
from data.errors import DataError, problem, refuse
from data.hub import corpus_files, is_on_hub
from data.manifest import CLEANED_FROM, INPUTS, hash_file, write_json
from data.shards import Plan
from data.sources import expand_path

Record = tuple[str, str | None]  # (key that names a file or corpus, its hash or None if it is gone)


def inputs_of(cleaning: CleaningConfig, sources: Mapping[int, Plan]) -> dict[str, Any]:
    """Key -> record of its files that shows a change: names and sizes of a corpus's files, the hash of another file."""
    found: dict[str, Any] = {}
    for each in sources.values():
        found[f"{each.key}.path={each.source.path!r}"] = [asdict(file) for file in each.files]
    return found | {key: hash_file(path) for key, path in other_files(cleaning).items()}


def other_files(cleaning: CleaningConfig) -> dict[str, Path]:
    """Key -> path of each file that the cleaning stages read besides the corpus."""
    names = cleaning.decontaminate.files if cleaning.decontaminate is not None else ()
    files = {f"data.cleaning.decontaminate.files={name!r}": Path(expand_path(name)) for name in names}
    if cleaning.language is not None:
        path = cleaning.language.model
        files[f"data.cleaning.language.model={path!r}"] = Path(expand_path(path))
    return files


def check_unchanged(folder: Path, found: Mapping[str, Any]) -> None:
    """Raises DataError where the records ``found`` differ from those with which cleaning into ``folder`` began."""
    path, remedy = folder / INPUTS, f"remove {folder} and prepare again"
    try:
        recorded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise refuse(str(path), f"is damaged ({error})", remedy) from error
    for key, value in found.items():
        if recorded.get(key) != value:
            raise refuse(key, f"is not what {folder} was cleaned with", remedy)


def write_cleaned_from(folder: Path, cleaned: Path) -> None:
    """Records in a new token folder the files from which its cleaned texts, in the folder ``cleaned``, were made."""
    write_json(folder / CLEANED_FROM, dict(_records_of(cleaned / INPUTS)))


def check_cleaned(config: DataConfig, folders: Mapping[int, Path]) -> None:
    """Raises DataError, with a line for each group, where cleaned texts or tokens come from files that have changed.

    ``folders`` are the sources' token folders, by their places in data.sources. Those of a group are also compared with
    each other, since copies are removed over all its sources. Files that are gone are accepted. A token folder without
    a record, from an older version, counts as made from the cleaned texts that exist.
    """
    problems = []
    for group in groups_of(config):
        notes = {group.folder: group.folder / INPUTS}
        for folder in (folders[number] for number in group.numbers if number in folders):
            has_no_note = folder.is_dir() and not (folder / CLEANED_FROM).exists()
            notes[folder] = group.folder / INPUTS if has_no_note else folder / CLEANED_FROM
        found = {folder: _records_of(path) for folder, path in notes.items() if path.is_file()}
        problems += _changes(found, _inputs_now(config, group)) if found else []
    if problems:
        raise DataError(*problems)


def _changes(found: Mapping[Path, list[Record]], now: list[Record]) -> list[str]:
    """One line that names the folders made from other files than those present now; none where all match."""
    changed: dict[Path, str] = {}
    for place, (key, present) in enumerate(now):
        hashes = {folder: records[place][1] for folder, records in found.items() if place < len(records)}
        known = {each for each in (present, *hashes.values()) if each is not None}
        if len(known) > 1:
            stale = [folder for folder, each in hashes.items() if each is not None and each != present]
            changed = dict.fromkeys(stale, key) | changed
    if not changed:
        return []
    first, key = next(iter(changed.items()))
    names = ", ".join(map(str, changed))
    return [problem(key, f"is not what {first} was cleaned with", f"remove {names} and prepare again")]


def _inputs_now(config: DataConfig, group: Group) -> list[Record]:
    """The records of the files as they are now, in the order of ``inputs_of``."""
    assert config.cleaning is not None
    found: list[Record] = []
    for number in group.numbers:
        source, key = config.sources[number], f"data.sources[{number}]"
        try:
            files = [] if is_on_hub(source) else corpus_files(source, key)
        except DataError:
            files = []
        found.append((f"{key}.path={source.path!r}", _hash_of([asdict(file) for file in files])))
    for key, path in other_files(config.cleaning).items():
        found.append((key, hash_file(path) if path.is_file() else None))
    return found


def _records_of(path: Path) -> list[Record]:
    """The records in an inputs.json of cleaned texts, or in a token folder. Raises DataError where it is damaged."""
    try:
        return [(key, _hash_of(value)) for key, value in dict(json.loads(path.read_text())).items()]
    except (OSError, ValueError, TypeError) as error:
        raise refuse(str(path), f"is damaged ({error})", f"remove {path.parent} and prepare again") from error


def _hash_of(value: list[Any] | str | None) -> str | None:
    """The hash of a corpus's list of files; a hash comes back as it is; None for an empty list."""
    if isinstance(value, list):
        return xxhash.xxh3_128_hexdigest(json.dumps(value).encode()) if value else None
    return value
