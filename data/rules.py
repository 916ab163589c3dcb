"""The rules of the config's data section that are cheap to check; all broken ones are reported at once."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path

from data.cleaning.rules import check_cleaning
from data.config import DataConfig, SourceConfig
from data.errors import DataError, problem
from data.fim import N_TOKENS
from data.places import why_no_path, why_not_writable
from data.prepared import locate
from data.sources import (
    HUGGING_FACE,
    expand_path,
    input_files,
    is_hugging_face,
    is_raw,
    is_url,
    place_within,
    reads_files,
)
from data.tokenfile import is_token_file
from data.trained_tokenizers import BYTES_AND_END, END_OF_TEXT
from data.without import file_problem

LEAST_WEIGHT = 1e-6
WRITTEN = ("corpus/train-00000.bin", "corpus/train-00000.idx", "corpus/manifest.json")  # examples, below token_dir
CLEANED_TEXT = "corpus/text/00000.jsonl.zst"  # also written below token_dir where a corpus is cleaned
# A name for a special token of a trained tokenizer: one whose spelled-out text is cut inside it by the pre-tokenizer,
# and so never becomes the token itself.
SPECIAL_TOKEN = re.compile(r"<\S*[A-Za-z0-9]\S*>|\[\S*[A-Za-z0-9]\S*\]")


def check_data(config: DataConfig, vocab_size: int) -> list[str]:
    """One line for each rule that the data section breaks. It looks for files, but reads none of the corpus.

    A corpus that is not on this machine is accepted once its token files are there. The range of each number, given by
    its field's type, is not checked here but when the config is read.
    """
    found = [*_check_empty(config), *_check_names(config)]
    for number, source in enumerate(config.sources):
        found += _check_source(source, f"data.sources[{number}]")
    if config.seq_len >= 1:  # otherwise reading the config has reported it
        found += _check_stages(config)
    if (config.fim_rate and len(set(config.fim_tokens)) != len(config.fim_tokens)) or len(
        config.fim_tokens
    ) != N_TOKENS:
        shown, rule = list(config.fim_tokens), "must name three tokens: before prefix, suffix and middle"
        found.append(problem(f"data.fim_tokens={shown}", rule, "name three that the tokenizer has"))
    if config.cleaning is not None:
        found += check_cleaning(config.cleaning, looks=not found and not _is_prepared(config, vocab_size))
        found += [
            problem(
                f"data.sources[{number}].chat", "needs data.cleaning=null: only text is cleaned", "set that to null"
            )
            for number, source in enumerate(config.sources)
            if source.chat is not None
        ]
    if not found and not _is_prepared(config, vocab_size):
        found += _check_paths(config)
    found += _check_training(config, vocab_size)
    heldout = config.heldout_path
    if (
        heldout is not None
        and why_no_path(heldout) is None
        and not (is_url(heldout) or is_token_file(expand_path(heldout)))
    ):
        rule = "must be the PREFIX of token files, and PREFIX.bin and PREFIX.idx do not both exist"
        found.append(problem(f"data.heldout_path={heldout!r}", rule, "check the path, or set it to null"))
    if config.without is not None and why_no_path(config.without) is None and not is_url(config.without):
        found += [line for line in [file_problem(config.without)] if line is not None]
    return found


def _check_training(config: DataConfig, vocab_size: int) -> list[str]:
    """Rules on the keys for a trained tokenizer, and on those that need a named one."""
    found = []
    if config.add_bos and config.tokenizer is None:
        rule = "needs a tokenizer with a bos_token, and data.tokenizer=null names none"
        found.append(problem("data.add_bos=true", rule, "name one, or leave add_bos out"))
    if config.tokenizer is not None:
        for key, value, default in (
            ("tokenizer_model", config.tokenizer_model, "bpe"),
            ("special_tokens", list(config.special_tokens), []),
        ):
            if value != default:
                rule = f"is for a tokenizer that is trained, and data.tokenizer={config.tokenizer!r} is named"
                found.append(problem(f"data.{key}={value!r}", rule, "leave it out, or set data.tokenizer to null"))
        return found
    for number, name in enumerate(config.special_tokens):
        if not SPECIAL_TOKEN.fullmatch(name) or name == END_OF_TEXT or name in config.special_tokens[:number]:
            rule = "must be a name of its own between < and > or [ and ], with a letter or digit and without spaces"
            found.append(problem(f"data.special_tokens[{number}]={name!r}", rule, "try '<|tool|>'"))
    least = BYTES_AND_END + len(config.special_tokens)
    if any(is_raw(source) for source in config.sources) and vocab_size < least:
        rule = f"must be at least {least} to train a byte-level tokenizer (data.tokenizer=null)"
        found.append(problem(f"model.vocab_size={vocab_size}", rule, f"set it to {least} or more"))
    return found


def _check_empty(config: DataConfig) -> list[str]:
    if config.sources:
        return []
    return [problem("data.sources=[]", "must name at least one source", "add one: sources: [{path: corpus.txt}]")]


def _check_names(config: DataConfig) -> list[str]:
    """Rules on paths: none is empty or impossible on a file system, and only token files may be given by URL."""
    made, read = ("token_dir", "cache_dir"), ("tokenizer", "without")
    paths = {f"data.{name}": getattr(config, name) for name in (*made, *read, "heldout_path")}
    paths |= {f"data.sources[{number}].path": source.path for number, source in enumerate(config.sources)}
    broken = {
        key: why_no_path(path, created=key in ("data.token_dir", "data.cache_dir"))
        for key, path in paths.items()
        if path is not None
    }
    found = [problem(f"{key}={paths[key]!r}", rule, "choose another") for key, rule in broken.items() if rule]
    for name in (*made, *read):
        path = getattr(config, name)
        if path is not None and is_url(path):
            rule, copied = "must be a path on this machine, and is a URL", "copy what is there, and name the copy"
            found.append(problem(f"data.{name}={path!r}", rule, "name a folder" if name in made else copied))
    return found


def _check_source(source: SourceConfig, key: str) -> list[str]:
    found = []
    if is_hugging_face(source) and not source.path.removeprefix(HUGGING_FACE).strip("/"):
        remedy = "name one, e.g. hf://roneneldan/TinyStories, or a local folder: hf:///data/stories"
        found.append(problem(f"{key}.path={source.path!r}", "must name a dataset", remedy))
    return found + [
        problem(f"{key}.{name}={_plain(source, name)}", f"changes nothing where {why}", f"leave out {name}")
        for name, why in set_in_vain(source)
    ]


def set_in_vain(source: SourceConfig) -> list[tuple[str, str]]:
    """(field, reason) of each field of the source that is set although it has no effect."""
    usual = SourceConfig(path=source.path)
    return [
        (name, why)
        for is_so, why, names in _unused_where(source)
        for name in names
        if is_so and getattr(source, name) != getattr(usual, name)
    ]


def _unused_where(source: SourceConfig) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """(condition, its description, fields that have no effect if it holds), for a source."""
    path, is_hub = f"path={source.path!r}", is_hugging_face(source)
    yield not is_hub, f"{path} is no Hugging Face dataset (hf://NAME)", ("subset", "split")
    yield is_hub and reads_files(source), f"{path} is a saved dataset", ("subset",)
    yield not is_raw(source), f"{path} is token files", ("exclude", "text_key", "chat", "max_bad_share")


def _plain(source: SourceConfig, name: str) -> str:
    """The value of a source's field as messages show it."""
    value = getattr(source, name)
    if is_dataclass(value):
        return "{...}"
    return repr(list(value) if isinstance(value, tuple) else value)


