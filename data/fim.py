"""Fill in the middle: moves the middle of documents to their end, so that a model learns to write it from both sides.

Bavarian et al. 2022 (arXiv:2207.14255), section 3, at the level of the context and of tokens: the part of a document
that lies in a sample is cut at two places drawn uniformly among those between its tokens, and rearranged. The part
keeps its length: three special tokens replace its last three, before an end of text if there is one. BOS stays first.
The draws depend on the seed, the part (its file and first token there) and the epoch alone.

Shape letters: W tokens of a window, F documents' parts in windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data.config import DataConfig
from data.errors import refuse
from data.prepared import Prepared
from data.tokenfile import TokenFile
from data.tokenizer import bos_id_of, load_fast, read_info

PURPOSE = 0xF1113  # makes these draws independent of others with the same seed
RANGE = 1 << 64
N_TOKENS = 3  # prefix, suffix, middle


@dataclass(frozen=True)
class Cut:
    """The cut of a document's part, in its file's tokens: prefix [text, a), middle [a, b), suffix [b, c), lost [c, d).

    Before ``text`` lies the document's BOS, and from d on its end of text, if the part holds them.
    """

    is_spm: bool
    first: int
    text: int
    a: int
    b: int
    c: int
    d: int

    def rearranged(self, part_W: np.ndarray, ids: Sequence[int]) -> np.ndarray:
        """The same number of tokens, rearranged. ``ids`` are the tokens before prefix, suffix and middle."""
        places = np.array([self.text, self.a, self.b, self.c, self.d])
        begin, prefix, middle, suffix, _, end = np.split(part_W, places - self.first)
        before_prefix, before_suffix, before_middle = (np.array([each], part_W.dtype) for each in ids)
        if self.is_spm:  # the paper's variant whose form equals that of PSM where the prefix is empty (section 3.2)
            parts = (before_prefix, before_suffix, suffix, before_middle, prefix, middle)
        else:
            parts = (before_prefix, prefix, before_suffix, suffix, before_middle, middle)
        return np.concatenate((begin, *parts, end))

    def row(self) -> dict[str, Any]:
        """The cut as `roundtable data show --json` prints it."""
        ranges = {"prefix": [self.text, self.a], "middle": [self.a, self.b], "suffix": [self.b, self.c]}
        return {"order": "spm" if self.is_spm else "psm", **ranges, "given_up": [self.c, self.d]}


@dataclass(frozen=True)
class FillInTheMiddle:
    """A run's settings of fill in the middle, which decide about each document's part."""

    rate: float
    spm_share: float
    ids: tuple[int, ...]  # the tokens before prefix, suffix and middle
    eos_id: int
    seed: int
    bos_id: int | None = None  # by data.add_bos

    def cut(self, file: TokenFile, number: int, first: int, stop: int, epoch: int) -> Cut | None:
        """The cut of a document's part, the tokens [first, stop) of the file; None where the part is not rearranged.

        ``number`` is the file's among the run's. A part of fewer than four tokens, not counting BOS and EOS, is not.
        """
        key = np.array([PURPOSE, self.seed, number, first, epoch], np.int64).tobytes()
        chosen, order, *places = (xxhash.xxh3_64_intdigest(key, seed=draw) for draw in range(4))
        if chosen >= self.rate * RANGE:
            return None
        whole = file.document_range(file.document_of(first))
        holds_end = int(file.tokens[stop - 1]) == self.eos_id and whole[1] == stop
        holds_bos = self.bos_id is not None and int(file.tokens[first]) == self.bos_id and whole[0] == first
        text, d = first + holds_bos, stop - holds_end
        c = d - N_TOKENS
        if c <= text:
            return None
        a, b = sorted(text + place % (c - text + 1) for place in places)
        return Cut(order < self.spm_share * RANGE, first, text, a, b, c, d)


def fill_in_the_middle(config: DataConfig, seed: int, prepared: Prepared, vocab_size: int) -> FillInTheMiddle | None:
    """The config's settings; None where data.fim_rate is 0. Raises DataError where a token of them is missing."""
    if not config.fim_rate:
        return None
    ids = fim_ids(config, prepared.tokenizer, vocab_size)
    assert prepared.tokenizer is not None
    eos_id, bos_id = read_info(prepared.tokenizer).eos_id, bos_id_of(config, prepared.tokenizer)
    return FillInTheMiddle(config.fim_rate, config.fim_spm_share, ids, eos_id, seed, bos_id)


def fim_ids(config: DataConfig, folder: Path | None, vocab_size: int) -> tuple[int, ...]:
    """The ids of data.fim_tokens in the tokenizer of ``folder``. Raises DataError where it lacks one of them."""
    if folder is None:
        rule = "needs data.tokenizer, which has the tokens that data.fim_tokens names"
        raise refuse(f"data.fim_rate={config.fim_rate} with data.tokenizer=null", rule, "name it, or set the rate to 0")
    tokenizer = load_fast(folder)
    ids = []
    for number, name in enumerate(config.fim_tokens):
        token = tokenizer.token_to_id(name)
        if token is None or token >= vocab_size:
            found = f"data.fim_tokens[{number}]={name!r}"
            rule = f"must be a token of {folder} with an id below model.vocab_size={vocab_size}"
            raise refuse(found, rule, "name the tokenizer's own, in the order prefix, suffix, middle")
        ids.append(token)
    return tuple(ids)
