"""Tokenizers against `transformers`: what is saved loads there, encodes alike and decodes exactly."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.config import ChatConfig, DataConfig, SourceConfig
from data.dataset import open_dataset
from data.errors import DataError
from data.find_text import find_text
from data.prepare import prepare
from data.round_trip import RoundTrip, round_trip
from data.tokenizer import (
    load_fast,
    load_tokenizer,
    read_info,
    save_tokenizer,
    tokenizer_folder,
)
from data.trained_tokenizers import END_OF_TEXT, train_tokenizer

TEXT = Path(__file__).read_text() * 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t") / "bpe"
    save_tokenizer(train_tokenizer([TEXT], 400), folder)
    return folder


def test_it_has_exactly_the_ids_asked_for(trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained, trust_remote_code=False)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert sorted(tokenizer.get_vocab().values()) == list(range(400))
    assert tokenizer.eos_token == END_OF_TEXT
    assert read_info(trained).n_ids == 400
    assert read_info(trained).eos_id == tokenizer.eos_token_id


def test_a_small_corpus_gives_fewer_ids() -> None:
    assert len(train_tokenizer(["ab"], 1000)) < 300


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_round_trips_and_encodes_alike(trained: Path, text: str) -> None:
    ours, theirs = load_fast(trained), AutoTokenizer.from_pretrained(trained, trust_remote_code=False)
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert theirs.decode(ids) == text
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids


def test_the_name_of_end_of_text_in_a_document_is_plain_text(trained: Path) -> None:
    ours = load_fast(trained)
    ids = ours.encode(f"a{END_OF_TEXT}b", add_special_tokens=False).ids
    assert read_info(trained).eos_id not in ids
    assert ours.decode(ids, skip_special_tokens=False) == f"a{END_OF_TEXT}b"


def test_training_again_gives_the_same_tokenizer(tmp_path: Path, trained: Path) -> None:
    save_tokenizer(train_tokenizer([TEXT], 400), tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    assert read_info(tmp_path / "again") == read_info(trained)


def test_trained_by_prepare_and_loaded_back(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("another document")
    config = DataConfig(sources=(SourceConfig(path=f"{tmp_path}/*.txt"),), token_dir=str(tmp_path / "t"), workers=1)
    with pytest.raises(DataError, match=r"data\.tokenizer=null means one trained .* run `roundtable prepare`"):
        load_tokenizer(config, 384)
    prepared = prepare(config, vocab_size=384)
    assert prepared is not None
    tokenizer = load_tokenizer(config, 384)
    assert tokenizer is not None
    assert len(tokenizer) == 384
    assert prepared.tokenizer == tokenizer_folder(config, 384)
    assert tokenizer_folder(config, 512) != prepared.tokenizer


def config_with(tokenizer: Path | str, tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_text(TEXT)
    sources = (SourceConfig(path=str(tmp_path / "a.txt")),)
    return DataConfig(sources=sources, tokenizer=str(tokenizer), token_dir=str(tmp_path / "t"), workers=1)


def test_a_tokenizer_with_too_many_ids_is_refused(tmp_path: Path, trained: Path) -> None:
    config = config_with(trained, tmp_path)
    expected = (
        r"data\.tokenizer=.* has 400 ids but model\.vocab_size=399 is smaller; set model\.vocab_size to 512 or more"
    )
    for call in (load_tokenizer, lambda c, v: prepare(c, vocab_size=v)):
        with pytest.raises(DataError, match=expected):
            call(config, 399)
    assert not (tmp_path / "t").exists()


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path: Path, trained: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=load_fast(trained)).save_pretrained(tmp_path / "no-eos")
    with pytest.raises(DataError, match="has no eos_token"):
        prepare(config_with(tmp_path / "no-eos", tmp_path), vocab_size=400)
    assert not (tmp_path / "t").exists()


def save_words(folder: Path, *words: str) -> None:
    """A tokenizer of these words, and of no other."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(("<eos>", *words))}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


@pytest.mark.parametrize("chat", [None, ChatConfig()])
def test_text_that_a_tokenizer_has_no_token_for_is_refused(tmp_path: Path, chat: ChatConfig | None) -> None:
    save_words(tmp_path / "words", "one", "two")
    field = {"text": "one three"} if chat is None else {"prompt": "one", "completion": " three"}
    (tmp_path / "a.jsonl").write_text(json.dumps(field) + "\n")
    source = SourceConfig(path=str(tmp_path / "a.jsonl"), chat=chat)
    folders = {"tokenizer": str(tmp_path / "words"), "token_dir": str(tmp_path / "tokens")}
    with pytest.raises(DataError, match=r"^data.sources\[0\]: .*a.jsonl holds text that the tokenizer has no"):
        prepare(DataConfig(seq_len=4, sources=(source,), workers=1, **folders), vocab_size=8)
    assert not (tmp_path / "tokens").exists()


def test_words_that_a_command_cuts_may_have_no_token(tmp_path: Path) -> None:
    """The check of what tokens give back cuts long documents, and a piece of text that is looked for cuts words."""
    save_words(tmp_path / "words", "one", "twenty")
    (tmp_path / "a.txt").write_text("one twenty one " + "twenty " * 3000)
    source = SourceConfig(path=str(tmp_path / "a.txt"))
    folders = {"tokenizer": str(tmp_path / "words"), "token_dir": str(tmp_path / "tokens")}
    config = DataConfig(seq_len=4, sources=(source,), workers=1, **folders)
    prepare(config, vocab_size=8)
    folder = tokenizer_folder(config, 8)
    assert folder is not None and round_trip(config, source, folder) == RoundTrip(1, 0)  # nothing compared
    dataset = open_dataset(config, seed=0, vocab_size=8, split="train")
    assert [place.first for place in find_text(dataset, folder, "ne twenty on", "--text")] == [0]


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer='.*none' is no folder, and no name on the") as caught:
        prepare(config_with(tmp_path / "none", tmp_path), vocab_size=400)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "t").exists()