def _check_stages(config: DataConfig) -> list[str]:
    """Rules on stages: they ascend, and each has a weight for every source, at least one of them above 0."""
    found, before = [], -1
    for number, stage in enumerate(config.stages):
        key, shown = f"data.stages[{number}]", "[" + ", ".join(map(str, stage.weights)) + "]"
        if len(stage.weights) != len(config.sources):
            rule = (
                f"must hold one weight for each of data.sources, {len(config.sources)}, and holds {len(stage.weights)}"
            )
            found.append(problem(f"{key}.weights={shown}", rule, "give 0 to a source that is not to be read"))
        elif not any(stage.weights):
            found.append(problem(f"{key}.weights={shown}", "must hold a weight above 0", "try 1.0 for one of them"))
        elif tiny := [weight for weight in stage.weights if 0 < weight < LEAST_WEIGHT]:
            rule = f"holds {tiny[0]}, and a weight must be 0 or at least {LEAST_WEIGHT}"
            found.append(problem(f"{key}.weights={shown}", rule, "scale them all up, or set it to 0"))
        if -(-stage.from_tokens // config.seq_len) <= before:
            rule = "must be a sequence or more after the stage before it"
            at = (before + 1) * config.seq_len
            found.append(problem(f"{key}.from_tokens={stage.from_tokens}", rule, f"try {at}, or more"))
        before = max(before, -(-stage.from_tokens // config.seq_len))
    return found


def _check_paths(config: DataConfig) -> list[str]:
    found = []
    for number, source in enumerate(config.sources):
        if reads_files(source):
            try:
                input_files(source, f"data.sources[{number}]")
            except DataError as error:
                found += error.problems
    written = WRITTEN if config.cleaning is None else (*WRITTEN, CLEANED_TEXT)
    found += check_outside(f"data.token_dir={config.token_dir!r}", config.token_dir, written, config)
    rule = why_not_writable(config.token_dir)
    if rule is not None:
        found.append(problem(f"data.token_dir={config.token_dir!r}", rule, "name another folder"))
    return found


def check_outside(found: str, folder: str | Path, written: Sequence[str], config: DataConfig) -> list[str]:
    """One line for each source that would read the files ``written`` within ``folder`` as text; ``found`` names it.

    Every new file there would change the corpus, which is refused once tokens have been made from it.
    """
    lines = []
    for number, source in enumerate(config.sources):
        place = place_within(source, folder, written) if is_raw(source) else None
        if place is not None:
            rule = f"lies in data.sources[{number}].path={source.path!r}, which would read its files as text"
            leave_out = "" if place == "." else f", or add '**/{place}/**' to that source's exclude"
            lines.append(problem(found, rule, f"name a folder outside of it{leave_out}"))
    return lines


def _is_prepared(config: DataConfig, vocab_size: int) -> bool:
    try:
        return locate(config, vocab_size) is not None
    except DataError:  # damaged: opening it reports that
        return True
