"""The task of one worker process of ``prepare``, and the type of its progress reports."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from data.config import SourceConfig
from data.shards import Shard

Report = Callable[[float, int, int], None]  # bytes of input, documents, tokens since the last report


class StoppedError(Exception):
    """Raised in a worker where the parent process has asked it to stop, since another worker failed."""


@dataclass(frozen=True)
class ShardTask:
    """Everything that a process needs to write one shard."""

    folder: Path
    number: int
    shard: Shard
    source: SourceConfig
    key: str  # the source, in errors
    tokenizer: Path
    heldout_fraction: float
    bos_id: int | None  # the token that begins each document; None: none does
    forced: tuple[int, str] | None = None  # (document, split): the document goes to that split whatever its hash

    @property
    def name_of_text(self) -> str:
        """The shard's name in errors that concern no single document."""
        first, last = self.shard[0].path, self.shard[-1].path
        return f"{self.key}: {first}" if first == last else f"{self.key}: one of {first} to {last}"


def hash_text(text: str) -> tuple[int, str]:
    """xxh3 (64 bits) of the text, and the text without lone surrogates (JSON can hold them, UTF-8 cannot)."""
    try:
        return xxhash.xxh3_64_intdigest(text.encode()), text
    except UnicodeEncodeError:
        data = text.encode(errors="replace")
        return xxhash.xxh3_64_intdigest(data), data.decode()
