"""Long documents are tokenized in pieces: as the whole is, where a tokenizer splits at whitespace."""

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from data import shardwriter
from data.tokenizer import load_fast, save_tokenizer
from data.trained_tokenizers import train_tokenizer

LINES = st.lists(st.sampled_from(["def f(x):", "    return x", "", "\ttabs", "words, and words ", "ü", "x" * 70]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of bytes, as GPT-2's, trained on this file so that line ends and what follows them are tokens together."""
    folder = tmp_path_factory.mktemp("tokenizer") / "trained"
    save_tokenizer(train_tokenizer([Path(__file__).read_text()] * 4, 400, "bpe", ()), folder)
    return load_fast(folder)


def of_pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    return [
        number
        for piece, _ in shardwriter._pieces(text)
        for number in tokenizer.encode(piece, add_special_tokens=False).ids
    ]


@pytest.mark.parametrize("indent", ["", "    "], ids=["lines", "every line is indented"])
def test_pieces_have_the_tokens_of_the_whole(
    indent: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardwriter, "PIECE_CHARACTERS", 300)
    text = textwrap.indent(Path(__file__).read_text(), indent)
    assert len(list(shardwriter._pieces(text))) > 3
    assert of_pieces(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_planted_a_cut_within_whitespace_is_seen(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a line end's following spaces are tokenized with is lost."""
    monkeypatch.setattr(shardwriter, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr(shardwriter, "_cut", lambda text, start, stop: text.rfind("\n", start, stop) + 1 or stop)
    text = Path(__file__).read_text()
    assert of_pieces(tokenizer, text) != tokenizer.encode(text, add_special_tokens=False).ids


@given(lines=LINES, size=st.integers(1, 40))
def test_pieces_are_the_text_and_no_longer_than_they_may_be(lines: list[str], size: int) -> None:
    text = "\n".join(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardwriter, "PIECE_CHARACTERS", size)
        pieces = list(shardwriter._pieces(text))
    assert "".join(piece for piece, _ in pieces) == text
    assert all(0 < len(piece) <= size for piece, _ in pieces)
    assert [is_last for _, is_last in pieces] == [number == len(pieces) for number in range(1, len(pieces) + 1)]


def test_a_good_place_is_looked_for_near_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a document of whitespace, of which each place is looked at, takes longer than its tokens do."""
    monkeypatch.setattr(shardwriter, "CUT_CHARACTERS", 50)
    assert shardwriter._cut("a b" + "\n" * 40 + "c", 0, 43) == 1, "within reach: before the space"
    assert shardwriter._cut("a b" + "\n" * 60 + "c", 0, 63) == 63
