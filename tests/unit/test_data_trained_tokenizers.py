"""Tokenizers that are trained on the sources: exact on any text, with special tokens that no text becomes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import data.round_trip
import data.trained_tokenizers
from data.config import DataConfig, SourceConfig, TokenizerModel
from data.round_trip import round_trip
from data.tokenfile import TokenFile
from data.tokenizer import load_fast, save_tokenizer, tokenizer_folder
from data.trained_tokenizers import END_OF_TEXT, train_tokenizer
from launcher.cli import main

MODELS: tuple[TokenizerModel, ...] = ("bpe", "wordpiece", "unigram")
SPECIAL = ("<|tool|>", "[PAD]")
TEXTS = [
    "the answer is that it is what it is, für Käthe\n\tdef f(x): return x",
    "a longer answer to another question: what was that? nothing, it was the wind",
    "PAD tool endoftext " * 9,
] * 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {model: tmp_path_factory.mktemp("trained") / model for model in MODELS}
    for model, folder in folders.items():
        save_tokenizer(train_tokenizer(TEXTS, 350, model, SPECIAL), folder)
    return folders


def back(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_tokens_give_back_any_text(trained, model: str, text: str) -> None:
    text = text.encode(errors="replace").decode()
    tokenizer = load_fast(trained[model])
    assert back(tokenizer, text) == text


def test_another_kind_or_other_special_tokens_are_another_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0])
    config = DataConfig(sources=(SourceConfig(path=str(tmp_path / "a.txt")),), token_dir=str(tmp_path / "t"))
    kinds = [(model, special) for model in MODELS for special in ((), SPECIAL, SPECIAL[::-1], SPECIAL[:1])]
    changed = [replace(config, tokenizer_model=model, special_tokens=special) for model, special in kinds]
    assert len({tokenizer_folder(each, 350) for each in changed}) == len(kinds)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_learned_makes_text_short_and_long_words_end(trained, model: str) -> None:
    tokenizer = load_fast(trained[model])
    shorter = 1.2 if model == "unigram" else 1.5  # it keeps few pieces of so small a text
    assert len(tokenizer.encode(TEXTS[0]).ids) < len(TEXTS[0].encode()) / shorter
    for word in ("x" * 20_000, "the" * 5000, "ÿþ" * 3000):
        assert back(tokenizer, word) == word
    ids = tokenizer.get_vocab()
    assert sorted(ids.values()) == list(range(len(ids))) and len(ids) <= 350
    assert [ids[name] for name in (END_OF_TEXT, *SPECIAL)] == [0, 1, 2]


@pytest.mark.parametrize("model", MODELS)
def test_text_that_spells_out_a_special_token_is_text(trained, model: str) -> None:
    tokenizer = load_fast(trained[model])
    for text in (END_OF_TEXT, *SPECIAL, "a<|tool|>b [PAD] PAD tool <|endoftext|>"):
        assert min(tokenizer.encode(text, add_special_tokens=False).ids) > 2
        assert back(tokenizer, text) == text
    tokenizer.encode_special_tokens = False
    assert tokenizer.encode("<|tool|>", add_special_tokens=False).ids == [1]


@pytest.mark.parametrize("model", MODELS)
def test_the_least_vocabulary_has_the_bytes_alone(model: TokenizerModel) -> None:
    tokenizer = train_tokenizer(TEXTS, 259, model, SPECIAL)
    assert len(tokenizer.get_vocab()) == 259
    assert back(tokenizer.backend_tokenizer, "ünïcödé\x00") == "ünïcödé\x00"


@pytest.mark.parametrize("model", MODELS)
def test_the_same_text_gives_the_same_tokenizer(trained, model: TokenizerModel) -> None:
    again = train_tokenizer(TEXTS, 350, model, SPECIAL).backend_tokenizer.to_str()
    assert json.loads(again)["model"] == json.loads((trained[model] / "tokenizer.json").read_text())["model"]


def test_planted_a_model_without_all_bytes_loses_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(learned, options):
        return [*((name, 0.0) for name in options["special_tokens"]), *map(tuple, learned[3:])]

    monkeypatch.setattr(data.trained_tokenizers, "complete_pieces", kept)
    tokenizer = train_tokenizer(TEXTS, 350, "unigram", SPECIAL).backend_tokenizer
    with pytest.raises(Exception, match="unk"):
        back(tokenizer, "日本語")


def save_lossy(folder: Path) -> None:
    """A tokenizer of lower-case words."""
    tokenizer = Tokenizer(models.WordPiece(vocab={}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="[UNK]").save_pretrained(folder)


def write_config(folder: Path, **more: object) -> Path:
    (folder / "a.txt").write_text("\n".join(TEXTS))
    path, source = folder / "run.yaml", {"path": str(folder / "a.txt")}
    settings = {"sources": [source], "token_dir": str(folder / "tokens"), "workers": 1, **more}
    path.write_text(json.dumps({"model": {"vocab_size": 384}, "data": settings}))
    return path


def test_the_command_trains_and_tells_what_does_not_come_back(tmp_path: Path, capsys) -> None:
    save_lossy(tmp_path / "lossy")
    path = write_config(tmp_path, tokenizer_model="unigram", special_tokens=list(SPECIAL))
    assert main(["prepare", str(path)]) == 0
    told = capsys.readouterr()
    assert "give back" not in told.out + told.err
    (folder,) = tmp_path.glob("tokens/tokenizer-unigram-384-*")
    (prefix,) = tmp_path.glob("tokens/a-txt-*/train-00000.bin")
    tokens = TokenFile(str(prefix).removesuffix(".bin")).tokens
    assert load_fast(folder).decode(tokens[:-1].tolist()) == (tmp_path / "a.txt").read_text()
    assert main(["prepare", str(path), f"data.tokenizer={tmp_path / 'lossy'}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("=")[0] for line in lines] == ["data.tokenizer_model", "data.special_tokens"]
    path = write_config(tmp_path, tokenizer=str(tmp_path / "lossy"))
    assert main(["prepare", str(path)]) == 0
    told = capsys.readouterr()
    line = "decoding the tokens of 1 of the first 1 documents does not give back the original text (document 0, "
    assert f"{line}character" in told.out + told.err


def test_a_chat_is_taken_there_and_back_as_what_is_said(trained, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "what", "completion": "that"}) + "\n")
    config = DataConfig(sources=(SourceConfig(path=str(tmp_path / "a.jsonl")),))
    from data.config import ChatConfig

    source = SourceConfig(path=str(tmp_path / "a.jsonl"), chat=ChatConfig())
    assert round_trip(config, source, trained["bpe"]) == data.round_trip.RoundTrip(1, 0)
    (tmp_path / "a.jsonl").unlink()
    assert round_trip(config, source, trained["bpe"]) is None


@pytest.mark.parametrize("name", ["PAD", "<>", "<|a b|>", "<|endoftext|>", "", "<_>"])
def test_a_name_that_text_could_be_taken_for_is_refused(tmp_path: Path, capsys, name: str) -> None:
    path = write_config(tmp_path, special_tokens=["<a>", name])
    assert main(["prepare", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"data.special_tokens[1]={name!r} must be a name of its own between < and >")
    assert main(["prepare", str(path), 'data.special_tokens=["<a>"]', "model.vocab_size=257"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "model.vocab_size=257 must be at least 258 to train a byte-level tokenizer (data.tokenizer=null); "
        "set it to 258 or more"
    )
    assert not (tmp_path / "tokens").exists()
