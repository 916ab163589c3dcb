"""How many threads a rank computes with: sums over another number of them may round otherwise."""

import os

import pytest
import torch

from parallel.processes.start import run_ranks

CORES = os.cpu_count() or 1


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("1", 1), ("1,4", 1), (str(CORES + 7), CORES), ("0", CORES), ("all", CORES), (None, CORES)],
)
def test_a_rank_follows_omp_num_threads_as_torch_does(asked, expected, monkeypatch):
    """Found by a run beside its Slurm job, whose script sets 1: a processor without AMX rounded their sums apart."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert run_ranks(torch.get_num_threads, 1, timeout_seconds=60) == [expected]
