"""Groups of sources that are cleaned together, and their folders, named by a hash of all that fixes the result."""

import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import xxhash

from data.cleaning.kept import SETTINGS
from data.config import DataConfig, SourceConfig
from data.sources import expand_path, is_hugging_face, is_raw, readable_stem

FORMAT = 1  # version of the folder, increased when the same input would give other texts


@dataclass(frozen=True)
class Group:
    """Sources that are cleaned together, by their places in data.sources, and their folder."""

    numbers: tuple[int, ...]
    folder: Path

    @property
    def settings(self) -> Path:
        """The path of settings.json, which exists once cleaning into the folder has begun."""
        return self.folder / SETTINGS


def settings_of(config: DataConfig, numbers: Sequence[int]) -> dict[str, Any]:
    """All settings that determine what cleaning keeps of these sources; the contents of files are not among them."""
    assert config.cleaning is not None
    sources = []
    for number in numbers:
        source = config.sources[number]
        hub = [source.subset, source.split] if is_hugging_face(source) else None
        sources.append([expand_path(source.path), source.exclude, source.text_key, source.max_bad_share, hub])
    return {
        "format": FORMAT,
        "cleaning": asdict(config.cleaning),
        "sources": sources,
        "shard_bytes": config.shard_bytes,
    }


def groups_of(config: DataConfig) -> list[Group]:
    """The raw sources in groups that are cleaned together; empty where cleaning is off."""
    if config.cleaning is None:
        return []
    raw = [number for number, source in enumerate(config.sources) if is_raw(source)]
    parts = [raw] if config.cleaning.is_global else [[number] for number in raw]
    groups = []
    for numbers in filter(None, parts):
        settings = settings_of(config, numbers) | {"cleaning": changed(config.cleaning)}
        digest = xxhash.xxh3_64(json.dumps(settings).encode()).hexdigest()
        stem = readable_stem(config.sources[numbers[0]].path)
        groups.append(Group(tuple(numbers), Path(config.token_dir) / f"cleaned-{stem}-{digest}"))
    return groups


def changed(section: Any) -> dict[str, Any]:
    """The keys of a config section that differ from their defaults, so that new keys do not rename existing folders."""
    found = {}
    for key in fields(section):
        value = getattr(section, key.name)
        if key.default is MISSING or value != key.default:
            found[key.name] = changed(value) if is_dataclass(value) else value
    return found


def cleaning_of(config: DataConfig, source: SourceConfig) -> str | None:
    """The name of the folder with the source's cleaned texts; None where cleaning is off."""
    number = next((i for i, each in enumerate(config.sources) if each == source), None)
    return next((group.folder.name for group in groups_of(config) if number in group.numbers), None)
