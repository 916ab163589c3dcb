"""The facts on the page about prepared data, read from token files, manifests and cleaned texts."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.cleaning.kept import DUPLICATES, Sample
from data.cleaning.summary import records_of
from data.config import DataConfig
from data.prepared import Prepared, PreparedSource, source_names
from data.shardwriter import dropped_from
from data.tokenfile import TokenFile
from data.tokenizer import load_fast
from launcher.errors import UserError

MOST_COUNTED = 10_000_000  # documents of a source whose lengths are counted
MEASURED = 100  # documents of a source, evenly spaced, whose words are counted
MOST_TOKENS = 20_000  # tokens of each of these that are decoded
BINS = 32  # bin n counts lengths from 2^n to 2^(n+1) - 1 tokens
SHOWN = 4  # samples of each reason and source
WORD = re.compile(r"\w+")


@dataclass
class SourceFacts:
    """The facts on one source. Texts are as they were read, so they must be escaped where they are shown."""

    name: str
    path: str
    n_train: int = 0  # tokens
    n_heldout: int = 0
    n_documents: int = 0  # documents in token files
    n_read: int = 0  # documents that were read, dropped ones included
    dropped: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # the number of documents in each bin of lengths
    n_measured: int = 0  # documents from which the two means below are taken
    tokens_per_word: float | None = None
    bytes_per_token: float | None = None
    samples: dict[str, list[Sample]] = field(default_factory=dict)


@dataclass
class CorpusFacts:
    """The facts on all sources, and on copies of documents among them."""

    name: str
    sources: list[SourceFacts]
    copies: list[dict[str, Any]]  # keys: of and kept_in (numbers of sources), reason, documents
    group_sizes: dict[int, int]  # size of a group of copies -> number of such groups
    copy_samples: list[dict[str, Any]]


def gather(name: str, config: DataConfig, prepared: Prepared) -> CorpusFacts:
    """The facts on prepared data, from token files' indices, a few documents of each source, and cleaning's records."""
    names = source_names(config)
    sources = [_source(names[n], n, part, prepared, config) for n, part in enumerate(prepared.sources)]
    facts = CorpusFacts(name, sources, [], {}, [])
    for folder in dict.fromkeys(_cleaned_folder(part, config) for part in prepared.sources):
        if folder is not None and (folder / DUPLICATES).is_file():
            tree = _read(folder / DUPLICATES)
            facts.copies += tree["sources"]
            facts.copy_samples += tree["samples"]
            facts.group_sizes |= {int(size): count for size, count in tree["cluster_sizes"].items()}
    return facts


def _cleaned_folder(part: PreparedSource, config: DataConfig) -> Path | None:
    cleaning = part.manifest.cleaning if part.manifest is not None else None
    return Path(config.token_dir) / cleaning["folder"] if cleaning is not None else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError([f"{path} is damaged ({error}); remove {path.parent} and prepare again"]) from error


def _source(name: str, number: int, part: PreparedSource, prepared: Prepared, config: DataConfig) -> SourceFacts:
    facts = SourceFacts(name, part.source.path)
    train, heldout = ([TokenFile(prefix) for prefix in part.prefixes(split)] for split in ("train", "heldout"))
    files = [*train, *heldout]
    facts.n_train, facts.n_heldout = (sum(file.n_tokens for file in each) for each in (train, heldout))
    facts.n_documents = facts.n_read = sum(file.n_documents for file in files)
    facts.lengths = _lengths(files)
    if prepared.tokenizer is not None:
        _measure(facts, files, prepared.tokenizer)
    if part.manifest is not None:
        facts.dropped, facts.bad = dropped_from(part.path)
        facts.n_read += sum(facts.dropped.values())
        facts.changed = (part.manifest.cleaning or {}).get("changed", {})
    folder = _cleaned_folder(part, config)
    for record in records_of(folder, number) if folder is not None and folder.is_dir() else ():
        for reason, samples in record.samples.items():
            found = facts.samples.setdefault(reason, [])
            found += samples[: SHOWN - len(found)]
    return facts


def _lengths(files: Sequence[TokenFile]) -> list[int]:
    counts, left = np.zeros(BINS, np.int64), MOST_COUNTED
    for file in files:
        if left <= 0:
            break
        lengths = np.diff(file.all_starts(), append=file.n_tokens)[:left]
        left -= len(lengths)
        places = np.minimum(BINS - 1, np.log2(np.maximum(1, lengths)).astype(int))
        counts += np.bincount(places, minlength=BINS)
    return counts.tolist()


def _measure(facts: SourceFacts, files: Sequence[TokenFile], tokenizer: Path) -> None:
    """Sets the mean tokens per word and bytes per token in ``facts``, from about MEASURED documents."""
    fast, n_documents = load_fast(tokenizer), sum(file.n_documents for file in files)
    step = max(1, n_documents // MEASURED)
    n_tokens = n_words = n_bytes = before = 0
    for file in files:
        starts = file.all_starts()
        for place in range(-before % step, file.n_documents, step):
            stop = starts[place + 1] if place + 1 < len(starts) else file.n_tokens
            ids = file.tokens[starts[place] : min(stop - 1, starts[place] + MOST_TOKENS)].tolist()
            text = fast.decode(ids, skip_special_tokens=False)
            n_tokens, n_words = n_tokens + len(ids), n_words + len(WORD.findall(text))
            n_bytes, facts.n_measured = n_bytes + len(text.encode()), facts.n_measured + 1
        before += file.n_documents
    facts.tokens_per_word = n_tokens / n_words if n_words else None
    facts.bytes_per_token = n_bytes / n_tokens if n_tokens else None
