"""Megatron's own indexed dataset: it reads the token files that are written here, and what it writes is read here.

`pip install --no-deps megatron_core==0.16.1` brings it; it is no part of the tests' environment.
"""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from data.dataset import Dataset
from data.opened import Source
from data.tokenfile import CODES, TokenFile
from data.tokenwriter import TokenFileWriter
from data_reference import slow_samples, write_token_file

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]


@pytest.fixture(scope="module")
def indexed() -> ModuleType:
    reason = "megatron.core is not installed: pip install --no-deps megatron_core==0.16.1"
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason)


def documents_of(dtype: type, *, n: int = 40, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    top = min(np.iinfo(dtype).max, 100_000)
    return [random.integers(0, top, int(length)).tolist() for length in random.integers(1, 50, n)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_it_reads_what_is_written_here(indexed: ModuleType, tmp_path: Path, dtype: type) -> None:
    """A mask beside the file is no part of the format, and changes nothing."""
    documents = documents_of(dtype)
    writer = TokenFileWriter(tmp_path / "ours", np.dtype(dtype), has_mask=True)
    for document in documents:
        writer.add(document, np.arange(len(document)) % 2 == 0)
    writer.finish()
    theirs = indexed.IndexedDataset(str(tmp_path / "ours"))
    assert len(theirs) == len(documents)
    assert [theirs[number].tolist() for number in range(len(theirs))] == documents
    assert theirs[0].dtype == dtype
    assert theirs.document_indices.tolist() == list(range(len(documents) + 1))
    assert theirs.sequence_lengths.tolist() == list(map(len, documents))
    assert theirs.get(3, offset=0, length=1).tolist() == documents[3][:1]


def build(indexed: ModuleType, prefix: Path, documents: list[list[list[int]]], dtype: type) -> Path:
    """As its preprocessing tool does: each document a number of sequences."""
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        flat = [token for sequence in document for token in sequence]
        builder.add_document(torch.tensor(flat), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_it_writes_is_read_here(indexed: ModuleType, tmp_path: Path, dtype: type) -> None:
    whole = documents_of(dtype)
    cut = [[each[:3], each[3:]] if len(each) > 3 else [each] for each in whole]
    file = TokenFile(build(indexed, tmp_path / "theirs", cut, dtype))
    assert (file.dtype, file.n_documents, file.n_tokens) == (np.dtype(dtype), len(whole), sum(map(len, whole)))
    for number, document in enumerate(whole):
        first, stop = file.document_range(number)
        assert file.tokens[first:stop].tolist() == document
    dataset = Dataset([Source(1.0, (file,), trusted=False)], seq_len=16, seed=0, vocab_size=200_000, shuffled=False)
    for number, sample in enumerate(slow_samples(whole, 16)):
        batch = dataset.read(np.array([number]))
        for name, values in sample.items():
            key = name if name.endswith("_BS") else f"{name}_BS"
            assert getattr(batch, key)[0].tolist() == values


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_both_write_the_same_bytes(indexed: ModuleType, tmp_path: Path, dtype: type) -> None:
    documents = documents_of(dtype)
    ours = write_token_file(tmp_path / "ours", documents, dtype)
    theirs = build(indexed, tmp_path / "theirs", [[each] for each in documents], dtype)
    for end in ("bin", "idx"):
        assert Path(f"{ours}.{end}").read_bytes() == Path(f"{theirs}.{end}").read_bytes()


def test_files_that_it_has_put_together_are_read_here(indexed: ModuleType, tmp_path: Path) -> None:
    """As its merging tool does, of one file from here and one of its own."""
    one, other = documents_of(np.int32, seed=1), documents_of(np.int32, seed=2)
    write_token_file(tmp_path / "one", one, np.int32)
    build(indexed, tmp_path / "other", [[each] for each in other], np.int32)
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "both.bin"), dtype=np.int32)
    for name in ("one", "other"):
        builder.add_index(str(tmp_path / name))
    builder.finalize(str(tmp_path / "both.idx"))
    file = TokenFile(tmp_path / "both")
    ranges = [file.document_range(number) for number in range(file.n_documents)]
    assert [file.tokens[first:stop].tolist() for first, stop in ranges] == one + other


def test_its_codes_and_its_choice_of_width_are_those_here(indexed: ModuleType) -> None:
    for dtype, code in CODES.items():
        assert indexed.DType.dtype_from_code(code) == dtype.type
    assert indexed.DType.optimal_dtype(65_499) == np.uint16  # above it 32 bits, which here begin at 65,537
    assert indexed.DType.optimal_dtype(65_537) == np.int32


def test_planted_an_index_of_which_a_document_lacks_a_token_is_seen(indexed: ModuleType, tmp_path: Path) -> None:
    documents = documents_of(np.int32)
    ours = write_token_file(tmp_path / "ours", documents, np.int32)
    content = bytearray(Path(f"{ours}.idx").read_bytes())
    lengths = np.frombuffer(content, np.int32, len(documents), 34)
    lengths[-2] -= 1
    Path(f"{ours}.idx").write_bytes(content)
    theirs = indexed.IndexedDataset(str(ours))
    assert [theirs[number].tolist() for number in range(len(theirs))] != documents
