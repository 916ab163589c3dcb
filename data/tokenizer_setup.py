"""Puts the config's tokenizer into token_dir: a copy of the one named, or one trained on a sample of the sources."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from data.chat import said
from data.config import DataConfig, SourceConfig
from data.documents import read_documents
from data.shards import Shard
from data.tokenizer import SAMPLE_BYTES, add_origin, check_tokenizer, load_origin, save_tokenizer, tokenizer_folder
from data.trained_tokenizers import train_tokenizer
from data.workers import run_in_processes

SAMPLE_SHARDS = 16  # shards read of each source, evenly spaced, so that sampling a large corpus stays cheap
PlannedSource = tuple[SourceConfig, list[Shard], str]


def set_up_tokenizer(config: DataConfig, vocab_size: int, sources: Sequence[PlannedSource]) -> Path | None:
    """The tokenizer's folder, created if it did not exist; None where no source needs a tokenizer.

    ``sources`` are the raw sources with their shards and the keys that name them in errors. Training runs in a separate
    process, since the library's threads would make forking this one unsafe. Raises DataError where the named tokenizer
    cannot be used; nothing is created then.
    """
    folder = tokenizer_folder(config, vocab_size)
    if folder is None:
        return None
    if folder.is_dir():
        if config.tokenizer is not None:
            with contextlib.suppress(OSError):  # a token_dir that is not this user's to write
                add_origin(folder, config.tokenizer)
        return folder
    if config.tokenizer is not None:
        save_tokenizer(check_tokenizer(load_origin(config.tokenizer), config, vocab_size), folder, config.tokenizer)
    else:
        run_in_processes(_train, [(config, list(sources), vocab_size, folder)], config.workers, lambda *_: None)
    return folder


def _train(config: DataConfig, sources: list[PlannedSource], vocab_size: int, folder: Path) -> None:
    texts = sample_documents(sources)
    save_tokenizer(train_tokenizer(texts, vocab_size, config.tokenizer_model, config.special_tokens), folder)


def sample_documents(sources: list[PlannedSource]) -> Iterator[str]:
    """A sample of documents of all sources, about SAMPLE_BYTES in all, divided by the sources' weights.

    Documents are chosen by the hash of their text, so the sample is the same every time, at the rate that yields a
    source's share from the shards that are read.
    """
    total_weight = sum(source.weight for source, _, _ in sources)
    for source, shards, key in sources:
        step = -(-len(shards) // SAMPLE_SHARDS)
        looked_at = shards[::step]
        share = SAMPLE_BYTES * source.weight / total_weight
        size = sum(piece.n_bytes for shard in looked_at for piece in shard)
        yield from _sample_source(source, looked_at, key, share, min(1.0, share / size) if size else 1.0)


def _sample_source(source: SourceConfig, shards: list[Shard], key: str, share: float, rate: float) -> Iterator[str]:
    """The documents with a hash in the lowest fraction ``rate``, up to an equal part of ``share`` from each shard."""
    for shard in shards:
        left = share / len(shards)
        for text, _ in read_documents(source, shard, key):
            if text and xxhash.xxh3_64_intdigest(text.encode(errors="replace"), seed=1) < rate * 2**64:
                text = text if source.chat is None else said(text)
                yield text[: int(left) + 1].encode(errors="replace").decode()
                left -= len(text)
            if left <= 0:
                break
