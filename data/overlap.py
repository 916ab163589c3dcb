"""Counting documents that are in both splits, token for token, since held-out text must not have been trained on.

Shape letters: D documents of a file.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from data.tokenfile import TokenFile

LEAST_TOKENS = 2  # a document of one token is an end of text alone


def n_trained_on(heldout: Sequence[TokenFile], train: Sequence[TokenFile]) -> tuple[int, int]:
    """(held-out documents that a training file holds too, all held-out documents), of two tokens or more.

    Reads the held-out files and all .idx whole, and three tokens of each training document. It reads the whole document
    only where these and its length match a held-out one. Raises DataError where an .idx contradicts itself.
    """
    wanted = [mark for file in heldout for mark in _marks(file)]
    looks = np.unique(np.array([look for look, _ in wanted], np.uint64))
    hashes = {digest for _, digest in wanted}
    found: set[int] = set()
    for file in train:
        found.update(digest for _, digest in _marks(file, looks) if digest in hashes)
    return sum(digest in found for _, digest in wanted), len(wanted)


def _marks(file: TokenFile, looks: np.ndarray | None = None) -> Iterator[tuple[int, int]]:
    """(look, hash) of each document, or only of those whose look is one of ``looks``, if given.

    A look combines a document's length and three of its tokens; the hash is of all its tokens.
    """
    starts_D = file.all_starts()
    sizes_D = np.diff(np.append(starts_D, file.n_tokens))
    starts_D, sizes_D = starts_D[sizes_D >= LEAST_TOKENS], sizes_D[sizes_D >= LEAST_TOKENS]
    look_D = sizes_D.astype(np.uint64)
    for place_D in (starts_D, starts_D + sizes_D // 2, starts_D + sizes_D - 2):
        look_D = look_D * np.uint64(0x9E3779B97F4A7C15) + file.tokens[place_D].astype(np.uint64)
    is_wanted_D = np.isin(look_D, looks) if looks is not None else np.ones(len(look_D), bool)
    columns = (look_D[is_wanted_D], starts_D[is_wanted_D], sizes_D[is_wanted_D])
    for look, start, size in zip(*(column.tolist() for column in columns), strict=True):
        tokens = file.tokens[start : start + size].astype(np.int64)
        yield look, xxhash.xxh3_64_intdigest(tokens.tobytes())
