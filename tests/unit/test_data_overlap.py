"""Held-out documents that are trained on are counted, token for token."""

from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.config import DataConfig, SourceConfig
from data.overlap import n_trained_on
from data.prepare import prepare
from data.tokenfile import TokenFile
from data_reference import write_token_file
from launcher.commands.prepare import overlap_lines, packing_lines

CORPUS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12)


@given(CORPUS, CORPUS)
def test_documents_in_both_are_those_of_equal_tokens(
    tmp_path_factory, heldout: list[list[int]], train: list[list[int]]
) -> None:
    """Few ids and short documents, so that many are alike in part; the two files have other types."""
    folder = tmp_path_factory.mktemp("t")
    files = [
        TokenFile(write_token_file(folder / "h", heldout, np.uint16)),
        TokenFile(write_token_file(folder / "t", train, np.int32)),
    ]
    known = Counter(map(tuple, train))
    documents = [tuple(document) for document in heldout if len(document) > 1]
    assert n_trained_on(files[:1], files[1:]) == (sum(document in known for document in documents), len(documents))


def test_prepare_tells_of_them(tmp_path: Path) -> None:
    """Against the files of data.heldout_path: two of three documents are trained on."""
    write_token_file(tmp_path / "a", [[1, 2, 3], [4, 5, 6, 7], [8, 9]])
    write_token_file(tmp_path / "h", [[1, 2, 3], [4, 5, 6, 8], [8, 9]])
    source, token_dir = SourceConfig(path=str(tmp_path / "a")), str(tmp_path / "t")
    config = DataConfig(seq_len=2, sources=(source,), heldout_path=str(tmp_path / "h"), token_dir=token_dir)
    prepared = prepare(config, vocab_size=10)
    assert prepared is not None
    assert overlap_lines(config, prepared) == [
        f"{tmp_path / 'a'}: 2 of 3 held-out documents are in its training text, too"
    ]
    shares = "0.00% padding, 33.3% of the documents split across sequences"
    assert packing_lines(config, prepared) == [f"{tmp_path / 'a'}: packing sequential at data.seq_len=2: {shares}"]
    write_token_file(tmp_path / "h", [[1, 2, 4]])
    assert overlap_lines(config, prepared) == ["no held-out document is in the training text"]
