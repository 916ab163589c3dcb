"""`roundtable data` on run directories without a training: the order backwards, texts, differences, refusals."""

import dataclasses
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.config import DataConfig, SourceConfig
from data.dataset import Dataset, open_dataset
from data.errors import DataError
from data.find_text import find_text
from data.mixture import mixture_of
from data.order import permutation_key, permute, take, unpermute
from data.prepare import prepare
from data.spans import Place, document_name, find_document, samples_with, spans_of
from data_reference import write_foreign_file, write_token_file
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.training.batch_ramp import BatchRamp
from launcher.training.ledger import ledger_row
from launcher.training.ledger_rows import Saved, StepData, _from_checkpoint, steps_of
from launcher.training.state import TrainState
from layout_runs import DENSE_MODEL, run_config


@given(st.integers(1, 10**13), st.integers(0, 5), st.lists(st.integers(0, 10**13), max_size=20))
def test_the_permutation_is_turned_around(n: int, seed: int, points: list[int]) -> None:
    key, index_N = permutation_key(seed, 1, 2), np.array(points, np.int64) % n
    np.testing.assert_array_equal(unpermute(permute(index_N, n, key), n, key), index_N)


@given(st.lists(st.sampled_from([0.1, 0.7, 1.0, 3.0, 1e-6, 1e6]), min_size=1, max_size=7), st.integers(0, 10**12))
def test_the_mixture_is_turned_around(weights: list[float], first: int) -> None:
    mixture = mixture_of(tuple(Fraction(repr(weight)) for weight in weights))
    index_N = np.arange(first, first + 40)
    pairs = zip(*(each.tolist() for each in mixture.deal(index_N)), strict=True)
    assert [mixture.number_of(source, nth) for source, nth in pairs] == index_N.tolist()


def open_files(folder: Path, seq_len: int = 7) -> Dataset:
    """Three files of two sources: documents of many lengths, of one token, of several sequences, and empty ones."""
    draw = np.random.default_rng(0)
    write_token_file(folder / "a", [draw.integers(0, 90, int(n)).tolist() for n in draw.integers(0, 30, 20)])
    write_foreign_file(folder / "b", [[[1, 2], [3]], [], [[]], [[4] * 29, []], [[5]]])
    sources = (SourceConfig(path=str(folder / "a"), weight=0.7), SourceConfig(path=str(folder / "b"), weight=0.4))
    return open_dataset(DataConfig(seq_len=seq_len, sources=sources), seed=4, vocab_size=96, split="train")


def compare_with_batches(dataset: Dataset, n_samples: int = 60) -> None:
    """Spans are the inputs that batches have, cut where their documents change; documents lead back to their spans."""
    indices = np.arange(n_samples)
    batch, spans = dataset.read(indices), list(spans_of(dataset, indices))
    cut = []
    for row, document in zip(batch.tokens_BS, batch.documents_BS, strict=True):
        cut += [row[document == number].tolist() for number in range(int(document.max()) + 1)]
    assert [dataset.files[s.file].tokens[s.first : s.stop].tolist() for s in spans] == cut
    for span in spans:
        assert dataset.files[span.file].document_range(span.document)[0] + span.offset == span.first
    found = []
    for file, tokens in enumerate(dataset.files):
        for number in range(tokens.n_documents):
            found += samples_with(dataset, Place(file, number, *tokens.document_range(number)), n_samples)
    assert sorted(map(dataclasses.astuple, found)) == sorted(map(dataclasses.astuple, spans))


@pytest.mark.parametrize("seq_len", [1, 7, 50])
def test_documents_and_samples_lead_to_each_other(tmp_path: Path, seq_len: int) -> None:
    compare_with_batches(open_files(tmp_path, seq_len))


