"""Documents that are left out: their tokens are padding wherever they lie, and nothing else of a sample changes."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batch import IGNORED, PADDING, Batch
from data.config import DataConfig, SourceConfig
from data.dataset import Dataset, open_dataset
from data.errors import DataError
from data.prepare import prepare
from data.spans import document_name
from data.without import LeftOutParts, Listed, find_listed, hash_of_list, list_text, parse_list, read_list
from data_reference import write_foreign_file, write_token_file

Packing = Literal["sequential", "best_fit", "one_document"]
N_SAMPLES = 60
LENGTHS = np.random.default_rng(0).integers(0, 30, 20).tolist()


def write_files(folder: Path, changed: tuple[int, ...] = ()) -> None:
    """Documents of many lengths, of several sequences, and empty ones; other tokens in those of ``changed``."""
    draw = np.random.default_rng(1)
    documents = [draw.integers(0, 90, int(n)) for n in LENGTHS]
    documents = [(each + 1) % 90 if number in changed else each for number, each in enumerate(documents)]
    write_token_file(folder / "a", [each.tolist() for each in documents])
    write_foreign_file(folder / "b", [[[1, 2], [3]], [], [[]], [[4] * 29, []], [[5]]])


def open_files(folder: Path, seq_len: int, without: Path | None = None, packing: Packing = "sequential") -> Dataset:
    sources = (SourceConfig(path=str(folder / "a"), weight=0.7), SourceConfig(path=str(folder / "b"), weight=0.4))
    config = DataConfig(
        seq_len=seq_len,
        sources=sources,
        without=str(without) if without is not None else None,
        packing=packing,
        token_dir=str(folder / "tokens"),
    )
    if packing != "sequential":
        prepare(config, vocab_size=96)
    return open_dataset(config, seed=4, vocab_size=96, split="train")


def arrays(batch: Batch) -> list[np.ndarray]:
    return [batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS]


def masked_by_hand(dataset: Dataset, names: set[str], indices: np.ndarray) -> list[np.ndarray]:
    """The whole batch with padding written over each part of these documents."""
    found = [each.copy() for each in arrays(dataset.read(indices))]
    for row, file, first, stop, offset in zip(*(each.tolist() for each in dataset.fragments(indices)), strict=True):
        if document_name(dataset, file, dataset.files[file].document_of(first)) in names:
            for each, filling in zip(found, (0, IGNORED, 0, PADDING), strict=True):
                each[row, offset : offset + stop - first] = filling
    return found


def write_names(folder: Path, names: list[str]) -> Path:
    path = folder / "list.jsonl"
    path.write_text("".join(json.dumps({"document": name, "why": "\x1b[2J"}) + "\n" for name in names))
    return path


def compare_by_hand(folder: Path, seq_len: int, numbers: list[int], packing: Packing = "sequential") -> None:
    write_files(folder)
    whole, indices = open_files(folder, seq_len, packing=packing), np.arange(N_SAMPLES)
    every = [f"a/a:{n}" for n in range(len(LENGTHS))] + [f"b/b:{n}" for n in range(5)]
    names = [every[number] for number in numbers]
    dataset = open_files(folder, seq_len, write_names(folder, names), packing)
    batch, expected = dataset.read(indices), masked_by_hand(whole, set(names), indices)
    for ours, theirs in zip(arrays(batch), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert dataset.count(indices) == (int((expected[1] != IGNORED).sum()), int((expected[3] != PADDING).sum()))
    assert batch.has_padding == bool((expected[3] == PADDING).any())
    for depth, count in enumerate(dataset.count_further(indices, 3), 1):
        ahead = expected[1][:, depth:] != IGNORED
        same = expected[3][:, depth:] == expected[3][:, :-depth]
        assert count == int((ahead & same).sum())
    assert dataset.read(indices[7:9]).tokens_BS.tolist() == batch.tokens_BS[7:9].tolist()


@given(seq_len=st.sampled_from([1, 7, 50]), numbers=st.lists(st.integers(0, 24), min_size=1, max_size=25))
def test_left_out_tokens_are_padding_and_all_others_stay_as_they_were(tmp_path_factory, seq_len, numbers) -> None:
    compare_by_hand(tmp_path_factory.mktemp("files"), seq_len, numbers)


@pytest.mark.parametrize("packing", ["best_fit", "one_document"])
@pytest.mark.parametrize("seq_len", [1, 7, 50])
def test_left_out_documents_that_are_packed_are_padding_too(tmp_path: Path, packing: Packing, seq_len: int) -> None:
    compare_by_hand(tmp_path, seq_len, [0, 3, 5, 8, 9, 17, 23], packing)


def test_planted_a_part_that_begins_a_token_late_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    within = LeftOutParts.within
    shift = np.array([[0], [1], [0]])
    monkeypatch.setattr(LeftOutParts, "within", lambda self, *rest: within(self, *rest) + shift)
    with pytest.raises(AssertionError):
        compare_by_hand(tmp_path, 7, [0, 5, 23])


def test_what_left_out_documents_say_changes_no_bit(tmp_path: Path) -> None:
    names = [f"a/a:{number}" for number in (2, 3, 11)]
    path, found = write_names(tmp_path, names), []
    for changed in ((), (2, 3, 11)):
        write_files(tmp_path, changed)
        found.append(arrays(open_files(tmp_path, 7, path).read(np.arange(N_SAMPLES))))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_list_that_is_written_is_read_again(tmp_path: Path) -> None:
    write_files(tmp_path)
    dataset = open_files(tmp_path, 7)
    documents = find_listed(dataset.document_names, [Listed("b/b:0"), Listed("a/a:3"), Listed("a/a:3")], "--without")
    assert [each.document for each in documents] == ["a/a:3", "b/b:0"]
    (tmp_path / "list").write_text(list_text(documents, [{"share": 0.5}, {"share": 0.1}]))
    listed = read_list(tmp_path / "list", "--without")
    assert find_listed(dataset.document_names, listed, "--without") == documents
    assert hash_of_list(listed) == hash_of_list(reversed(listed)) != hash_of_list(listed[1:])


NO_LISTS = {
    "nothing": b"",
    "binary": bytes(range(256)),
    "yaml": b"documents:\n- a/a:3\n",
    "a number": b'{"document": 3}\n',
    "a list": b'["a/a:3"]\n',
    "tokens that are none": b'{"document": "a/a:3", "tokens": [1]}\n',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", NO_LISTS)
def test_a_file_that_is_no_list_is_refused_in_a_line(case: str) -> None:
    with pytest.raises(DataError) as found:
        parse_list(NO_LISTS[case], "--without=x")
    assert len(str(found.value).splitlines()) == 1 and "must" in str(found.value)


UNFIT = {
    '{"document": "a/a:20"}': "must end in a number from 0 to 19",
    '{"document": "a/a:3", "tokens": [0, 1]}': "must be tokens [0, 1] of its file, as listed",
    '{"document": "c/c:\\n"}': "must be FILE:NUMBER with FILE one of a/a, b/b",
}


@pytest.mark.parametrize("line", UNFIT)
def test_a_document_that_the_data_lack_is_refused_in_a_line(tmp_path: Path, line: str) -> None:
    write_files(tmp_path)
    (tmp_path / "list").write_text(line)
    with pytest.raises(DataError) as found:
        open_files(tmp_path, 7, tmp_path / "list")
    assert len(str(found.value).splitlines()) == 1 and UNFIT[line] in str(found.value)
