"""Small corpora in several formats for tests of data preparation, and readers of the prepared tokens."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import data.workers
from data.config import DataConfig, SourceConfig
from data.prepare import prepare
from data.prepared import Prepared
from data.tokenfile import TokenFile
from data.tokenizer import load_fast, save_tokenizer
from data.trained_tokenizers import train_tokenizer

VOCAB = 300
WORDS = ("the", "table", "is", "round", "and", "every", "seat", "at", "it", "equal", "layout", "trains", "model")


def work_in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Makes preparation run its workers' tasks in this process, since each worker needs seconds to import.

    The patch lasts as long as ``patch``.
    """

    def inline(function: Callable[..., Any], tasks: list[tuple[Any, ...]], _: Any, report: Any) -> list[Any]:
        return [function(*task, report=report) for task in tasks]

    patch.setattr(data.workers, "run_in_processes", inline)
    patch.setattr(data.workers, "_run_one", lambda function, task, report: function(task, report, lambda: False))


def make_documents(n: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"{i}: " + " ".join(draw.choices(WORDS, k=draw.randint(5, 60))) + "\n" for i in range(n)]


def write_jsonl(path: Path, documents: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "n": i}) + "\n" for i, text in enumerate(documents)))
    return path


def config_of(path: Path | str, tokenizer: str | None, token_dir: Path, **changes) -> DataConfig:
    fields = {"heldout_fraction": 0.2, "shard_bytes": 4000, "workers": 1, "seq_len": 16} | changes
    source = {name: fields.pop(name) for name in ("exclude", "text_key", "weight", "subset") if name in fields}
    sources = (SourceConfig(path=str(path), **source),)
    return DataConfig(sources=sources, tokenizer=tokenizer, token_dir=str(token_dir), **fields)


def prepared(config: DataConfig, **options) -> Prepared:
    result = prepare(config, vocab_size=VOCAB, **options)
    assert result is not None
    return result


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def texts_of(result: Prepared, split: str) -> list[str]:
    """The documents of a split, decoded; asserts that each ends with the end-of-text token."""
    assert result.tokenizer is not None
    fast = load_fast(result.tokenizer)
    texts = []
    for prefix in result.sources[0].prefixes(split):
        file = TokenFile(prefix)
        for ids in np.split(file.tokens, file.all_starts()[1:]):
            assert ids[-1] == fast.token_to_id("<|endoftext|>")
            texts.append(fast.decode(ids[:-1].tolist(), skip_special_tokens=False))
    return texts


def write_parquet(path: Path, documents: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), path, row_group_size=7)


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": lambda p, d: p.write_bytes(gzip.compress(write_jsonl(p, d).read_bytes())),
    "a.jsonl.zst": lambda p, d: p.write_bytes(zstandard.compress(write_jsonl(p, d).read_bytes())),
    "a.parquet": write_parquet,
    "hf": lambda p, d: (
        p.mkdir(),
        write_parquet(p / "one.parquet", d[:30]),
        write_parquet(p / "two.parquet", d[30:]),
    ),
}


def save_tiny_tokenizer(folder: Path) -> str:
    """A tokenizer of VOCAB ids, trained on some of the documents; returns its folder."""
    save_tokenizer(train_tokenizer(make_documents(50), VOCAB), folder)
    return str(folder)
