"""A reference implementation of samples and batches in plain Python, one token at a time, to compare data/ with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.batch import Batch
from data.tokenfile import HEADER, MAGIC, VERSION
from data.tokenwriter import TokenFileWriter

Documents = Sequence[Sequence[int]]
ARRAYS = ("tokens_BS", "targets_BS", "positions_BS", "documents_BS")


@dataclass
class Arrays:
    """The arrays of a batch, as they must be or with a planted fault."""

    tokens_BS: np.ndarray
    targets_BS: np.ndarray
    positions_BS: np.ndarray
    documents_BS: np.ndarray

    @classmethod
    def changed(cls, batch: "Batch | Arrays", change: Callable[[np.ndarray], np.ndarray]) -> "Arrays":
        """The batch with ``change`` applied to each array."""
        return cls(*(change(getattr(batch, name)) for name in ARRAYS))


def write_token_file(prefix: Path, documents: Documents, dtype: type = np.uint16) -> Path:
    """Writes a token file of these documents, one sequence each; returns its prefix."""
    writer = TokenFileWriter(prefix, np.dtype(dtype))
    for document in documents:
        writer.add(document)
    writer.finish()
    return prefix


def write_foreign_file(prefix: Path, documents: Sequence[Documents], dtype: type = np.uint16, code: int = 8) -> Path:
    """Writes a token file as another program would, where a document holds any number of sequences; returns its prefix.

    ``code`` is the dtype's number in the index.
    """
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    itemsize = np.dtype(dtype).itemsize
    pointers = np.cumsum([0, *lengths[:-1].tolist()], dtype=np.int64)[: len(lengths)] * itemsize
    indices = np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64)
    flat = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(np.array(flat, dtype).tobytes())
    header = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(indices))
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + indices.tobytes())
    return prefix


def slow_samples(documents: Documents, seq_len: int) -> list[dict[str, list[int]]]:
    """Every sample of one token file, in order."""
    tokens = [(token, number) for number, document in enumerate(documents) for token in document]
    samples = []
    start = 0
    while start + 1 < len(tokens):
        samples.append(_slow_sample(tokens[start : start + seq_len + 1], seq_len))
        start += seq_len
    return samples


def _slow_sample(window: list[tuple[int, int]], seq_len: int) -> dict[str, list[int]]:
    sample: dict[str, list[int]] = {"tokens_BS": [], "targets_BS": [], "positions_BS": [], "documents_BS": []}
    position, number = 0, 0
    for i in range(seq_len):
        if i >= len(window):
            token, target, place, document = 0, -100, 0, -1
        else:
            if i > 0 and window[i][1] != window[i - 1][1]:
                position, number = 0, number + 1
            token, place, document = window[i][0], position, number
            followed = i + 1 < len(window) and window[i + 1][1] == window[i][1]
            target = window[i + 1][0] if followed else -100
            position += 1
        for name, value in zip(sample, (token, target, place, document), strict=True):
            sample[name].append(value)
    return sample


def slow_batch(samples: Sequence[dict[str, list[int]]], seq_len: int) -> Arrays:
    """The samples stacked to a batch, with the dtypes that data/ gives."""
    dtypes = {"tokens_BS": np.int64, "targets_BS": np.int64, "positions_BS": np.int32, "documents_BS": np.int32}
    columns = {name: [sample[name] for sample in samples] for name in dtypes}
    return Arrays(**{n: np.array(columns[n], dtype).reshape(len(samples), seq_len) for n, dtype in dtypes.items()})


def assert_same(actual: Batch | Arrays, expected: Batch | Arrays) -> None:
    """Asserts that all four arrays agree in dtype, shape and every element."""
    for name in ARRAYS:
        a, b = getattr(actual, name), getattr(expected, name)
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)
