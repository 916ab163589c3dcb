"""What each number of the config may be: from what is possible to what its use can bear. One table for all of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.config.schema import hint_at, is_nullable
from launcher.config.tree import RunConfig
from launcher.config.words import show

_YEAR_SECONDS = 31_536_000  # clocks, Slurm and torch's timeouts count further; a job that waits so long does not


@dataclass(frozen=True)
class Range:
    """The smallest and the largest legal value, and one to try instead of an illegal one."""

    minimum: float
    maximum: float
    usual: float


RANGES: dict[str, Range] = {
    "seed": Range(0, 2**63 - 1, 0),
    "model.vocab_size": Range(1, 2**24, 8192),
    "model.d_model": Range(1, 2**20, 512),
    "model.n_layers": Range(1, 10_000, 8),
    "model.n_heads": Range(1, 2**16, 8),
    "model.n_kv_heads": Range(1, 2**16, 1),
    "model.d_head": Range(1, 2**16, 64),
    "model.d_ff": Range(1, 2**24, 1408),
    "model.sliding_window": Range(1, 2**24, 1024),
    "model.rope_theta": Range(1.0, 1e12, 10000.0),
    "model.norm_eps": Range(1e-30, 1.0, 1e-6),  # what is less vanishes in fp32
    "model.init_std": Range(1e-10, 100.0, 0.02),
    "model.moe.n_experts": Range(1, 2**16, 8),
    "model.moe.top_k": Range(1, 2**16, 1),
    "model.moe.d_ff": Range(1, 2**24, 512),
    "model.moe.n_shared_experts": Range(0, 1024, 0),
    "model.moe.n_dense_layers": Range(0, 10_000, 0),
    "model.moe.routed_scale": Range(1e-6, 1e6, 1.0),
    "model.moe.balance.coefficient": Range(0, 1000.0, 0.001),
    "model.moe.balance.rate": Range(0, 1000.0, 0.001),
    "model.moe.z_loss": Range(0, 1000.0, 0.0001),
    "data.seq_len": Range(1, 2**24, 1024),
    "data.sources.weight": Range(1e-6, 1e6, 1.0),
    "data.heldout_fraction": Range(0, 0.999, 0.01),
    "data.shard_bytes": Range(1, 2**40, 64_000_000),
    "data.workers": Range(1, 4096, 8),
    "train.steps": Range(1, 10**10, 1000),
    "train.global_batch_size": Range(1, 2**24, 8),
    "train.micro_batch_size": Range(1, 2**20, 1),
    "train.eval_every_steps": Range(1, 10**10, 100),
    "train.eval_sequences": Range(1, 10**7, 64),
    "train.gc_every_steps": Range(1, 10**10, 100),
    "train.timeout_seconds": Range(1, _YEAR_SECONDS, 600),
    "train.step_timeout_seconds": Range(1, _YEAR_SECONDS, 540),
    "train.start_seconds": Range(1, _YEAR_SECONDS, 300),
    "optimizer.lr": Range(0, 1e30, 0.0003),  # far above what trains: health says what becomes of it
    "optimizer.weight_decay": Range(0, 1000.0, 0.1),
    "optimizer.beta1": Range(0, 0.999999, 0.9),
    "optimizer.beta2": Range(0, 0.999999, 0.95),
    "optimizer.momentum": Range(0, 0.999999, 0.9),
    "optimizer.eps": Range(1e-30, 1.0, 1e-8),
    "optimizer.clip_norm": Range(1e-12, 1e12, 1.0),
    "schedule.warmup_steps": Range(0, 10**10, 0),
    "schedule.decay_steps": Range(0, 10**10, 0),
    "schedule.min_ratio": Range(0, 1, 0.1),
    "parallel.tp": Range(1, 2**16, 1),
    "parallel.pp": Range(1, 2**16, 1),
    "parallel.pipeline.n_chunks": Range(1, 1024, 2),
    "parallel.pipeline.layers": Range(1, 10_000, 1),
    "parallel.cp": Range(1, 2**16, 1),
    "parallel.ep": Range(1, 2**16, 1),
    "parallel.zero": Range(0, 3, 1),
    "checkpoint.every_steps": Range(1, 10**10, 100),
    "checkpoint.keep_last": Range(1, 10**6, 3),
    "checkpoint.keep_every_steps": Range(1, 10**10, 1000),
    "checkpoint.keep_best": Range(0, 10**6, 0),
    "checkpoint.timeout_seconds": Range(1, _YEAR_SECONDS, 1800),
    "health.spike_window": Range(2, 10_000, 100),  # each step looks at all of them
    "health.spike_z": Range(0.001, 1e6, 8.0),
    "health.max_skips": Range(0, 10**6, 10),
    "health.max_rollbacks": Range(0, 10**6, 3),
    "metrics.terminal_every_steps": Range(1, 10**10, 10),
    "slurm.nodes": Range(1, 2**16, 1),
    "slurm.gpus_per_node": Range(0, 1024, 8),
    "slurm.tasks_per_node": Range(1, 4096, 8),
    "slurm.cpus_per_task": Range(1, 4096, 8),
    "slurm.time_minutes": Range(1, _YEAR_SECONDS // 60, 1440),
    "slurm.notice_seconds": Range(1, 65_535, 300),  # sbatch --signal takes no more
    "slurm.chain": Range(1, 1000, 1),
    "slurm.restarts": Range(0, 10**6, 3),
    "slurm.spare_nodes": Range(0, 2**16, 1),
}


def range_problems(config: RunConfig) -> Iterator[str]:
    """One line for each number outside its range."""
    for key, limits in RANGES.items():
        for shown, value in _values(config, key.split(".")):
            remedy = f"try {limits.usual} or null" if _is_nullable(key) else f"try {limits.usual}"
            if value < limits.minimum:
                yield f"{shown}={show(value)} must be at least {limits.minimum}; {remedy}"
            elif value > limits.maximum:
                yield f"{shown}={show(value)} must be at most {limits.maximum}; {remedy}"


def is_beyond(config: RunConfig) -> bool:
    """Whether a number is above its range: what relates it to others may then take for ever, or overflow."""
    return any(value > limits.maximum for key, limits in RANGES.items() for _, value in _values(config, key.split(".")))


def _values(node: Any, parts: list[str], shown: str = "") -> Iterator[tuple[str, float]]:
    """(key as it is shown, number) at a dotted key, of each item of a list; nothing where a section lacks it."""
    if isinstance(node, tuple):
        for index, item in enumerate(node):
            yield from _values(item, parts, f"{shown}[{index}]")
    elif node is not None and parts:
        yield from _values(getattr(node, parts[0], None), parts[1:], f"{shown}.{parts[0]}".removeprefix("."))
    elif node is not None:
        yield shown, node


def _is_nullable(key: str) -> bool:
    return is_nullable(hint_at(RunConfig, key.split(".")))
