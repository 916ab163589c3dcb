"""Batches against the same rules written in plain Python, and faults planted to see that the comparison notices."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import boundaries
from data.batch import IGNORED, Batch
from data.boundaries import Boundaries
from data.config import DataConfig, SourceConfig
from data.dataset import Dataset, open_dataset
from data.errors import DataError
from data.opened import Source
from data.order import permutation_key
from data.prepared import source_names
from data.tokenfile import TokenFile
from data_reference import ARRAYS, Arrays, assert_same, slow_batch, slow_samples, write_foreign_file, write_token_file

VOCAB = 1000
# Of the batches that were read on 2026-11-22, before their arrays were made one by one as they are asked for.
HASHES = {
    0: ("d422a50a77466dcd", "9de5e271a1a09e55"),
    4090: ("c3c6a91d1d942720", "b2d9b22ece5e1264"),
    1000000000: ("eade5fd37d48cad1", "adccecda82afc2cf"),
}


def tokens(lengths: list[int], first: int = 1) -> list[list[int]]:
    """Documents of these lengths, whose tokens count up from ``first``."""
    flat = iter(range(first, first + sum(lengths)))
    return [[next(flat) for _ in range(n)] for n in lengths]


def open_plain(prefixes: list[Path], seq_len: int) -> Dataset:
    """The files as one source, its samples in plain order."""
    source = Source(1.0, tuple(TokenFile(p) for p in prefixes), trusted=False)
    return Dataset([source], seq_len=seq_len, seed=0, vocab_size=VOCAB, shuffled=False)


def open_prefixes(prefixes: list[Path], seq_len: int, weights: list[float] | None = None, seed: int = 0) -> Dataset:
    """The files as training sources of their own."""
    weights = weights or [1.0] * len(prefixes)
    sources = tuple(SourceConfig(path=str(p), weight=w) for p, w in zip(prefixes, weights, strict=True))
    return open_dataset(DataConfig(seq_len=seq_len, sources=sources), seed=seed, vocab_size=VOCAB, split="train")


corpora = st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=3)


@given(corpus=corpora, seq_len=st.integers(1, 12), in_place=st.booleans(), seed=st.integers(0, 99))
def test_batches_equal_the_slow_reference(
    tmp_path_factory: pytest.TempPathFactory, corpus: list[list[int]], seq_len: int, in_place: bool, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("t")
    documents = [tokens(lengths, 1 + 100 * i) for i, lengths in enumerate(corpus)]
    prefixes = [
        write_token_file(folder / str(i), file, [np.uint16, np.int32][i % 2]) for i, file in enumerate(documents)
    ]
    dataset = open_plain(prefixes, seq_len)
    if in_place:
        dataset._boundaries = Boundaries(dataset._files, max_in_memory=-1)
    expected = [sample for file in documents for sample in slow_samples(file, seq_len)]
    assert dataset.n_samples == len(expected)
    order = np.random.default_rng(seed).permutation(len(expected))
    batch = dataset.read(order)
    assert_same(batch, slow_batch([expected[i] for i in order], seq_len))
    counted = int((batch.targets_BS != IGNORED).sum()), int((batch.documents_BS >= 0).sum())
    assert dataset.count(order) == counted
    is_target_BS = batch.targets_BS != IGNORED
    further = [
        sum(int(is_target_BS[:, t : t + k + 1].all(1).sum()) for t in range(seq_len - k) if k < seq_len)
        for k in (1, 2, 3)
    ]
    assert dataset.count_further(order, 3) == further


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=8), st.integers(1, 9), st.booleans())
def test_foreign_files_with_several_sequences_in_a_document(
    tmp_path_factory: pytest.TempPathFactory, shape: list[list[int]], seq_len: int, in_place: bool
) -> None:
    folder = tmp_path_factory.mktemp("t")
    flat = iter(range(1, 999))
    nested = [[[next(flat) for _ in range(n)] for n in document] for document in shape]
    dataset = open_plain([write_foreign_file(folder / "x", nested)], seq_len)
    if in_place:
        dataset._boundaries = Boundaries(dataset._files, max_in_memory=-1)
    expected = slow_samples([[t for sequence in document for t in sequence] for document in nested], seq_len)
    assert_same(dataset.read(np.arange(dataset.n_samples)), slow_batch(expected, seq_len))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 9))
def test_each_token_is_predicted_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int
) -> None:
    documents = tokens(lengths)
    dataset = open_plain([write_token_file(tmp_path_factory.mktemp("t") / "x", documents)], seq_len)
    targets = dataset.read(np.arange(dataset.n_samples)).targets_BS
    assert sorted(targets[targets != IGNORED].tolist()) == [t for d in documents for t in d[1:]]


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    lengths = ([7, 3, 11, 2], [30, 1, 4], [9] * 5)
    return [write_token_file(tmp_path / str(i), tokens(n, 1 + 100 * i)) for i, n in enumerate(lengths)]


def test_sources_keep_their_shares_and_visit_everything_once_an_epoch(three: list[Path]) -> None:
    dataset = open_prefixes(three, 4, weights=[1.0, 2.0, 5.0])
    batch = dataset.read(np.arange(8 * 66))
    first = batch.tokens_BS[:, 0]
    assert Counter((first // 100).tolist()) == {0: 66, 1: 132, 2: 330}
    for source, n_samples in enumerate((6, 9, 11)):
        visits = first[first // 100 == source]
        n_epochs = len(visits) // n_samples
        epochs = visits[: n_epochs * n_samples].reshape(n_epochs, n_samples)
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == n_epochs  # an order of its own each time
        assert all(sorted(epoch) == sorted(epochs[0].tolist()) for epoch in epochs.tolist())
        assert len(set(epochs[0].tolist())) == n_samples


def test_a_sample_depends_on_its_number_and_seed_only(three: list[Path]) -> None:
    dataset, again = open_prefixes(three, 4), open_prefixes(three, 4)
    whole = dataset.read(np.arange(200))
    order = np.random.default_rng(0).permutation(200)
    assert_same(again.read(order), Arrays.changed(whole, lambda array: array[order]))
    ones = np.concatenate([again.read(np.array([i])).tokens_BS for i in range(200)])
    np.testing.assert_array_equal(ones, whole.tokens_BS)
    assert not np.array_equal(open_prefixes(three, 4, seed=1).read(np.arange(200)).tokens_BS, whole.tokens_BS)


def test_blocks_change_nothing(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are worked out a block at a time: across their borders and within them the samples are the same."""
    whole = open_prefixes(three, 4, weights=[1.0, 2.0, 4.0]).read(np.arange(50))
    monkeypatch.setattr("data.dataset.BLOCK", 7)
    dataset = open_prefixes(three, 4, weights=[1.0, 2.0, 4.0])
    for part in (np.arange(50), np.arange(7), np.arange(5, 9), np.arange(13, 8, -1), np.array([3, 49, 20])):
        assert_same(dataset.read(part), Arrays.changed(whole, lambda array, part=part: array[part]))


