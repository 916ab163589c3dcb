"""Ranks are forked from a server that has imported everything: a module that each rank imports is paid for by each."""

import sys

import pytest

from layout_runs import run_config, train_rank, write_tokens
from parallel.config import ParallelConfig
from parallel.processes.start import run_ranks


def imported_while_training(config) -> set[str]:
    """The libraries' modules that this rank had to import itself."""
    before = set(sys.modules)
    train_rank(config)
    return {name for name in set(sys.modules) - before if not is_ours(name)}


def is_ours(name: str) -> bool:
    return name.split(".")[0] in ("faults", "layout_runs", "launcher", "parallel", "modeling", "data")


@pytest.mark.parametrize("parallel", [ParallelConfig(zero=3), ParallelConfig(pp=2)], ids=["zero3", "pp2"])
def test_a_rank_imports_no_library(tmp_path, parallel):
    config = run_config(write_tokens(tmp_path), parallel=parallel, steps=1)
    for imported in run_ranks(imported_while_training, 2, config, timeout_seconds=120, threads=1):
        assert imported == set()
