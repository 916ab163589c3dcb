"""Packed samples: no document cut without need, each token predicted once, the same index whoever makes it."""

import dataclasses
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import packed, packing
from data.batch import IGNORED, PADDING
from data.config import DataConfig, SourceConfig
from data.dataset import Dataset, open_dataset
from data.errors import DataError
from data.packed import is_packed, pack_path, read_packing, whole_hash, write_packing
from data.packing import best_fit, n_cut_in_sequence, pack
from data.prepare import prepare
from data.prepared import find_prepared, locate, verify
from data.spans import Place, document_parts, samples_with, spans_of
from data.tokenfile import TokenFile, fingerprint
from data_reference import write_foreign_file, write_token_file
from launcher.blame.aim import AimedDataset
from launcher.blame.aim import documents_of as blamed_documents
from launcher.training.batches import narrow

VOCAB = 1000
PACKED = pytest.mark.parametrize("packed_by", ["best_fit", "one_document"])


def documents_of(lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths, whose tokens count up from 1."""
    flat = iter(range(1, 1 + sum(lengths)))
    return [[next(flat) for _ in range(n)] for n in lengths]


def open_packed(prefixes: list[Path], seq_len: int, packed_by: str, seed: int = 0) -> Dataset:
    """The files as training sources of their own, prepared and opened as a run has them."""
    sources = tuple(SourceConfig(path=str(prefix)) for prefix in prefixes)
    config = DataConfig(seq_len=seq_len, sources=sources, packing=packed_by, token_dir=str(prefixes[0].parent / "t"))
    prepare(config, vocab_size=VOCAB)
    return open_dataset(config, seed=seed, vocab_size=VOCAB, split="train")


def slow_best_fit(lengths: list[int], room: int) -> int:
    """The bins that best-fit decreasing takes, piece by piece."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(free, at) for at, free in enumerate(left) if free >= length]
        if not fitting:
            left.append(room)
        _, at = min(fitting) if fitting else (room, len(left) - 1)
        left[at] -= length
    return len(left)


@pytest.mark.parametrize("seed", range(5))
def test_bins_are_as_few_as_best_fit_decreasing_makes_them(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(100):
        room = int(draw.integers(2, 41))
        lengths = draw.integers(2, room + 1, int(draw.integers(0, 61)))
        bins = best_fit(lengths, room)
        assert np.bincount(bins, lengths).max(initial=0) <= room
        assert len(set(bins.tolist())) == int(bins.max(initial=-1)) + 1 == slow_best_fit(lengths.tolist(), room)


@PACKED
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=25), seq_len=st.integers(1, 12))
def test_each_token_is_predicted_once_and_what_fits_is_whole(
    tmp_path_factory: pytest.TempPathFactory, packed_by: str, lengths: list[int], seq_len: int
) -> None:
    if max(lengths) < 2:
        lengths = [*lengths, 2]
    documents = documents_of(lengths)
    dataset = open_packed([write_token_file(tmp_path_factory.mktemp("t") / "x", documents)], seq_len, packed_by)
    indices = np.arange(dataset.n_samples)
    batch = dataset.read(indices)
    is_target_BS = batch.targets_BS != IGNORED
    assert sorted(batch.targets_BS[is_target_BS].tolist()) == [t for d in documents for t in d[1:]]
    np.testing.assert_array_equal(batch.targets_BS[is_target_BS], batch.tokens_BS[is_target_BS] + 1)
    assert dataset.count(indices) == (int(is_target_BS.sum()), int((batch.documents_BS != PADDING).sum()))
    whole = {tuple(d) for d in documents if 2 <= len(d) <= seq_len} | {
        tuple(d[:-1]) for d in documents if len(d) == seq_len + 1
    }
    parts, rows_of_documents = set(), []
    for tokens, numbers, positions in zip(batch.tokens_BS, batch.documents_BS, batch.positions_BS, strict=True):
        assert (np.diff(numbers[numbers >= 0]) >= 0).all()
        assert (tokens[numbers < 0] == 0).all() and (positions[numbers < 0] == 0).all()
        rows_of_documents.append(int(numbers.max()) + 1)
        for number in range(int(numbers.max()) + 1):
            parts.add(tuple(tokens[numbers == number].tolist()))
            assert positions[numbers == number].tolist() == list(range(int((numbers == number).sum())))
    assert whole <= parts
    if packed_by == "one_document":
        assert set(rows_of_documents) == {1}
    shares = dataset.packed
    assert shares is not None
    assert shares["padding"] == pytest.approx((batch.documents_BS == PADDING).mean())
    n_long = sum(len(d) > seq_len + 1 for d in documents)
    assert shares["cut"] == n_long / sum(len(d) > 1 for d in documents)
    assert shares["left_out"] == sum(len(d) == 1 for d in documents) / sum(lengths)


