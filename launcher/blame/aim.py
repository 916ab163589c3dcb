"""Which targets of a batch count: those of one document, of one token, or none.

Shape letters: B samples, S positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.batch import IGNORED, Batch
from data.dataset import Dataset
from data.spans import spans_of


class Part(NamedTuple):
    """Positions [first, stop) of a sample, whose inputs are tokens of one document."""

    sample: int
    first: int
    stop: int


@dataclass(frozen=True)
class Document:
    """A document of a batch."""

    name: str  # SOURCE/FILE:NUMBER
    tokens: tuple[int, int]  # of its file: all of the document, half-open
    parts: tuple[Part, ...]  # where it lies in the batch


def documents_of(dataset: Dataset, indices: np.ndarray) -> list[Document]:
    """The documents of these samples, but for those that the run leaves out, in the order in which they come."""
    starts = dict(zip(indices.tolist(), dataset.windows(indices)[1].tolist(), strict=True))
    parts: dict[tuple[int, int], list[Part]] = {}
    for span in spans_of(dataset, indices):
        if not dataset.left_out.holds(span.file, span.first):
            begin = starts[span.sample]
            part = Part(span.sample, span.first - begin, span.stop - begin)
            parts.setdefault((span.file, span.document), []).append(part)
    names, files = dataset.document_names, dataset.files
    return [
        Document(names.of_document(file, number), files[file].document_range(number), tuple(found))
        for (file, number), found in parts.items()
    ]


class AimedDataset(Dataset):
    """A dataset of whose samples only the targets of some positions count; all else of them is as it was."""

    def __init__(self, dataset: Dataset, parts: Sequence[Part]) -> None:
        vars(self).update(vars(dataset))
        self.kept: Mapping[int, list[Part]] = {}
        for part in parts:
            self.kept = {**self.kept, part.sample: [*self.kept.get(part.sample, []), part]}

    def read(self, indices: np.ndarray) -> Batch:
        """As Dataset."""
        batch = super().read(indices)
        whole_BS = batch.targets_BS.copy()
        batch.targets_BS[...] = IGNORED
        for row, sample in enumerate(indices.tolist()):
            for part in self.kept.get(sample, []):
                batch.targets_BS[row, part.first : part.stop] = whole_BS[row, part.first : part.stop]
        return batch