def test_far_steps_cost_no_more_than_near_ones(three: list[Path]) -> None:
    dataset = open_prefixes(three, 4, weights=[0.1, 0.2, 0.7])
    far = dataset.read(np.arange(10**15, 10**15 + 8))
    assert far.tokens_BS.shape == (8, 4)


def test_empty_batches_and_wrong_numbers(three: list[Path]) -> None:
    dataset = open_plain(three, 4)
    assert dataset.read(np.arange(0)).tokens_BS.shape == (0, 4)
    assert dataset.count(np.arange(0)) == (0, 0)
    for wrong in (-1, dataset.n_samples):
        with pytest.raises(IndexError, match="from 0 to 25"):
            dataset.read(np.array([wrong]))


def test_batches_may_be_written_to_and_do_not_share_memory(three: list[Path]) -> None:
    dataset = open_plain(three, 4)
    first, second = dataset.read(np.arange(3)), dataset.read(np.arange(3))
    for name in ARRAYS:  # the targets are made after the tokens were written to
        assert getattr(first, name).flags.c_contiguous
        assert_same(Arrays(*(getattr(second, n) if n != name else getattr(first, n) for n in ARRAYS)), second)
        getattr(first, name)[...] = 7
    assert_same(dataset.read(np.arange(3)), second)


