"""Datasets in which only some targets of a batch count in the loss: those of one document, of one token, or none.

Shape letters: B samples, S positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.batch import Batch
from data.dataset import Dataset


class Part(NamedTuple):
    """Positions [first, stop) of a sample, whose inputs are tokens of one document."""

    sample: int
    first: int
    stop: int


@dataclass(frozen=True)
class Document:
    """A document of a batch."""

    name: str  # SOURCE/FILE:NUMBER
    tokens: tuple[int, int]  # the half-open range of the whole document in its file
    parts: tuple[Part, ...]  # where it lies in the batch


def documents_of(dataset: Dataset, indices: np.ndarray) -> list[Document]:
    """The documents in these samples, in order, without those that the run leaves out (data.without)."""
    parts: dict[tuple[int, int], list[Part]] = {}
    for row, file, first, stop, offset in zip(*(each.tolist() for each in dataset.fragments(indices)), strict=True):
        if not dataset.left_out.holds(file, first):
            part = Part(int(indices[row]), offset, offset + stop - first)
            parts.setdefault((file, dataset.files[file].document_of(first)), []).append(part)
    names, files = dataset.document_names, dataset.files
    return [
        Document(names.of_document(file, number), files[file].document_range(number), tuple(found))
        for (file, number), found in parts.items()
    ]


class AimedDataset(Dataset):
    """A copy of a dataset in which only the targets at the positions of ``parts`` count; all else is the same."""

    def __init__(self, dataset: Dataset, parts: Sequence[Part]) -> None:
        vars(self).update(vars(dataset))
        self.kept: Mapping[int, list[Part]] = {}
        for part in parts:
            self.kept = {**self.kept, part.sample: [*self.kept.get(part.sample, []), part]}

    def read(self, indices: np.ndarray) -> Batch:
        """The batch of these samples, with the targets outside of ``parts`` masked."""
        batch = super().read(indices)
        is_target_BW = np.zeros(batch.window_BW.shape, bool)
        for row, sample in enumerate(indices.tolist()):
            for part in self.kept.get(sample, []):
                own = slice(part.first + 1, part.stop + 1)
                is_target_BW[row, own] = True if batch.is_target_BW is None else batch.is_target_BW[row, own]
        return Batch(batch.window_BW, batch.length_B, batch.find_fragments, batch.left_out_L, is_target_BW)
