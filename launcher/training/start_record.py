"""The record of each start of a run in metrics.jsonl and W&B: its code, config, machines and libraries."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from data.without import hash_of_file
from launcher.config.tree import RunConfig
from launcher.guard.agreement import commit, hash_of_code, hash_of_config
from launcher.slurm.queue import slurm_job
from launcher.training.lineage import lineage_line, read_lineage
from launcher.training.surroundings import surroundings
from parallel.mesh import Mesh
from parallel.processes.environment import number


def start_record(config: RunConfig, mesh: Mesh, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The fields of the event ``start``, the same keys under every launcher; {} except on rank 0. All ranks call it.

    ``nodes`` is Slurm's short form (n[1-4]) in a job step, elsewhere the ranks' host names.
    """
    hosts = [""] * mesh.world_size
    dist.all_gather_object(hosts, socket.gethostname(), group=mesh.control)
    if mesh.rank != 0:
        return {}
    lineage = read_lineage(config.run_path)
    return {
        "ranks": mesh.world_size,
        "nodes": environment.get("SLURM_STEP_NODELIST") or ",".join(dict.fromkeys(hosts)),
        "slurm_job": slurm_job(environment),
        "slurm_restarts": number("SLURM_RESTART_COUNT", environment, default=0),
        "commit": commit(),
        "code_sha256": hash_of_code()[:12],
        "init_from": config.init_from,
        "config_sha256": hash_of_config(config)[:12],
        **surroundings(mesh.device),
        "without_sha256": hash_of_file(config.data.without)[:12] or None,
        "branched_from": lineage_line(lineage) if lineage is not None else None,
    }