def hash_of(batch: Batch) -> str:
    """Of the four arrays' types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        array = getattr(batch, name)
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def test_batches_stay_what_they_were(tmp_path: Path) -> None:
    """Three sources of two types, full and short windows, in one block of places and across two, to the last byte."""
    draw, sources = np.random.default_rng(7), []
    for number, (dtype, n) in enumerate(((np.uint16, 300), (np.int32, 120), (np.uint16, 5))):
        documents = [draw.integers(0, 1000, int(k)).tolist() for k in draw.integers(0, 60, n)]
        sources.append(write_token_file(tmp_path / str(number), documents, dtype))
    mixed, lone = open_prefixes(sources, 16, [5.0, 2.0, 0.5], seed=3), open_prefixes(sources[:1], 64, seed=3)
    found = {
        first: (hash_of(mixed.read(np.arange(first, first + 32))), hash_of(lone.read(np.arange(first, first + 8))))
        for first in (0, 4090, 10**9)
    }
    assert found == HASHES


def test_only_the_arrays_asked_for_are_made(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and whether there is padding need no search; the other arrays share one."""
    searches = []
    find = Boundaries.find
    monkeypatch.setattr(Boundaries, "find", lambda self, *windows: searches.append(1) or find(self, *windows))
    batch = open_prefixes(three, 4).read(np.arange(30))
    assert batch.tokens_BS.shape == (30, 4)
    has_padding = batch.has_padding
    assert not searches
    assert has_padding == bool((batch.documents_BS < 0).any())
    assert all(getattr(batch, name) is getattr(batch, name) for name in ARRAYS)
    assert len(searches) == 1


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["8x2048x1", "16x8192x1"])
def test_reading_costs_little_more_than_copying(shape: str) -> None:
    """The two shapes that cost most, in processor time, with the ratio that docs/data.md promises."""
    script = Path(__file__).parents[2] / "benchmarks" / "data_reading.py"
    command = [sys.executable, str(script), f"--shape={shape}", "--tokens=20000000", "--rounds=3"]
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
    (found,) = json.loads(done.stdout)["shapes"]
    assert found["ratio"] <= 1.25 and found["thread_ratio"] <= 1.25, found


def test_an_index_in_the_file_is_searched_by_the_read(three: list[Path]) -> None:
    """So that a contradiction in it is told by the read, not by whoever asks for targets."""
    dataset = open_plain(three, 4)
    dataset._boundaries = Boundaries(dataset._files, max_in_memory=-1)
    lengths = dataset._files[0]._lengths
    broken = np.array(lengths, np.int32)
    broken[1] += 1
    dataset._files[0]._lengths = memoryview(broken)
    with pytest.raises(DataError, match="near sequence"):
        dataset.read(np.arange(4))


def test_ids_above_the_vocabulary_are_refused_as_they_are_read(tmp_path: Path) -> None:
    prefix = write_token_file(tmp_path / "x", [[1] * 10, [2, 3, 1000, 5]])
    dataset = open_plain([prefix], 5)
    dataset.read(np.array([0]))
    with pytest.raises(DataError) as caught:
        dataset.read(np.array([0, 2]))
    line = f"model.vocab_size=1000 is smaller than the largest token id, 1000, in {prefix}.bin and must be above it; "
    assert str(caught.value) == line + "set model.vocab_size to 1001 or more"


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    prefix = write_foreign_file(tmp_path / "x", [[[1, -5, 3]]], np.int32, code=4)
    with pytest.raises(DataError, match="token id -5 must not be negative"):
        open_plain([prefix], 5).read(np.array([0]))


def test_a_source_without_a_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.sources\[0\].path=.* holds fewer than two tokens"):
        open_prefixes([write_token_file(tmp_path / "x", [[1]])], 4)


def test_heldout_path_and_its_absence(three: list[Path]) -> None:
    sources = (SourceConfig(path=str(three[0])),)
    config = DataConfig(seq_len=4, sources=sources, heldout_path=str(three[1]))
    heldout = open_dataset(config, seed=3, vocab_size=VOCAB, split="heldout")
    assert_same(heldout.read(np.arange(9)), open_plain([three[1]], 4).read(np.arange(9)))
    with pytest.raises(DataError, match=r"leave nothing to evaluate on; set data\.heldout_path"):
        open_dataset(DataConfig(seq_len=4, sources=sources), seed=3, vocab_size=VOCAB, split="heldout")


def compare_with_reference(folder: Path) -> None:
    """What the planted faults below must make fail."""
    documents = tokens([7, 3, 11, 2, 5])
    dataset = open_plain([write_token_file(folder / "x", documents)], 6)
    expected = slow_batch(slow_samples(documents, 6), 6)
    whole = dataset.read(np.arange(dataset.n_samples))
    assert_same(whole, expected)
    halves = [dataset.read(part) for part in np.array_split(np.arange(dataset.n_samples), 2)]
    assert_same(Arrays(*(np.concatenate([getattr(h, n) for h in halves]) for n in ARRAYS)), expected)
    counted = int((expected.targets_BS != IGNORED).sum()), int((expected.documents_BS >= 0).sum())
    assert dataset.count(np.arange(dataset.n_samples)) == counted


def test_the_comparison_passes_without_a_fault(tmp_path: Path) -> None:
    compare_with_reference(tmp_path)


def _shift_labels(of):
    def shifted(window_BW, length_B, find, *rest):
        batch = of(window_BW, length_B, find, *rest)
        return Arrays(batch.tokens_BS, np.roll(batch.targets_BS, 1, axis=1), batch.positions_BS, batch.documents_BS)

    return shifted