def _replaced(key: str, value: object):
    return lambda data: json.dumps(json.loads(data) | {key: value}).encode()


BROKEN = {
    "torn": ("tokenizer.json", lambda data: data[: len(data) // 2], "is not JSON that can be used"),
    "not text": ("tokenizer_config.json", lambda data: b"\xff" + data, "is not JSON that can be used"),
    "deeply nested": ("tokenizer_config.json", lambda data: b"[" * 100_000, "is not JSON that can be used"),
    "a list": ("tokenizer.json", lambda data: b"[]", "must hold a JSON object but holds list"),
    "wrong type": (
        "tokenizer.json",
        _replaced("model", {"type": "BPE", "vocab": {"a": None}, "merges": []}),
        "cannot be",
    ),
    "no model": ("tokenizer.json", _replaced("model", None), "cannot be loaded by transformers"),
    "class": ("tokenizer_config.json", _replaced("tokenizer_class", {"a": 1}), "cannot be loaded by transformers"),
    "eos": ("tokenizer_config.json", _replaced("eos_token", 1.5), "cannot be loaded by transformers"),
    "surrogate": ("tokenizer_config.json", _replaced("eos_token", "\ud800"), "is not JSON that can be used"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_refused_by_file(tmp_path: Path, trained: Path, name: str) -> None:
    file, damage, expected = BROKEN[name]
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / file).write_bytes(damage((copy / file).read_bytes()))
    with pytest.raises(DataError, match=rf"data\.tokenizer='.*copy'.*{expected}") as caught:
        load_tokenizer(config_with(copy, tmp_path), 400)
    assert len(str(caught.value).splitlines()) == 1
    assert file in str(caught.value) or file == "tokenizer_config.json"


def test_a_pipe_among_a_tokenizers_files_is_refused_and_not_waited_for(tmp_path: Path, trained: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "tokenizer_config.json").unlink()
    os.mkfifo(copy / "tokenizer_config.json")
    with pytest.raises(DataError, match=r"copy/tokenizer_config\.json is not a regular file"):
        load_tokenizer(config_with(copy, tmp_path), 400)


@pytest.mark.parametrize(
    "answers", [pytest.param(True, id="silent", marks=pytest.mark.slow), pytest.param(False, id="closed")]
)
def test_a_hub_out_of_reach_is_one_line_within_seconds(tmp_path: Path, answers: bool) -> None:
    """``answers``: a port that takes connections and says nothing; else one that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = os.environ | {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        ended = subprocess.run([sys.executable, "-c", OUT_OF_REACH], capture_output=True, text=True, env=environment)
    tokenizer, dataset, seconds = ended.stdout.splitlines()
    assert ended.stderr == ""
    assert tokenizer.startswith("data.tokenizer='org/name' is no folder, and cannot be had from the Hugging Face hub (")
    assert dataset.startswith("data.sources[0].path='hf://org/name' cannot be had from the Hugging Face hub (")
    assert float(seconds) < 60  # both, and the libraries' imports; each alone took as long before


OUT_OF_REACH = """
import time
from data.config import SourceConfig
from data.errors import DataError
from data.hub import open_hub
from data.tokenizer import load_origin
start = time.monotonic()
for call in (lambda: load_origin("org/name"), lambda: open_hub(SourceConfig(path="hf://org/name"), "data.sources[0]")):
    try:
        call()
    except DataError as error:
        print(error)
print(time.monotonic() - start)
"""


def test_a_tokenizer_folder_is_known_by_its_files(tmp_path: Path, trained: Path) -> None:
    """Copied elsewhere it is the same one; changed it is another. Weights beside it do not matter."""
    copy = tmp_path / "bpe"
    copy.mkdir()
    for path in trained.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "model.safetensors").write_bytes(b"weights")
    config, copied = config_with(trained, tmp_path), config_with(copy, tmp_path)
    assert tokenizer_folder(config, 400) == tokenizer_folder(copied, 400)
    (copy / "tokenizer_config.json").write_text("{}")
    assert tokenizer_folder(config, 400) != tokenizer_folder(copied, 400)


def test_a_tokenizer_s_folder_may_go_once_prepared(tmp_path: Path, trained: Path) -> None:
    """Of two folders that hold the same one each may; where one held two tokenizers in turn, nobody knows which."""
    folders = [tmp_path / name / "bpe" for name in ("one", "two")]
    kept = []
    for folder in folders:
        shutil.copytree(trained, folder)
        prepared = prepare(config_with(folder, tmp_path), vocab_size=400)
        assert prepared is not None
        kept.append(prepared.tokenizer)
    assert kept[0] == kept[1] and kept[0] is not None
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(tmp_path / "two")
    for folder in folders:
        assert tokenizer_folder(config_with(folder, tmp_path), 400) == kept[0]
        assert load_tokenizer(config_with(folder, tmp_path), 400) is not None
    assert {path.suffix for path in kept[0].iterdir()} <= {".json", ".jinja"}

    save_tokenizer(train_tokenizer([TEXT[:200]], 300), folders[0])
    assert prepare(config_with(folders[0], tmp_path), vocab_size=400) is not None
    shutil.rmtree(folders[0])
    with pytest.raises(DataError, match="is no folder, and no name on the Hugging Face hub; check the path"):
        load_tokenizer(config_with(folders[0], tmp_path), 400)
