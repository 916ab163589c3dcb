"""Summaries of what cleaning did to a source, over its shards: for the manifest, and for users."""

from pathlib import Path
from typing import Any

from data.cleaning.groups import groups_of
from data.cleaning.kept import CleanedShard, counts_of, read_cleaned, text_path
from data.config import DataConfig, SourceConfig


def summary_of(config: DataConfig, source: SourceConfig) -> dict[str, Any]:
    """Counts of a source's documents: read, kept, dropped by reason and changed by stage; and the name of the folder.

    The folder holds the settings.
    """
    number = config.sources.index(source)
    group = next(each for each in groups_of(config) if number in each.numbers)
    dropped: dict[str, int] = {}
    changed: dict[str, int] = {}
    n_documents = 0
    for record in records_of(group.folder, number):
        came, lost, _ = counts_of(text_path(group.folder, record.number))
        n_documents += came
        for counts, more in ((dropped, lost), (changed, record.changed)):
            for reason, count in more.items():
                counts[reason] = counts.get(reason, 0) + count
    kept = n_documents - sum(dropped.values())
    return {
        "documents": n_documents,
        "kept": kept,
        "dropped": dict(sorted(dropped.items())),
        "changed": dict(sorted(changed.items())),
        "folder": group.folder.name,
    }


def records_of(folder: Path, source: int) -> list[CleanedShard]:
    """The finished shards of a source, in order."""
    found = [read_cleaned(folder, int(path.stem.partition("-")[2])) for path in sorted(folder.glob("shard-*.json"))]
    return [record for record in found if record is not None and record.source == source]