def _positions_run_on(of):
    def running(window_BW, length_B, find, *rest):
        batch = of(window_BW, length_B, find, *rest)
        ramp = np.broadcast_to(np.arange(batch.tokens_BS.shape[1], dtype=np.int32), batch.tokens_BS.shape)
        positions = np.where(batch.documents_BS < 0, 0, ramp).astype(np.int32)
        return Arrays(batch.tokens_BS, batch.targets_BS, positions, batch.documents_BS)

    return running


def _boundary_off_by_one(of):
    def early(find):
        row_F, offset_F = find()
        return row_F, np.where(offset_F > 1, offset_F - 1, offset_F)

    return lambda window_BW, length_B, find, *rest: of(window_BW, length_B, lambda: early(find), *rest)


def _crossings_count(of):
    def counting(window_BW, length_B, find, *rest):
        batch = of(window_BW, length_B, find, *rest)
        real = np.arange(batch.tokens_BS.shape[1]) < (length_B - 1)[:, None]
        targets = np.where(real, window_BW[:, 1:], IGNORED).astype(np.int64)
        return Arrays(batch.tokens_BS, targets, batch.positions_BS, batch.documents_BS)

    return counting


def _padding_is_routed(of):
    return lambda window_BW, length_B, find, *rest: of(
        window_BW, np.full_like(length_B, window_BW.shape[1]), find, *rest
    )


@pytest.mark.parametrize(
    "fault", [_shift_labels, _positions_run_on, _boundary_off_by_one, _crossings_count, _padding_is_routed]
)
def test_planted_packing_fault_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault) -> None:
    monkeypatch.setattr("data.dataset.Batch", fault(Batch))
    with pytest.raises(AssertionError):
        compare_with_reference(tmp_path)


def test_planted_boundary_beyond_the_window_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes the first document after the window for one inside it."""
    find = boundaries.Boundaries.find
    monkeypatch.setattr(
        boundaries.Boundaries, "find", lambda self, file, start, length: find(self, file, start, length + 1)
    )
    with pytest.raises((AssertionError, ValueError)):
        compare_with_reference(tmp_path)


def test_planted_order_that_depends_on_the_batch_size_is_noticed(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    locate = Dataset._locate
    monkeypatch.setattr(Dataset, "_locate", lambda self, indices: locate(self, indices + len(indices)))
    with pytest.raises(AssertionError):
        test_a_sample_depends_on_its_number_and_seed_only(three)


def test_planted_epoch_that_repeats_the_first_order_is_noticed(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.shuffle.permutation_key", lambda seed, source, epoch: permutation_key(seed, source, 0))
    with pytest.raises(AssertionError):
        test_sources_keep_their_shares_and_visit_everything_once_an_epoch(three)


def test_planted_wrong_block_is_noticed(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of places that is looked up one place off."""
    locate = Dataset._locate
    monkeypatch.setattr(Dataset, "_locate", lambda self, indices: np.roll(locate(self, indices), len(indices) // 2, 1))
    with pytest.raises(AssertionError):
        test_a_sample_depends_on_its_number_and_seed_only(three)


@given(
    consumed=st.integers(0, 400),
    skipped=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)).map(lambda r: (r[0], sum(r))), max_size=3),
)
def test_shares_and_epochs_are_those_of_the_samples(
    two_sources: Dataset, consumed: int, skipped: list[tuple[int, int]]
) -> None:
    """Counted sample by sample."""
    source_N, nth_N = two_sources.stages.deal(np.arange(consumed))
    taken = [n for n in range(consumed) if not any(first <= n < last for first, last in skipped)]
    row = two_sources.progress(consumed, skipped)
    for number, name in enumerate(("large", "small")):
        n_samples = np.diff(two_sources._source_bounds)[number]
        assert row[f"data/{name}/share"] == (source_N[taken] == number).sum() / max(1, len(taken))
        places = nth_N[source_N == number]
        assert row[f"data/{name}/epoch"] == (places.max() + 1 if len(places) else 0) / n_samples


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("t")
    sources = []
    for name, n_tokens, weight in (("large", 900, 3.0), ("small", 100, 0.7)):
        write_token_file(folder / name, [[1] * 10] * (n_tokens // 10))
        sources.append(SourceConfig(path=str(folder / name), weight=weight))
    return open_dataset(DataConfig(seq_len=8, sources=tuple(sources)), seed=0, vocab_size=300, split="train")


def test_sources_of_one_name_are_told_apart() -> None:
    paths = ("hf://a/web", "b/web", "${python_stdlib}/**/*.py")
    config = DataConfig(sources=tuple(SourceConfig(path=path) for path in paths))
    assert source_names(config) == ["0-web", "1-web", "2-python-stdlib"]
    assert source_names(replace(config, sources=config.sources[1:])) == ["web", "python-stdlib"]
