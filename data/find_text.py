"""Finding a piece of text in token files: the tokens of the documents that spell it.

A tokenizer splits the words at the piece's ends otherwise than inside a document, where a word may continue. So the
tokens of the words in between are searched for, as bytes of the .bin, and a find counts if the document's own tokens
there spell the piece. A piece of fewer than three words has none in between: every document is then decoded and
searched.

A special token counts as no text, unless the piece spells it out: then it may be there as text, or as the token that a
chat template wrote. The token that ends a document never counts.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from data.dataset import Dataset
from data.document_names import Place
from data.errors import DataError, reason_of, refuse
from data.tokenfile import TokenFile
from data.tokenizer import making_tokens
from data.tokenizer_files import check_files

MOST_PLACES = 1000
CHUNK_TOKENS = 1 << 24  # tokens of a .bin searched at once
SPELLED_TOKENS = 1 << 13  # tokens of a document decoded at once
NO_TEXT = "\ud800"  # a lone surrogate, which no document contains
TOKENS_AROUND = 64  # decoded on each side of a find, in addition to as many as the piece has bytes


class Speller:
    """Decodes tokens into text, and the words of ``piece`` into tokens, for the search."""

    def __init__(self, folder: Path, piece: str) -> None:
        """Raises DataError where the folder's tokenizer cannot be used."""
        from tokenizers import Tokenizer

        check_files(folder, str(folder))
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library's own kind
            raise refuse(str(path), f"cannot be loaded ({reason_of(error)})", "prepare the data again") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self.piece = piece
        self.special = {number for number, token in added.items() if token.special}
        self._hidden = np.array([number for number in self.special if added[number].content not in piece], np.int64)

    def spell(self, tokens_N: np.ndarray) -> str:
        """The text of these tokens, with NO_TEXT in place of special tokens that the piece does not spell out."""
        parts = np.split(tokens_N, np.flatnonzero(np.isin(tokens_N, self._hidden)))
        texts = [each[1:] if number else each for number, each in enumerate(parts)]
        return NO_TEXT.join(self._tokenizer.decode(each.tolist(), skip_special_tokens=False) for each in texts)

    def middles(self) -> list[list[int]]:
        """The ids of the piece's words except the first and the last, which do not depend on the text around it.

        There is one list with special tokens that it spells out as text, and another with them as tokens, if any.
        """
        words = [match.span() for match in re.finditer(r"\S+", self.piece)]
        if len(words) < 3:
            return []
        begin, end = words[1][0] - 1, words[-2][1]
        found = []
        for as_text in (True, False):
            self._tokenizer.encode_special_tokens = as_text
            try:
                with making_tokens(self.piece):
                    encoded = self._tokenizer.encode(self.piece, add_special_tokens=False)
            except DataError:  # the piece begins or ends within a word
                return []
            numbered = zip(encoded.ids, encoded.offsets, strict=True)
            found.append([number for number, (first, stop) in numbered if begin <= first and stop <= end])
        return found[:1] if found[0] == found[1] else found


def find_text(dataset: Dataset, tokenizer: Path, piece: str, key: str) -> list[Place]:
    """Every place in the dataset's files where a document's tokens spell ``piece``, in the files' order.

    ``key`` is the option by which the user gave the piece. Raises DataError where it is empty, or found in more than
    MOST_PLACES places.
    """
    if not piece.strip():
        raise refuse(f"{key}={piece!r}", "must hold a word", "give a piece of a document")
    found: set[Place] = set()
    speller = Speller(tokenizer, piece)
    middles = speller.middles()
    for number, file in enumerate(dataset.files):
        n_around = len(piece.encode()) + TOKENS_AROUND  # a token of the piece spells a byte of it or more
        parts = [_near(file, each, n_around) for each in middles] if middles and all(middles) else []
        for document, first, stop in chain(*parts or [_everywhere(file, n_around)]):
            for tokens in _spelled(speller, file, document, first, stop):
                found.add(Place(number, document, *tokens))
                if len(found) > MOST_PLACES:
                    raise refuse(f"{key}={piece!r}", f"lies in more than {MOST_PLACES} places", "give a longer piece")
    return sorted(found, key=lambda place: (place.file, place.first))


def _everywhere(file: TokenFile, n_around: int) -> Iterator[tuple[int, int, int]]:
    """(document, first token, end) of parts of all documents, which overlap by ``n_around`` tokens."""
    for document in range(file.n_documents):
        first, stop = file.document_range(document)
        for part in range(first, stop, SPELLED_TOKENS):
            yield document, part, min(stop, part + SPELLED_TOKENS + n_around)


def _near(file: TokenFile, middle: list[int], n_around: int) -> Iterator[tuple[int, int, int]]:
    """(document, first token, end) of the surroundings of each place where these ids occur, within its document."""
    if max(middle) > np.iinfo(file.dtype).max:
        return
    wanted = np.array(middle, file.dtype).tobytes()
    for start in range(0, file.n_tokens, CHUNK_TOKENS):
        chunk = file.tokens[start : start + CHUNK_TOKENS + len(middle) - 1].tobytes()
        at = chunk.find(wanted)
        while at >= 0:
            if at % file.dtype.itemsize == 0:
                token = start + at // file.dtype.itemsize
                document = file.document_of(token)
                first, stop = file.document_range(document)
                yield document, max(first, token - n_around), min(stop, token + len(middle) + n_around)
            at = chunk.find(wanted, at + 1)


def _spelled(speller: Speller, file: TokenFile, document: int, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The shortest range of tokens that spells the piece, for each of its occurrences within [first, stop).

    [first, stop) lies in the document; its end of text is not searched.
    """
    piece, end = speller.piece, file.document_range(document)[1]
    if stop == end and first < stop and int(file.tokens[stop - 1]) in speller.special:
        stop -= 1
    while piece in speller.spell(file.tokens[first:stop]):
        end = _least(first + 1, stop, lambda end, begin=first: piece in speller.spell(file.tokens[begin:end]))
        begin = end - _least(1, end - first, lambda n, end=end: piece in speller.spell(file.tokens[end - n : end]))
        yield begin, end
        first = begin + 1


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number in [low, high] for which ``holds`` is true, given that it is true for all larger ones too."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
