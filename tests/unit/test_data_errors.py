"""What is wrong with the data, in lines: apart in the error, together in its text, from a worker process too."""

import copy
import errno
import os
from pathlib import Path

import pytest

from data.errors import DataError, problem, reason_of
from data.shardwriter import no_room


def test_each_problem_is_a_line_wherever_the_error_comes_from():
    error = DataError("first; mend it", "second; mend that")
    for each in (error, copy.copy(error)):  # which makes it again as pickle does
        assert str(each) == "first; mend it\nsecond; mend that"
        assert each.problems == ["first; mend it", "second; mend that"]


def test_what_a_library_says_is_one_short_line():
    assert reason_of(ValueError("of\n  two lines")) == "of two lines"
    assert reason_of(KeyError()) == "KeyError"
    assert reason_of(ValueError("x" * 200)) == "x" * 200
    assert reason_of(ValueError("x" * 201)) == "x" * 197 + "..."


def test_a_name_with_a_line_end_stays_in_its_line():
    assert problem("a\nb.txt", "is empty", "remove it") == "a\\nb.txt is empty; remove it"


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some"), (errno.EFBIG, "raise the limit (ulimit -f)")]
)
def test_a_shard_without_room_is_told_what_gives_it_some(number, remedy):
    told = str(no_room(Path("tokens"), OSError(number, os.strerror(number))))
    rule = f"has no room left ({os.strerror(number)})"
    rest = "or set data.token_dir to another disk; finished shards are kept"
    assert told == f"data.token_dir='tokens' {rule}; {remedy}, {rest}"
