"""Hugging Face datasets, streamed through ``datasets``: by hub name, or a local folder that ``datasets`` can load."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data.config import SourceConfig
from data.errors import refuse
from data.sources import HUGGING_FACE

if TYPE_CHECKING:
    from datasets import IterableDataset


def count_hub_shards(source: SourceConfig, key: str) -> int:
    """How many parts the dataset can be read in side by side: its data files."""
    return open_hub(source, key).num_shards


def hub_records(source: SourceConfig, shard: int, key: str) -> Iterator[dict[str, Any]]:
    """The records of one of the dataset's shards, in order."""
    dataset = open_hub(source, key)
    yield from dataset.shard(num_shards=dataset.num_shards, index=shard)


def open_hub(source: SourceConfig, key: str) -> "IterableDataset":
    """The dataset's split as a stream. Raises DataError where ``datasets`` cannot open it."""
    import datasets

    datasets.disable_progress_bars()
    name = source.path.removeprefix(HUGGING_FACE)
    try:
        return datasets.load_dataset(name, source.subset, split=source.split, streaming=True)
    except (OSError, ValueError) as error:  # missing or unreachable; no such subset or split
        found = f"{key}.path={source.path!r} (subset={source.subset!r}, split={source.split!r})"
        reason = textwrap.shorten(str(error), 200, placeholder=" ...")
        remedy = "check the name, subset and split, or the network"
        raise refuse(found, f"cannot be opened by datasets ({reason})", remedy) from error
