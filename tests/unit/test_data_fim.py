"""Fill in the middle, against its definition written out token by token."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

from chats import save_chat_tokenizer
from data.config import DataConfig, PackedBy, SourceConfig
from data.dataset import Dataset, open_dataset
from data.errors import DataError
from data.fim import Cut, FillInTheMiddle
from data.packed import write_packing
from data.prepare import prepare
from data.tokenwriter import TokenFileWriter

VOCAB = 512
PRE, MID, SUF = 3, 4, 5  # in the test's tokenizer
SEQ_LEN = 24


def write_file(prefix: Path, dtype: type = np.uint16, n_documents: int = 80, has_mask: bool = False) -> Path:
    random = np.random.default_rng(1)
    writer = TokenFileWriter(prefix, np.dtype(dtype), has_mask=has_mask)
    for n in random.integers(1, 60, n_documents):
        writer.add([*random.integers(10, 250, int(n)).tolist(), 0])
    writer.finish()
    return prefix


def a_config(folder: Path, packing: str = "sequential", seed: int = 0, **more) -> DataConfig:
    return DataConfig(
        seq_len=SEQ_LEN,
        packing=packing,
        sources=(SourceConfig(path=str(folder / "a")), SourceConfig(path=str(folder / "b"), weight=0.5)),
        tokenizer=str(folder / "tokenizer"),
        token_dir=str(folder / "tokens"),
        **{"fim_rate": 0.6, "fim_tokens": ("<pre>", "<suf>", "<mid>"), **more},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fim")
    save_chat_tokenizer(folder / "tokenizer")
    write_file(folder / "a")
    write_file(folder / "b", np.int32, 7)
    prepare(a_config(folder), vocab_size=VOCAB)
    packings: tuple[PackedBy, ...] = ("best_fit", "one_document")
    for packed_by in packings:
        for name in "ab":
            write_packing(folder / name, SEQ_LEN, packed_by)
    return folder


def opened(folder: Path, packing: str = "sequential", seed: int = 0, **more) -> Dataset:
    return open_dataset(a_config(folder, packing, **more), seed=seed, vocab_size=VOCAB, split="train")


def as_written(part: list[int]) -> tuple[str, list[int], list[int], list[int], list[int]]:
    """(order, prefix, middle, suffix, what follows) of a part that was rearranged, read off its own tokens."""
    pre, suf, mid = part.index(PRE), part.index(SUF), part.index(MID)
    assert pre == 0 and part.count(PRE) == part.count(SUF) == part.count(MID) == 1
    end = [0] if part[-1] == 0 else []
    last = part[mid + 1 : len(part) - len(end)]
    if suf == 1:
        return "spm", [], last, part[suf + 1 : mid], end
    return "psm", part[1:suf], last, part[suf + 1 : mid], end


@pytest.mark.parametrize("packing", ["sequential", "best_fit", "one_document"])
def test_every_part_is_what_the_paper_makes_of_it(folder: Path, packing: str) -> None:
    """It keeps its length and its end of text, gives up three tokens, and nothing comes from another document."""
    plain, dataset = opened(folder, packing, fim_rate=0.0), opened(folder, packing, fim_spm_share=0.3)
    indices = np.arange(2 * dataset.n_samples)  # two epochs
    before, after = plain.read(indices), dataset.read(indices)
    for name in ("positions_BS", "documents_BS", "length_B"):
        assert (getattr(before, name) == getattr(after, name)).all()
    assert ((before.targets_BS < 0) == (after.targets_BS < 0)).all()
    assert plain.count(indices) == dataset.count(indices)
    row_F, offset_F = after.find_fragments()
    n_parts = n_spm = n_fim = 0
    for at, (row, offset) in enumerate(zip(row_F.tolist(), offset_F.tolist(), strict=True)):
        is_last = at + 1 == len(row_F) or row_F[at + 1] != row
        stop = int(after.length_B[row]) if is_last else int(offset_F[at + 1])
        one, other = (each.window_BW[row, offset:stop].tolist() for each in (before, after))
        text = one[:-1] if one[-1] == 0 else one
        n_parts += len(text) > 3
        if one == other:
            continue
        order, prefix, middle, suffix, end = as_written(other)
        n_fim, n_spm = n_fim + 1, n_spm + (order == "spm")
        assert end == ([0] if one[-1] == 0 else [])
        if order == "psm":
            assert prefix + middle + suffix == text[:-3]
        else:
            assert middle + suffix == text[:-3]  # prefix and middle stand together
    assert n_fim / n_parts == pytest.approx(0.6, abs=0.06)
    cuts = [cut for *_, cut in dataset.cuts(indices)]
    assert len(cuts) == n_fim and n_spm >= sum(cut.is_spm for cut in cuts)  # an empty prefix makes the other look so
    assert sum(cut.is_spm for cut in cuts) / n_fim == pytest.approx(0.3, abs=0.1)


def test_cuts_are_even_and_parts_without_room_stay(folder: Path) -> None:
    dataset = opened(folder, fim_rate=1.0)
    fim, file = dataset.fim, dataset.files[0]
    assert fim is not None
    counts = np.zeros((6, 6), int)
    for epoch in range(6000):
        cut = fim.cut(file, 0, 0, 8, epoch)  # eight tokens, three of them given up: cuts from 0 to 5
        assert cut is not None and cut.first == 0 and (cut.c, cut.d) == (5, 8)
        counts[cut.a, cut.b] += 1
    expected = 6000 / 36
    both = np.where(np.eye(6, dtype=bool), expected, np.triu(np.full((6, 6), 2 * expected), 1))
    is_possible = both > 0
    assert counts[~is_possible].sum() == 0
    chi_square = ((counts - both)[is_possible] ** 2 / both[is_possible]).sum()
    assert chi_square < 45  # 20 degrees of freedom: above it once in a thousand
    assert [fim.cut(file, 0, 0, stop, 0) is None for stop in (1, 2, 3, 4)] == [True, True, True, False]


def digest(dataset: Dataset, groups: list[np.ndarray]) -> str:
    found = hashlib.sha256()
    for indices in groups:
        batch = dataset.read(indices)
        for row in zip(batch.tokens_BS, batch.targets_BS, strict=True):
            found.update(np.stack(row).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("packing", ["sequential", "best_fit"])
def test_a_samples_tokens_do_not_depend_on_who_reads_it_and_when(folder: Path, packing: str) -> None:
    indices = np.arange(90, 250)
    one = digest(opened(folder, packing), [indices])
    assert digest(opened(folder, packing), np.split(indices, 40)) == one
    assert digest(opened(folder, packing), [np.array([each]) for each in indices]) == one
    assert digest(opened(folder, packing, seed=1), [indices]) != one
    assert digest(opened(folder, packing, fim_spm_share=0.2), [indices]) != one


def test_samples_with_other_tokens_before_their_parts_are_told_apart(folder: Path) -> None:
    """What `data diff` goes by."""
    indices = np.arange(60)
    one, other = opened(folder), opened(folder, fim_tokens=("<suf>", "<pre>", "<mid>"))
    rows = np.flatnonzero((one.windows(indices) != other.windows(indices)).any(axis=0))
    assert rows.tolist() == sorted({row for row, *_ in one.cuts(indices)})
    assert 0 < len(rows) < len(indices)


def test_another_epoch_cuts_elsewhere(folder: Path) -> None:
    dataset = opened(folder, "one_document", fim_rate=1.0)
    n = dataset.n_samples
    first, second = ({(c.first, c.a, c.b) for *_, c in dataset.cuts(np.arange(s, s + n))} for s in (0, 2 * n))
    assert len(first & second) < 0.3 * len(first)


def test_planted_a_cut_that_forgets_the_epoch_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FillInTheMiddle.cut
    monkeypatch.setattr(FillInTheMiddle, "cut", lambda *each: original(*each[:-1], 0))
    with pytest.raises(AssertionError):
        test_another_epoch_cuts_elsewhere(folder)


def test_planted_a_suffix_that_keeps_its_end_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rearranged(cut: Cut, part, ids):
        return np.concatenate([part[:1] * 0 + PRE, part[: cut.a - cut.first], part[cut.a - cut.first + 1 :]])

    monkeypatch.setattr(Cut, "rearranged", rearranged)
    with pytest.raises((AssertionError, ValueError)):
        test_every_part_is_what_the_paper_makes_of_it(folder, "sequential")


def test_evaluation_and_files_with_masks_stay_as_they_are(folder: Path, tmp_path: Path) -> None:
    write_file(tmp_path / "a", has_mask=True)
    write_file(tmp_path / "b")
    save_chat_tokenizer(tmp_path / "tokenizer")
    config = dataclasses.replace(a_config(tmp_path, fim_rate=1.0), heldout_path=str(tmp_path / "b"))
    prepare(config, vocab_size=VOCAB)
    dataset = open_dataset(config, seed=0, vocab_size=VOCAB, split="train")
    indices = np.arange(60)
    cut_rows = {row for row, *_ in dataset.cuts(indices)}
    assert cut_rows and {dataset.windows(indices)[0][row] for row in cut_rows} == {1}
    assert open_dataset(config, seed=0, vocab_size=VOCAB, split="heldout").fim is None


def test_ids_that_a_narrow_file_cannot_hold_widen_the_windows(folder: Path) -> None:
    dataset = opened(folder)
    assert dataset.fim is not None
    dataset.fim = dataclasses.replace(dataset.fim, ids=(70000, 70001, 70002))
    assert dataset.read(np.arange(64)).tokens_BS.max() == 70002


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"fim_tokens": ("<pre>", "<suf>")}, r"data.fim_tokens=\['<pre>', '<suf>'\] must name three tokens"),
        ({"fim_tokens": ("<pre>",) * 3}, r"data.fim_tokens=.* must name three tokens"),
        ({"fim_tokens": ("<pre>", "<x>", "<mid>")}, r"data.fim_tokens\[1\]='<x>' must be a token of .*tokenizer"),
        ({"tokenizer": None}, r"data.fim_rate=0.6 with data.tokenizer=null needs data.tokenizer"),
    ],
)
def test_what_it_lacks_is_named(folder: Path, more: dict, line: str) -> None:
    config = dataclasses.replace(a_config(folder), **more)
    with pytest.raises(DataError, match=line):
        prepare(config, vocab_size=VOCAB) and open_dataset(config, seed=0, vocab_size=VOCAB, split="train")


def test_tokens_that_a_trained_tokenizer_will_not_have_are_told_before_any_text_is_made_of_them(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 50)
    config = DataConfig(
        seq_len=SEQ_LEN,
        sources=(SourceConfig(path=str(tmp_path / "text.txt")),),
        token_dir=str(tmp_path / "tokens"),
        workers=1,
        fim_rate=0.5,
    )
    with pytest.raises(DataError, match=r"data.fim_tokens\[0\]=.* must be a token of .*tokenizer"):
        prepare(config, vocab_size=VOCAB)
    assert not (tmp_path / "tokens").exists()
    assert prepare(dataclasses.replace(config, special_tokens=config.fim_tokens), vocab_size=VOCAB) is not None
