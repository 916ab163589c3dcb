"""What a large job's processes keep open and write to rank 0's store: counted in real groups, for docs/scale.md."""

import pytest

from connection_runs import WORLD_GROUPS, collectives_of_a_step, count_connections, most_connections, store_bytes
from launcher.limits import OPEN_FILES, OPEN_FILES_OF_A_RANK
from layout_runs import run_config, run_layout, write_tokens
from parallel.config import ParallelConfig
from parallel.processes import connections
from parallel.processes.start import run_ranks

LARGE = (2048, 16384)


def counted(folder, n_ranks, on_demand):
    folder.mkdir()
    return run_ranks(count_connections, n_ranks, str(folder), on_demand, timeout_seconds=240, threads=1)


@pytest.fixture(scope="module")
def on_demand(tmp_path_factory):
    """By the number of ranks, those that connect on demand."""
    folder = tmp_path_factory.mktemp("on_demand")
    return {n_ranks: counted(folder / str(n_ranks), n_ranks, True) for n_ranks in (8, 24)}


def test_ranks_that_connect_on_demand_have_few_sockets(on_demand):
    for n_ranks, found in on_demand.items():
        for rank, each in enumerate(found):
            assert each.sockets <= each.told <= each.sockets + (16 if rank == 0 else 8), (n_ranks, rank)


def test_bytes_through_the_store_grow_with_the_ranks(on_demand):
    """Not with their cube."""
    for n_ranks, found in on_demand.items():
        assert found[0].bytes_of_groups < found[0].bytes_told < 1.7 * found[0].bytes_of_groups, n_ranks


def test_planted_full_mesh_connects_all_to_all(tmp_path):
    """As gloo does by itself: a socket for each rank in each group, and bytes with the cube of the ranks."""
    found = counted(tmp_path / "full", 24, False)
    assert min(each.sockets for each in found) >= WORLD_GROUPS * 23
    assert all(each.sockets <= each.told for each in found)
    assert found[0].bytes_of_groups < found[0].bytes_told < 3 * found[0].bytes_of_groups


@pytest.mark.parametrize("world_size", LARGE)
def test_what_a_large_job_needs_is_what_its_limits_ask_for(world_size):
    allowed = OPEN_FILES + OPEN_FILES_OF_A_RANK * world_size
    assert most_connections(world_size, is_first=True) < 3.1 * world_size < allowed
    assert most_connections(world_size, is_first=False) <= 64
    assert store_bytes(world_size) < {2048: 50e6, 16384: 500e6}[world_size]


@pytest.mark.slow
def test_a_layout_trains_alike_whenever_its_ranks_connect(tmp_path, monkeypatch):
    config = run_config(write_tokens(tmp_path), parallel=ParallelConfig(ep=2, zero=1), steps=3)
    full = run_layout(config, 4)
    monkeypatch.setenv(connections.ON_DEMAND, "1")
    found = run_layout(config, 4)
    assert (found.losses, found.grad_norms) == (full.losses, full.grad_norms)


@pytest.mark.parametrize("planted", [False, True])
def test_no_step_waits_for_the_ring_of_gloo(tmp_path, planted):
    """On CUDA all that a step sums goes over NCCL; gloo's group of all ranks is for objects, outside the steps."""
    config = run_config(write_tokens(tmp_path), parallel=ParallelConfig(zero=1), steps=2)
    for found in run_ranks(collectives_of_a_step, 2, config, planted, timeout_seconds=240, threads=1):
        assert found["other"] > 0
        assert (found["control"] > 0) == planted
