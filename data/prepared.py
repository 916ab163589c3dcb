"""The layout of token_dir, and finding out whether a config's token files are prepared.

    TOKEN_DIR/tokenizer-STEM-HASH/                  a transformers tokenizer directory
    TOKEN_DIR/STEM-HASH/                            one raw source
        train-00000.bin .idx, heldout-00000.bin .idx, ...
        shard-00000.json                            what a finished shard holds
        inputs.json                                 the corpus's files and sizes
        cleaned_from.json                           of cleaned text: hashes of all that it was cleaned from and with
        manifest.json                               written last: the folder is complete

A HASH covers everything that fixes the contents, so other settings use another folder and nothing is overwritten.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from data.chat_template import template_of
from data.cleaning.groups import cleaning_of
from data.cleaning.inputs import check_cleaned
from data.config import DataConfig, SourceConfig
from data.errors import DataError, problem, refuse
from data.hub import corpus_files, is_on_hub
from data.manifest import FORMAT, INPUTS, MANIFEST, SourceManifest, hash_problems, read_source_manifest
from data.packed import damaged_packings, missing_packings
from data.remote_index import token_prefix
from data.sources import (
    InputFile,
    expand_path,
    is_hugging_face,
    is_raw,
    readable_stem,
)
from data.tokenizer import PREPARE, bos_id_of, read_info, tokenizer_folder


@dataclass(frozen=True)
class PreparedSource:
    """One source's token files: a prepared folder with its manifest, or the prefix of existing files."""

    source: SourceConfig
    path: Path
    manifest: SourceManifest | None  # None: ``path`` is the prefix of token files that were not written here

    def prefixes(self, split: str) -> list[Path]:
        """The token files of "train" or "heldout"; existing token files are all for training."""
        if self.manifest is None:
            return [self.path] if split == "train" else []
        records = self.manifest.train if split == "train" else self.manifest.heldout
        return [self.path / record.name for record in records]


@dataclass(frozen=True)
class Prepared:
    """The token files, tokenizer and sources that a run reads."""

    sources: tuple[PreparedSource, ...]
    tokenizer: Path | None  # None: only existing token files, and no tokenizer named


def source_folder(config: DataConfig, source: SourceConfig, tokenizer: Path) -> Path:
    """The folder of a raw source's token files. ``tokenizer`` is the tokenizer's folder, which must be complete."""
    path = expand_path(source.path)
    fixes_the_tokens = {
        "format": FORMAT,
        "path": path,
        "exclude": source.exclude,
        "text_key": source.text_key,
        "hugging_face": [source.subset, source.split] if is_hugging_face(source) else None,
        "tokenizer": read_info(tokenizer).fingerprint,
        "heldout_fraction": config.heldout_fraction,
        "shard_bytes": config.shard_bytes,
    }
    if source.chat is not None:
        fixes_the_tokens["chat"] = [asdict(source.chat), template_of(source.chat, tokenizer)]
    if source.max_bad_share:  # a folder of a source without it keeps the name that it had before there was one
        fixes_the_tokens["max_bad_share"] = source.max_bad_share
    if config.add_bos:  # likewise
        fixes_the_tokens["bos"] = bos_id_of(config, tokenizer)
    cleaned = cleaning_of(config, source)
    if cleaned is not None:
        fixes_the_tokens["cleaned"] = cleaned
    digest = xxhash.xxh3_64(json.dumps(fixes_the_tokens).encode()).hexdigest()
    return Path(config.token_dir) / f"{readable_stem(source.path)}-{digest}"


def source_names(config: DataConfig) -> list[str]:
    """The name of each source in metrics: its stem, preceded by its number in data.sources if two are the same."""
    stems = [readable_stem(source.path) for source in config.sources]
    if len(set(stems)) == len(stems):
        return stems
    return [f"{number}-{stem}" for number, stem in enumerate(stems)]


def locate(config: DataConfig, vocab_size: int) -> Prepared | None:
    """The prepared data, or None where something is still missing. Reads manifests, not the corpus.

    Raises DataError where a manifest is damaged.
    """
    tokenizer = tokenizer_folder(config, vocab_size)
    if tokenizer is not None and not tokenizer.is_dir():
        return None
    sources = []
    for source in config.sources:
        if not is_raw(source):
            sources.append(PreparedSource(source, token_prefix(config, source.path), None))
            continue
        assert tokenizer is not None
        folder = source_folder(config, source, tokenizer)
        manifest = read_source_manifest(folder)
        if manifest is None:
            return None
        sources.append(PreparedSource(source, folder, manifest))
    return Prepared(tuple(sources), tokenizer)


def find_prepared(config: DataConfig, vocab_size: int) -> Prepared | None:
    """The prepared data, after comparing the corpus with it; None where something is missing, packings included.

    Raises DataError where the corpus has changed since, or a manifest is damaged. A corpus that is no longer on this
    machine passes, since its tokens are enough.
    """
    prepared = locate(config, vocab_size)
    if prepared is None:
        return None
    made = {number: part for number, part in enumerate(prepared.sources) if part.manifest is not None}
    check_cleaned(config, {number: part.path for number, part in made.items()})
    for number, part in made.items():
        check_inputs(part.path, part.source, f"data.sources[{number}]")
    if missing_packings(config, token_files(config, prepared)):
        return None
    return prepared


def token_files(config: DataConfig, prepared: Prepared) -> list[Path]:
    """The prefixes of all token files that a run with this config may read."""
    found = [prefix for part in prepared.sources for split in ("train", "heldout") for prefix in part.prefixes(split)]
    return found if config.heldout_path is None else [*found, token_prefix(config, config.heldout_path)]


def check_inputs(folder: Path, source: SourceConfig, key: str) -> None:
    """Raises DataError where the corpus's files differ, in name or size, from those from which ``folder`` was begun.

    The hub is asked only while the folder is unfinished: later changes there do not matter to finished tokens.
    """
    recorded = read_inputs(folder)
    if recorded is None or ((folder / MANIFEST).exists() and (is_on_hub(source) or not recorded)):
        return  # older versions recorded no files of a dataset's folder
    try:
        present = corpus_files(source, key)
    except DataError:
        return
    if present != recorded:
        changed = sorted({file.path for file in set(present) ^ set(recorded)})
        found = f"{key}.path={source.path!r}: {len(changed)} files differ, such as {changed[0]}"
        is_whole = (folder / MANIFEST).exists()  # runs may have begun with it, and go on with no others
        remedy = "put them back if a run began with its tokens; else " if is_whole else ""
        raise refuse(found, f"from what {folder} was prepared from", f"{remedy}remove {folder} and prepare again")


def read_inputs(folder: Path) -> list[InputFile] | None:
    """The corpus's files when preparing ``folder`` began; None where it has not begun. Raises DataError if damaged."""
    path = folder / INPUTS
    try:
        return [InputFile(**file) for file in json.loads(path.read_text())]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise refuse(str(path), f"is damaged ({error})", f"remove {folder} and prepare again") from error


def inputs_tree(files: list[InputFile]) -> list[dict[str, object]]:
    """The content of inputs.json for these files."""
    return [asdict(file) for file in files]


def verify(config: DataConfig, prepared: Prepared) -> list[str]:
    """One line for each prepared token file, and each packing, whose hash has changed. Reads all of them."""
    parts = [(part.path, part.manifest) for part in prepared.sources if part.manifest is not None]
    lines = [line for path, manifest in parts for line in hash_problems(path, manifest)]
    damaged = damaged_packings(config, token_files(config, prepared))
    return lines + [problem(str(path), "must be as it was written", f"delete it, and {PREPARE}") for path in damaged]
