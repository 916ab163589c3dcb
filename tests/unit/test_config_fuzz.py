"""The config's fuzz target: its seeds, and that it sees a reader that fails."""

import pytest

import fuzz_config
from launcher.config import yaml_text


def test_the_seeds_are_read(tmp_path):
    accepted = [fuzz_config.check(data, tmp_path) for data in fuzz_config.seeds()]
    assert sum(accepted) >= 3


def test_planted_reader_that_fails_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(yaml_text, "_syntax_problem", lambda error: (None, "two\nlines"))
    with pytest.raises(AssertionError):
        fuzz_config.check(b"a: [", tmp_path)