@pytest.mark.parametrize("fault", ["identity", "one epoch", "window off by one"])
def test_planted_faults_of_the_way_back_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    dataset = open_files(tmp_path)
    match fault:
        case "identity":
            monkeypatch.setattr("data.shuffle.unpermute", lambda image_N, n, key: image_N)
        case "one epoch":
            shuffle, key = dataset._shuffle, dataset._shuffle._key
            monkeypatch.setattr(shuffle, "_key", lambda source, epoch: key(source, 0))
            dataset.read(np.arange(60))
        case _:
            inner = Dataset.numbers_of
            monkeypatch.setattr(
                Dataset, "numbers_of", lambda self, file, first, stop, n: inner(self, file, first + 1, stop + 1, n)
            )
    if fault == "one epoch":  # the way there has its own copy of the keys
        monkeypatch.setattr(dataset, "read", open_files(tmp_path).read)
        monkeypatch.setattr(dataset, "windows", open_files(tmp_path).windows)
    with pytest.raises((AssertionError, IndexError)):
        compare_with_batches(dataset)


def test_documents_have_names(tmp_path: Path) -> None:
    dataset = open_files(tmp_path)
    place = find_document(dataset, "b/b:3", "--document")
    assert document_name(dataset, place.file, place.document) == "b/b:3"
    assert (place.first, place.stop) == (3, 32)
    assert find_document(dataset, f"{tmp_path}/b:3", "--document") == place
    empty = find_document(dataset, "b/b:1", "--document")
    assert samples_with(dataset, empty, 1000) == []


# Runs that have trained nothing: a config and a ledger.


def a_run(folder: Path, name: str, ranges: list[tuple[int, int]], **changes: object) -> RunConfig:
    """A run whose steps took these samples [first, stop)."""
    config = run_config(str(folder / "a"), model=DENSE_MODEL)
    sources = changes.pop("sources", (SourceConfig(path=str(folder / "a")),))
    data = {"seq_len": changes.pop("seq_len", 7), "without": changes.pop("without", None)}
    section = dataclasses.replace(config.data, sources=sources, **data)
    config = dataclasses.replace(config, name=name, run_dir=str(folder / name), data=section, **changes)
    (folder / name).mkdir()
    (folder / name / "config.yaml").write_text(dump_config(config))
    write_ledger(folder / name, ranges)
    return config


