"""The documents that samples consist of, and the samples that hold a given document.

Shape letters: B samples, F fragments (a document's part in a sample).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data.dataset import Dataset
from data.document_names import Place


@dataclass(frozen=True)
class Span:
    """The tokens [first, stop) of a token file, which lie in one document and are inputs of one sample.

    Each but the last predicts the next one; the last predicts the token ``stop``, where the document has one.
    """

    sample: int  # its number in the training order
    file: int  # its number in the dataset
    first: int
    stop: int
    document: int  # its number in the file
    offset: int  # tokens of the document before ``first``


@dataclass(frozen=True)
class DocumentPart:
    """A document's tokens among a sample's input."""

    row: int  # the sample's place among those that were asked for
    first: int  # its first position in the sample
    stop: int  # the position after its last one
    source: str  # its name in metrics
    file: str  # a token file's prefix
    document: int  # its number in that file, from 0


def spans_of(dataset: Dataset, indices: np.ndarray) -> Iterator[Span]:
    """The spans of these samples, in their order. Raises DataError where a file's index contradicts itself."""
    row_F, file_F, first_F, stop_F, _ = dataset.fragments(indices)
    numbers = np.asarray(indices)[row_F].tolist(), file_F.tolist(), first_F.tolist(), stop_F.tolist()
    for sample, file, first, stop in zip(*numbers, strict=True):
        document = dataset.files[file].document_of(first)
        offset = first - dataset.files[file].document_range(document)[0]
        yield Span(sample, file, first, stop, document, offset)


def document_parts(dataset: Dataset, indices: np.ndarray) -> list[DocumentPart]:
    """The parts of documents that make up these samples' input tokens, sample after sample.

    The samples must be distinct. Documents that data.without leaves out are not listed.
    """
    row_F, file_F, first_F, stop_F, offset_F = (each.tolist() for each in dataset.fragments(indices))
    found = []
    for row, file, first, stop, offset in zip(row_F, file_F, first_F, stop_F, offset_F, strict=True):
        if dataset.left_out.holds(file, first):
            continue
        source, tokens = dataset.names[dataset.file_sources[file]], dataset.files[file]
        document = tokens.document_of(first)
        found.append(DocumentPart(row, offset, offset + stop - first, source, str(tokens.prefix), document))
    return found


def samples_with(dataset: Dataset, place: Place, consumed: int) -> list[Span]:
    """The spans of the samples before ``consumed`` that hold tokens of ``place``, cut to it, in the training order."""
    found = []
    first_of_document = dataset.files[place.file].document_range(place.document)[0]
    for sample, first, stop in dataset.numbers_of(place.file, place.first, place.stop, consumed):
        found.append(Span(sample, place.file, first, stop, place.document, first - first_of_document))
    return found


def document_name(dataset: Dataset, file: int, document: int) -> str:
    """The document's name, SOURCE/FILE:NUMBER."""
    return dataset.document_names.of_document(file, document)


def find_document(dataset: Dataset, name: str, key: str) -> Place:
    """The document with the name SOURCE/FILE:NUMBER. Raises DataError, which calls it ``key``, where there is none."""
    return dataset.document_names.find(name, key)
