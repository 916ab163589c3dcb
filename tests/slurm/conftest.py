"""One real Slurm cluster of four nodes for all tests of this folder; where it cannot be had, they are skipped with
the reason."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_cluster import Cluster, free_subnet, why_not

N_NODES = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks this folder's tests, so that `make test` can leave them to `make test-slurm`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """The cluster, from the first test that needs it to the end of the session."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cluster = Cluster(Path(f"/tmp/rt-slurm-{os.getpid()}"), subnet=free_subnet(1 + os.getpid() % 250))
    try:
        cluster.start(N_NODES)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(running_cluster) -> Iterator[Cluster]:
    """The cluster with all nodes idle; whatever the test breaks is mended after it."""
    running_cluster.mend()
    yield running_cluster
    running_cluster.mend()