def write_ledger(run: Path, ranges: list[tuple[int, int]], dropped: tuple[int, ...] = ()) -> None:
    """Rows as the loop writes them; what lies between two steps was left out."""
    state, rows = TrainState(), []
    for first, stop in ranges:
        before = state.consumed
        if first > before:
            state.skipped.append((before, first))
        state.step, state.consumed = state.step + 1, stop
        rows.append(ledger_row(state, before, trained=state.step not in dropped))
    (run / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    open_files(tmp_path)
    return tmp_path


def ask(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert main(["data", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


EIGHTS = [(0, 8), (8, 16), (16, 24)]


@pytest.mark.parametrize(
    ("ranges", "changes", "step", "equal", "shared"),
    [
        (EIGHTS, {}, None, None, None),
        ([*EIGHTS, (24, 32)], {}, None, None, None),  # only one has come so far
        ([(0, 8), (8, 12), (12, 16)], {}, 2, 4, 4),
        ([(0, 8), (12, 20), (20, 28)], {}, 2, 0, 4),
        (EIGHTS, {"seed": 1}, 1, 0, None),
        (EIGHTS, {"seq_len": 8}, 1, 0, 0),
    ],
)
def test_the_first_difference_is_found(folder, capsys, ranges, changes, step, equal, shared) -> None:
    a_run(folder, "one", EIGHTS)
    a_run(folder, "other", ranges, **changes)
    found = ask(capsys, "diff", str(folder / "one"), str(folder / "other"), code=int(step is not None))
    if step is None:
        assert (found["difference"], found["same_steps"]) == (None, 3)
        return
    assert (found["same_steps"], found["difference"]["step"]) == (step - 1, step)
    assert found["difference"]["equal_sequences"] == equal
    assert shared is None or found["difference"]["shared"] == shared


def test_files_are_the_same_where_their_bytes_are(folder, capsys) -> None:
    """A copy elsewhere, under another name, is the same data; one changed token is not, and is not overlooked."""
    for end in ("bin", "idx"):
        (folder / f"copy.{end}").write_bytes((folder / f"a.{end}").read_bytes())
    a_run(folder, "one", EIGHTS)
    a_run(folder, "other", EIGHTS, sources=(SourceConfig(path=str(folder / "copy")),))
    assert ask(capsys, "diff", str(folder / "one"), str(folder / "other"))["difference"] is None
    content = bytearray((folder / "copy.bin").read_bytes())
    content[6] ^= 1
    (folder / "copy.bin").write_bytes(content)
    assert ask(capsys, "diff", str(folder / "one"), str(folder / "other"), code=1)["difference"]["step"] == 1


def test_what_one_run_alone_leaves_out_is_marked(folder, capsys) -> None:
    """The tokens are the same on both sides, so that nothing else would tell them apart."""
    (folder / "left.jsonl").write_text('{"document": "a/a:3"}\n')
    a_run(folder, "one", EIGHTS)
    a_run(folder, "other", EIGHTS, without=str(folder / "left.jsonl"))
    arguments = ["diff", str(folder / "one"), str(folder / "other")]
    ours, theirs = ask(capsys, *arguments, code=1)["difference"]["sides"]
    assert [row | {"left_out": False} for row in theirs["first_different"]] == ours["first_different"]
    assert main(["data", *arguments]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if " a/a:3 " in line]
    assert ["left out by data.without" in line for line in lines] == [False, True]


def test_an_update_that_one_run_dropped_is_told(folder, capsys) -> None:
    a_run(folder, "one", EIGHTS)
    a_run(folder, "other", EIGHTS)
    write_ledger(folder / "other", EIGHTS, dropped=(2,))
    found = ask(capsys, "diff", str(folder / "one"), str(folder / "other"))
    assert (found["difference"], found["dropped_by_one"]) == (None, 2)
    assert ask(capsys, "show", str(folder / "other"), "--step", "2")["trained"] is False
    assert main(["data", "show", str(folder / "other"), "--step", "2"]) == 0
    assert "not trained on: the update was dropped" in capsys.readouterr().out


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=4)


@given(skipped=RANGES, steps=st.integers(1, 8), ramp=st.booleans())
def test_a_checkpoint_tells_what_the_ledger_told(tmp_path_factory, skipped, steps, ramp) -> None:
    """Steps drawn as the loop draws them, whatever is left out."""
    config = run_config("nowhere", model=DENSE_MODEL)
    if ramp:
        train = dataclasses.replace(config.train, batch_ramp=BatchRamp(start=2, increment=2, samples=20))
        config = dataclasses.replace(config, train=train)
    state, rows = TrainState(skipped=skipped), []
    for _ in range(steps):
        before = state.consumed
        batch = take(before, config.train.batches.size_at(state.step + 1), skipped)
        state.step, state.consumed = state.step + 1, int(batch[-1]) + 1
        rows.append(ledger_row(state, before, trained=True))
        row = rows[-1]
        read = StepData(row["step"], row["first_sample"], row["last_sample"], tuple(map(tuple, row["hopped"])), True)
        assert (read.begin, read.samples().tolist()) == (before, batch.tolist())
    folder = tmp_path_factory.mktemp("run")
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = list(_from_checkpoint(config, Saved("step", steps, state.consumed, skipped), folder))
    assert told == [dataclasses.replace(step, trained=None) for step in steps_of(folder, config)]


FOX = "the quick brown fox jumps over the lazy dog " * 3
TEXTS = [FOX, "nothing here", "\n\n    brown föxes über alles und überall\n"] * 4
PIECES = (
    "ick brown fox jum",
    "nothing",
    "öxes über alles un",
    "föx",
    "lazy dog the",
    "absent",
    "\n\n    brown f",
    "g " + FOX,
)


def train_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE with merges, saved as tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("chunk", [1 << 24, 50])
def test_text_is_found_where_documents_spell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Pieces that begin and end within words, of few words and of many, with letters of several bytes."""
    monkeypatch.setattr("data.find_text.CHUNK_TOKENS", chunk)
    monkeypatch.setattr("data.find_text.SPELLED_TOKENS", chunk)
    tokenizer = train_tokenizer(tmp_path)
    ids = [[*tokenizer.encode(text).ids, 0] for text in TEXTS]
    dataset = open_prefix(write_token_file(tmp_path / "x", ids))
    for piece in PIECES:
        found = find_text(dataset, tmp_path, piece, "--text")
        counts = [sum(text.startswith(piece, at) for at in range(len(text))) for text in TEXTS]
        assert [sum(place.document == number for place in found) for number in range(len(TEXTS))] == counts, piece
        for place in found:
            tokens = dataset.files[0].tokens[place.first : place.stop].tolist()
            assert piece in tokenizer.decode(tokens)
            assert all(piece not in tokenizer.decode(part) for part in (tokens[1:], tokens[:-1]))


def test_special_tokens_are_text_only_where_a_document_spells_them_out(tmp_path: Path) -> None:
    """As token 0 they end a document, or stand where a chat template has written them."""
    tokenizer = train_tokenizer(tmp_path)
    tokenizer.encode_special_tokens = True
    texts = ["the end", "it says <|endoftext|> and then goes on here", "<|endoftext|>", "no such word"]
    spelled = [[*tokenizer.encode(text).ids, 0] for text in texts]
    tokenizer.encode_special_tokens = False
    chat = [*tokenizer.encode("quick brown fox<|endoftext|> jumps over the lazy dog").ids, 0]
    dataset = open_prefix(write_token_file(tmp_path / "x", [*spelled, chat]))

    def found(piece: str) -> list[int]:
        return [place.document for place in find_text(dataset, tmp_path, piece, "--text")]

    assert found("end") == [0, 1, 2]
    assert found("endoftext|>") == [1, 2]
    assert found("<|endoftext|>") == [1, 2, 4]
    assert found("it says <|endoftext|> and then goes") == [1]
    assert found("quick brown fox<|endoftext|> jumps over") == [4]
    assert found("fox jumps") == found("word<|endoftext|>") == []


def open_prefix(prefix: Path) -> Dataset:
    config = DataConfig(seq_len=16, sources=(SourceConfig(path=str(prefix)),))
    return open_dataset(config, seed=0, vocab_size=300, split="train")


def test_text_without_a_word_or_in_too_many_places_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.find_text.MOST_PLACES", 5)
    tokenizer = train_tokenizer(tmp_path)
    dataset = open_prefix(write_token_file(tmp_path / "x", [tokenizer.encode(text).ids for text in TEXTS]))
    with pytest.raises(DataError, match="must hold a word"):
        find_text(dataset, tmp_path, " ", "--text")
    with pytest.raises(DataError, match="lies in more than 5 places; give a longer piece"):
        find_text(dataset, tmp_path, "o", "--text")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded"):
        find_text(dataset, tmp_path, "fox", "--text")


def test_a_text_that_is_not_utf8_is_refused(capsys) -> None:
    """As Python hands over such bytes of an argument."""
    assert main(["data", "where", "run", "--text", "a\udcff"]) == 2
    assert capsys.readouterr().err == "--text must be UTF-8, and its byte 1 is 0xff; convert it to UTF-8\n"


@pytest.mark.slow
def test_text_is_found_in_the_steps_that_saw_it(tmp_path, capsys, monkeypatch) -> None:
    """With the tokenizer that preparing the data trains and keeps."""
    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = run_config("corpus.jsonl", model=dataclasses.replace(DENSE_MODEL, vocab_size=300))
    section = dataclasses.replace(config.data, heldout_fraction=0.0, workers=1, seq_len=16)
    config = dataclasses.replace(config, name="run", run_dir="run", data=section)
    prepare(config.data, vocab_size=300)
    Path("run").mkdir()
    Path("run/config.yaml").write_text(dump_config(config))
    write_ledger(Path("run"), [(0, 40), (40, 80)])
    for piece in PIECES:
        found = ask(capsys, "where", "run", "--text", piece)
        assert len(found["places"]) == sum(text.startswith(piece, at) for text in TEXTS for at in range(len(text)))
        assert all(each["seen"] for each in found["places"])
    assert main(["data", "where", "run", "--text", "absent"]) == 0
    assert capsys.readouterr().out == "no document of run contains this text\n"


REFUSALS = [
    (["show", "RUN", "--step", "4"], "--step=4 must be a step of RUN, which has made 3; give 1 to 3"),
    (["show", "RUN", "--step", "0"], "--step=0 must be a step of RUN"),
    (["show", "nowhere", "--step", "1"], "RUN=nowhere must be a run directory, or a run's name below runs"),
    (["diff", "RUN", "nowhere"], "RUN=nowhere must be a run directory"),
    (
        ["where", "RUN", "--document", "a/a:20"],
        "--document=a/a:20 must end in a number from 0 to 19, since a/a holds 20",
    ),
    (["where", "RUN", "--document", "a/a:-1"], "--document=a/a:-1 must end in a number from 0 to 19"),
    (["where", "RUN", "--document", "c:0"], "--document=c:0 must be FILE:NUMBER with FILE one of a/a"),
    (["where", "RUN", "--text", "x"], "--text='x' needs a tokenizer, and the data of RUN names none"),
    (["where", "RUN"], "--document and --text: one of the two must be given"),
    (["where", "RUN", "--text", "x", "--document", "a/a:0"], "--document and --text: one of the two must be given"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSALS)
def test_refusals_are_one_line(folder, capsys, arguments, said) -> None:
    a_run(folder, "run", EIGHTS)
    assert main(["data", *(str(folder / "run") if word == "RUN" else word for word in arguments)]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith(said.replace("RUN", str(folder / "run")) if not said.startswith("RUN=") else said)
    assert not shown.out


@pytest.mark.parametrize("gone", [("a.bin",), ("a.idx",), ("a.bin", "a.idx")])
def test_a_token_file_that_is_gone_is_named(folder, capsys, gone) -> None:
    a_run(folder, "run", EIGHTS)
    for name in gone:
        (folder / name).unlink()
    assert main(["data", "show", str(folder / "run"), "--step", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    files = " and ".join(str(folder / name) for name in gone)
    said = f"data.sources[0].path='{folder / 'a'}' must be there as the run read it, and {files} "
    assert line.startswith(said + ("is gone" if len(gone) == 1 else "are gone"))
    assert line.endswith("; put the files back")


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        (None, "must have trained a step, and has neither ledger.jsonl nor a checkpoint of one"),
        ('{"step": 1}\n', "the row of step 1 is not one that a run writes"),
        (
            '{"step": 1, "first_sample": 0, "last_sample": 1, "hopped": [[0, 9]], "trained": true}\n',
            "the row of step 1",
        ),
        ('{"step": 2, "first_sample": 0, "last_sample": 1, "hopped": [], "trained": true}\n', "must go on with step 1"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(folder, capsys, ledger, said) -> None:
    a_run(folder, "run", EIGHTS)
    path = folder / "run" / "ledger.jsonl"
    path.unlink() if ledger is None else path.write_text(ledger)
    assert main(["data", "show", str(folder / "run"), "--step", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_nothing_is_changed(folder, capsys) -> None:
    a_run(folder, "run", EIGHTS)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run = str(folder / "run")
    for arguments in (["show", run, "--step", "1"], ["where", run, "--document", "a/a:3"], ["diff", run, run]):
        assert main(["data", *arguments]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert load_config(folder / "run" / "config.yaml").name == "run"
