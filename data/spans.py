"""Which documents samples are made of, and which samples are made of a document.

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
    first: int  # its first position in the sample, and the one after its last
    stop: int
    source: str  # its name in metrics
    file: str  # a token file's prefix
    document: int  # its number in that file, from 0


def spans_of(dataset: Dataset, indices: np.ndarray) -> Iterator[Span]:
    """The spans of these samples, in their order. Raises DataError where a file's index contradicts itself."""
    file_B, start_B, length_B = dataset.windows(indices)
    row_F, offset_F = dataset.boundaries.find(file_B, start_B, length_B)
    stop_B = start_B + np.minimum(length_B, dataset.seq_len)
    first_F = start_B[row_F] + offset_F
    is_last_F = np.append(row_F[1:] != row_F[:-1], True)[: len(row_F)]
    stop_F = np.where(is_last_F, stop_B[row_F], np.append(first_F[1:], 0)[: len(row_F)])
    numbers = np.asarray(indices)[row_F].tolist(), file_B[row_F].tolist(), first_F.tolist()
    for sample, file, first, stop in zip(*numbers, np.minimum(stop_F, stop_B[row_F]).tolist(), strict=True):
        if first < stop:  # a document may begin with the token that is only a target
            document = dataset.files[file].document_of(first)
            offset = first - dataset.files[file].document_range(document)[0]
            yield Span(sample, file, first, stop, document, offset)


def document_parts(dataset: Dataset, indices: np.ndarray) -> list[DocumentPart]:
    """The parts of documents that these samples' input tokens are, sample after sample; no sample is there twice.

    But for documents that are left out.
    """
    _, start_B, _ = dataset.windows(indices)
    rows = {
        sample: (row, start) for row, (sample, start) in enumerate(zip(indices.tolist(), start_B.tolist(), strict=True))
    }
    found = []
    for span in spans_of(dataset, indices):
        if dataset.left_out.holds(span.file, span.first):
            continue
        row, start = rows[span.sample]
        source, file = dataset.names[dataset.file_sources[span.file]], str(dataset.files[span.file].prefix)
        found.append(DocumentPart(row, span.first - start, span.stop - start, source, file, span.document))
    return found


def samples_with(dataset: Dataset, place: Place, consumed: int) -> list[Span]:
    """The spans of the samples before ``consumed`` that hold tokens of ``place``, cut to it, in the training order."""
    found = []
    first_of_document = dataset.files[place.file].document_range(place.document)[0]
    for sample, start in dataset.numbers_of(place.file, place.first, place.stop, consumed):
        first, stop = max(start, place.first), min(start + dataset.seq_len, place.stop)
        found.append(Span(sample, place.file, first, stop, place.document, first - first_of_document))
    return found


def document_name(dataset: Dataset, file: int, document: int) -> str:
    """SOURCE/FILE:NUMBER."""
    return dataset.document_names.of_document(file, document)


def find_document(dataset: Dataset, name: str, key: str) -> Place:
    """The document of this name: see ``DocumentNames.find``."""
    return dataset.document_names.find(name, key)
