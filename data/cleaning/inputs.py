"""The files that cleaning reads, and whether they are still what a folder was cleaned from."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.cleaning.config import CleaningConfig
from data.cleaning.groups import groups_of
from data.config import DataConfig
from data.errors import refuse
from data.manifest import INPUTS, hash_file
from data.shards import Plan
from data.sources import expand_path


def inputs_of(cleaning: CleaningConfig, sources: Mapping[int, Plan]) -> dict[str, Any]:
    """The files behind each key, with what shows a change: a corpus's names and sizes, other files' hashes."""
    found: dict[str, Any] = {}
    for each in sources.values():
        found[f"{each.key}.path={each.source.path!r}"] = [asdict(file) for file in each.files]
    return found | {key: hash_file(path) for key, path in other_files(cleaning).items()}


def other_files(cleaning: CleaningConfig) -> dict[str, Path]:
    """The files that the stages read beside the corpus, each under its key."""
    names = cleaning.decontaminate.files if cleaning.decontaminate is not None else ()
    files = {f"data.cleaning.decontaminate.files={name!r}": Path(expand_path(name)) for name in names}
    if cleaning.language is not None:
        path = cleaning.language.model
        files[f"data.cleaning.language.model={path!r}"] = Path(expand_path(path))
    return files


def check_unchanged(folder: Path, found: Mapping[str, Any]) -> None:
    """Raises DataError where files are not those that ``folder`` was begun with."""
    path, remedy = folder / INPUTS, f"remove {folder} and prepare again"
    try:
        recorded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise refuse(str(path), f"is damaged ({error})", remedy) from error
    for key, value in found.items():
        if recorded.get(key) != value:
            raise refuse(key, f"is not what {folder} was cleaned with", remedy)


def check_other_files(config: DataConfig) -> None:
    """Raises DataError where an evaluation set or a model has changed since; one that has gone is not missed."""
    for group in groups_of(config):
        if config.cleaning is not None and (group.folder / INPUTS).is_file():
            files = {key: path for key, path in other_files(config.cleaning).items() if path.is_file()}
            check_unchanged(group.folder, {key: hash_file(path) for key, path in files.items()})