@PACKED
def test_documents_and_samples_lead_to_each_other(tmp_path: Path, packed_by: str) -> None:
    """Spans and parts are what batches hold; documents lead back to the spans, over several epochs and files."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 30, 20)
    prefixes = [write_token_file(tmp_path / "a", [draw.integers(0, 90, int(n)).tolist() for n in lengths])]
    prefixes.append(write_foreign_file(tmp_path / "b", [[[1, 2], [3]], [], [[]], [[4] * 29, []], [[5]]]))
    dataset = open_packed(prefixes, 7, packed_by, seed=4)
    indices = np.arange(70)
    batch, spans = dataset.read(indices), list(spans_of(dataset, indices))
    cut = []
    for tokens, numbers in zip(batch.tokens_BS, batch.documents_BS, strict=True):
        cut += [tokens[numbers == number].tolist() for number in range(int(numbers.max()) + 1)]
    assert [dataset.files[s.file].tokens[s.first : s.stop].tolist() for s in spans] == cut
    parts = document_parts(dataset, indices)
    assert [batch.tokens_BS[part.row, part.first : part.stop].tolist() for part in parts] == cut
    blamed = blamed_documents(dataset, indices)
    rows = sorted((part.sample, part.first, part.stop) for document in blamed for part in document.parts)
    assert rows == [(part.row, part.first, part.stop) for part in parts]
    for document in blamed[:5]:
        aimed = AimedDataset(dataset, document.parts).read(indices)
        expected_BS = np.full_like(batch.targets_BS, IGNORED)
        for part in document.parts:
            inside = part.sample, slice(part.first, part.stop)
            expected_BS[inside] = batch.targets_BS[inside]
        device = torch.device("cpu")
        for made in (narrow(aimed, device).made_on(device), narrow(aimed, device).spread(device)):
            np.testing.assert_array_equal(made.targets_BS, expected_BS)
            np.testing.assert_array_equal(made.next_BS, batch.targets_BS)
    found = []
    for number, file in enumerate(dataset.files):
        for document in range(file.n_documents):
            found += samples_with(dataset, Place(number, document, *file.document_range(document)), len(indices))
    assert sorted(map(dataclasses.astuple, found)) == sorted(map(dataclasses.astuple, spans))
    assert len(dataset.documents(indices[:3])) == int((batch.documents_BS[:3].max(1) + 1).sum())
    apart = dataset.windows(np.arange(dataset.n_samples)).T
    assert len(np.unique(dataset.windows(np.arange(2 * dataset.n_samples)).T, axis=0)) <= dataset.n_samples
    assert apart.shape == (dataset.n_samples, 4)


def test_an_index_is_the_same_bytes_whoever_makes_it(tmp_path: Path) -> None:
    """By one process, by several, and again after a half-written one was left."""
    draw, texts = np.random.default_rng(1), tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        words = draw.integers(0, 50, int(draw.integers(1, 400))).tolist()
        (texts / f"{number:02}.txt").write_text(" ".join(map(str, words)) + "\n")
    made = {}
    for name, workers in (("one", 1), ("two", 2)):
        source = SourceConfig(path=str(texts))
        config = DataConfig(
            seq_len=64, sources=(source,), packing="best_fit", token_dir=str(tmp_path / name), workers=workers,
            shard_bytes=1000,
        )  # fmt: skip
        assert find_prepared(config, 300) is None
        assert prepare(config, vocab_size=300) is not None
        made[name] = {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.pack")}
        assert len(made[name]) > 8
        assert find_prepared(config, 300) is not None
        lost = next((tmp_path / name).rglob("train-00000.*.pack"))
        lost.unlink()
        assert find_prepared(config, 300) is None
        prepare(config, vocab_size=300)
        assert lost.read_bytes() == made[name][lost.name]
        longer = dataclasses.replace(config, seq_len=32)
        with pytest.raises(DataError, match=r"best_fit-32.pack cannot be read .*; run `roundtable prepare`"):
            open_dataset(longer, seed=0, vocab_size=300, split="train")
    assert made["one"] == made["two"]


def test_a_packing_of_other_bytes_is_refused(tmp_path: Path) -> None:
    prefix = write_token_file(tmp_path / "x", documents_of([5, 9, 3]))
    dataset = open_packed([prefix], 4, "best_fit")
    assert dataset.n_samples
    path = pack_path(prefix, 4, "best_fit")
    sound = path.read_bytes()
    write_token_file(prefix, documents_of([9, 5, 3]))
    with pytest.raises(DataError, match="is the packing of another file than"):
        packed.read_packing(TokenFile(prefix), 4, "best_fit")
    write_token_file(prefix, documents_of([5, 9, 3]))
    for broken, words in (
        (sound[:-4], "bytes where"),
        (b"no" + sound[2:], "is no packing"),
        (sound[:20], "no packing"),
    ):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=words):
            packed.read_packing(TokenFile(prefix), 4, "best_fit")


def swapped(lengths: list[int], at: int) -> list[int]:
    return [*lengths[:at], lengths[at + 1], lengths[at], *lengths[at + 2 :]]


@pytest.mark.parametrize("small_bytes", [packed.SMALL_BYTES, 0])
def test_two_lengths_changed_in_the_middle_of_an_index_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    """At the next start, and where the index is small at each opening, too."""
    monkeypatch.setattr(packed, "SMALL_BYTES", small_bytes)
    lengths = [4] * 20_000
    lengths[17_000] = 2
    prefix = write_token_file(tmp_path / "x", [[1] * n for n in lengths])
    path = write_packing(prefix, 8, "best_fit")
    os.utime(path, (2e9, 2e9))
    assert is_packed(prefix, 8, "best_fit")
    write_token_file(prefix, [[1] * n for n in swapped(lengths, 17_000)])
    os.utime(f"{prefix}.idx", (2e9, 2e9))
    assert not is_packed(prefix, 8, "best_fit")
    if small_bytes:
        with pytest.raises(DataError, match="is the packing of another file than"):
            read_packing(TokenFile(prefix), 8, "best_fit")
    write_token_file(prefix, [[1] * n for n in lengths])
    os.utime(f"{prefix}.idx", (1e9, 1e9))
    os.utime(path, (1e9, 1e9))  # as where both were copied
    for hashed_whole in (1, 0):
        calls: list[Path] = []
        monkeypatch.setattr(packed, "whole_hash", lambda idx, calls=calls: (calls.append(idx), whole_hash(idx))[1])
        assert is_packed(prefix, 8, "best_fit")
        assert len(calls) == hashed_whole + (small_bytes > 0)


@pytest.mark.parametrize("lengths", [[5, 9, 3], []])
def test_a_flipped_bit_anywhere_in_a_packing_is_seen_where_hashes_are_compared(
    tmp_path: Path, lengths: list[int]
) -> None:
    prefix = write_token_file(tmp_path / "x", documents_of(lengths))
    config = DataConfig(seq_len=4, sources=(SourceConfig(path=str(prefix)),), packing="best_fit")
    path = write_packing(prefix, 4, "best_fit")
    sound = path.read_bytes()
    prepared = locate(config, 300)
    assert prepared is not None and verify(config, prepared) == []
    told = f"{path} must be as it was written; delete it, and run `roundtable prepare` with this config"
    for at, bit in itertools.product(range(len(sound)), (1, 4)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ bit]) + sound[at + 1 :])
        if at < len(packed.MAGIC):  # then it is none, or one of an earlier version, which would be shorter
            with pytest.raises(DataError):
                packed.read_packing(TokenFile(prefix), 4, "best_fit")
        else:
            assert verify(config, prepared) == [told]
    for cut in (sound[:-4], sound[:20], b""):
        path.write_bytes(cut)
        assert len(verify(config, prepared)) == 1


def test_a_packing_of_the_version_before_is_read(tmp_path: Path) -> None:
    prefix = write_token_file(tmp_path / "x", documents_of([5, 9, 3]))
    path = write_packing(prefix, 4, "best_fit")
    new = read_packing(TokenFile(prefix), 4, "best_fit")
    path.write_bytes(packed.SECOND_MAGIC + path.read_bytes()[len(packed.MAGIC) : -packed.TRAILER.size])
    assert is_packed(prefix, 4, "best_fit") and packed.is_sound(path)
    again = read_packing(TokenFile(prefix), 4, "best_fit")
    for name in ("first_piece", "start_P", "length_P"):
        np.testing.assert_array_equal(getattr(again, name), getattr(new, name))


def test_a_packing_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    prefix = write_token_file(tmp_path / "x", documents_of([5, 9, 3]))
    path = write_packing(prefix, 4, "best_fit")
    numbers, names = path.read_bytes(), ("first_piece", "start_P", "length_P")
    new = [getattr(read_packing(TokenFile(prefix), 4, "best_fit"), name).tolist() for name in names]
    seq_len, n_tokens, _, *counts, _ = packed.HEADER.unpack_from(numbers)[1:]
    mark = fingerprint(tmp_path / "x.idx")
    old = packed.OLD_HEADER.pack(packed.OLD_MAGIC, seq_len, n_tokens, mark, *counts)
    path.write_bytes(old + numbers[packed.HEADER.size : -packed.TRAILER.size])
    assert is_packed(prefix, 4, "best_fit")
    again = read_packing(TokenFile(prefix), 4, "best_fit")
    assert [getattr(again, name).tolist() for name in names] == new
    write_token_file(prefix, documents_of([9, 5, 3]))
    assert not is_packed(prefix, 4, "best_fit")


def test_a_far_sample_is_found_at_once(tmp_path: Path) -> None:
    """The order reaches any epoch; a block that ends the order is no longer than it."""
    dataset = open_packed([write_token_file(tmp_path / "x", documents_of([5, 9, 3, 14]))], 4, "best_fit")
    far = dataset.read(np.arange(10**12, 10**12 + dataset.n_samples)).tokens_BS
    near = dataset.read(np.arange(dataset.n_samples)).tokens_BS
    assert len(far) == len(near)


def test_cut_documents_in_sequence_are_counted() -> None:
    starts = np.array([0, 4, 5, 12])
    assert n_cut_in_sequence(starts, 16, 4) == 1  # the third alone: of the others no more than the last token is apart
    assert pack(starts, 16, 4, "best_fit").n_cut == 1


def test_planted_a_packing_that_overfills_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packing.best_fit
    monkeypatch.setattr(packing, "best_fit", lambda lengths, room: real(lengths, room + 1))
    made = pack(np.array([0, 3, 6, 9]), 12, 5, "best_fit")
    sizes = np.add.reduceat(made.length_P, made.first_piece[:-1])
    assert sizes.max() > 5


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_token_file(tmp_path / "x", documents_of([5]))

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.partial.os.fsync", no_room)
    with pytest.raises(DataError, match=r"must be written, and cannot be .*set data.packing=sequential"):
        write_packing(prefix, 4, "best_fit")
    assert not list(tmp_path.glob("*pack*"))


def test_planted_packing_that_nobody_makes_is_an_error():
    with pytest.raises(AssertionError, match="first_fit"):
        pack(np.array([0, 3]), 7, 4, "first_fit")  # type: ignore[arg-type]
