"""Hostile inputs for each parser, as many as `make test` has time for; and that `make fuzz` sees faults."""

import random
import time
from types import SimpleNamespace

import pytest

from fuzz import CASE_SECONDS, TARGETS, Tally, problem_with, try_cases
from mutations import mutate

CASES = 300
SEED = 1


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_inputs_are_refused_or_read(name, tmp_path):
    tally = Tally()
    try_cases(name, SEED, range(CASES), tmp_path, tally)
    assert tally.violations == []
    assert tally.cases == CASES
    assert tally.accepted, "mutations that leave the input valid reach the parser's end"
    assert tally.refused


def test_a_seed_names_an_input():
    seeds = [b'{"a": [1, 2, {"b": null}], "c": "text"}', b"plain text\n" * 5]
    once = [mutate(random.Random(number), seeds) for number in range(200)]
    assert once == [mutate(random.Random(number), seeds) for number in range(200)]
    assert len(set(once)) > 150


def target(check):
    return SimpleNamespace(check=lambda data, folder: check())


def spin() -> bool:
    began = time.process_time()
    while time.process_time() < began + CASE_SECONDS + 0.2:
        pass
    return True


def test_planted_a_traceback_is_a_violation(tmp_path):
    assert "KeyError" in str(problem_with(target(lambda: {}["missing"]), b"", tmp_path))


@pytest.mark.slow
def test_planted_a_slow_case_is_a_violation(tmp_path):
    assert "processor time" in str(problem_with(target(spin), b"", tmp_path))


def test_planted_a_case_that_hangs_is_a_violation(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz.HANG_SECONDS", 1)
    assert "no answer" in str(problem_with(target(lambda: time.sleep(5)), b"", tmp_path))


def test_planted_a_case_that_takes_memory_is_a_violation(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz.CASE_MIB", 20)
    sizes = iter([100.0, 150.0])
    monkeypatch.setattr("fuzz.peak_mib", lambda: next(sizes))
    assert "took 50 MiB" in str(problem_with(target(lambda: True), b"", tmp_path))
