"""What is wrong with the data, in lines: apart in the error, together in its text, from a worker process too."""

import copy

from data.errors import DataError, problem, reason_of


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
