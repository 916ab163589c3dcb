"""`roundtable submit` on a real Slurm: the run that it starts is the run of one plain process."""

import dataclasses

import pytest

from launcher.config.tree import RunConfig
from launcher.slurm.config import SlurmConfig
from layout_runs import run_config, run_reference, write_tokens
from parallel.config import ParallelConfig
from slurm_runs import Run

CPU_NODES = SlurmConfig(nodes=4, gpus_per_node=0, tasks_per_node=2, time_minutes=30, notice_seconds=60)


def small_config(folder, slurm: SlurmConfig = CPU_NODES, parallel: ParallelConfig | None = None) -> RunConfig:
    config = run_config(write_tokens(folder), parallel=parallel, steps=5)
    return dataclasses.replace(config, name="small", slurm=slurm)


@pytest.mark.timeout(900)
def test_four_nodes_of_two_ranks_give_the_losses_of_one_process(cluster, tmp_path):
    """fp32, SGD: sums in another order, as in test_layouts: 1e-6."""
    config = small_config(tmp_path, parallel=ParallelConfig(tp=2, pp=2, ep=2))
    run = Run(cluster, tmp_path, config)
    (job_id,) = run.submit()
    run.wait_for_state(job_id, seconds=600)
    assert run.state(job_id) == "COMPLETED", run.story()
    assert cluster.job(job_id)["NodeList"] == "n[1-4]"
    reference = run_reference(config)
    assert run.losses() == pytest.approx(reference.losses, rel=1e-6)
    assert sorted(path.name for path in run.path.glob("logs/rank-*.log")) == [f"rank-{rank}.log" for rank in range(8)]
