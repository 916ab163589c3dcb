"""Writing the n-grams of evaluation sets, read from jsonl files, as the index for datatrove's decontamination."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from data.cleaning.config import DecontaminateConfig
from data.cleaning.judge import hash_config, load_words
from data.errors import reason_of, refuse
from data.partial import written_whole
from data.sources import expand_path

KEY = "data.cleaning.decontaminate"


def write_index(config: DecontaminateConfig, words: str, folder: Path) -> tuple[int, int]:
    """Writes NAME.index.hashes for each file into ``folder``; returns (texts, those with fewer words than an n-gram).

    A text shorter than an n-gram cannot be found in a corpus. Raises DataError where a file cannot be read, is not
    jsonl or holds no text.
    """
    from datatrove.pipeline.decont import NGramsDecontConfig
    from datatrove.utils.hashing import create_hash_func
    from datatrove.utils.text import ngrams, simplify_text

    settings, tokenizer = NGramsDecontConfig(n_grams=config.n_grams, hash_config=hash_config()), load_words(words)
    hash_of: Any = create_hash_func(settings.hash_config)
    n_texts = n_short = 0
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(config.files):
        hashes: set[int] = set()
        for text in read_texts(config, name):
            found = tokenizer.word_tokenize(simplify_text(text, settings.norm_config))
            hashes.update(hash_of(" ".join(each)) for each in ngrams(found, config.n_grams))
            n_texts, n_short = n_texts + 1, n_short + (len(found) < config.n_grams)
        stem = "".join(c if c.isalnum() else "-" for c in Path(name).name.partition(".")[0])[:40]
        with written_whole(folder / f"{number}-{stem}.index.hashes") as file:
            file.write(np.array(sorted(hashes), settings.hash_config.np_descr).tobytes())
    return n_texts, n_short


def read_texts(config: DecontaminateConfig, name: str) -> list[str]:
    """The texts of an evaluation set: each record's fields, joined by line ends. Raises DataError for a bad file."""
    texts: list[str] = []
    try:
        lines = Path(expand_path(name)).read_bytes().split(b"\n")
    except OSError as error:
        raise refuse(f"{KEY}.files={name!r}", f"cannot be read ({error.strerror})", "check the path") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{KEY}.files={name!r}: line {number}"
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise refuse(where, f"is not JSON in UTF-8 ({reason_of(error)})", "mend the line") from error
        fields = [record.get(key) for key in config.text_keys] if isinstance(record, dict) else []
        parts = [part for field in fields for part in (field if isinstance(field, list) else [field])]
        text = "\n".join(part for part in parts if isinstance(part, str))
        if not text.strip():
            keys = ", ".join(config.text_keys)
            raise refuse(where, f"has no text in the fields {keys}", f"set {KEY}.text_keys to those with the text")
        texts.append(text.encode(errors="replace").decode())
    if not texts:
        raise refuse(f"{KEY}.files={name!r}", "holds no text", "name a file with an evaluation set, or leave it out")
    return texts
