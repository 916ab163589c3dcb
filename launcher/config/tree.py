"""The config tree: the four packages' dataclasses composed into one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data.config import DataConfig
from launcher.slurm.config import SlurmConfig
from modeling.config import ModelConfig
from modeling.optimizers.config import AdamWConfig, OptimizerConfig
from modeling.schedules import CosineSchedule, ScheduleConfig
from parallel.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how large, how precise."""

    steps: int = 1000
    global_batch_size: int = 8  # sequences an update sees, over all ranks
    micro_batch_size: int = 1  # sequences in one forward pass of one rank
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    recompute: Literal["none", "selective", "full"] = "none"
    eval_every_steps: int | None = None  # None: no held-out evaluation
    eval_sequences: int = 64  # held-out sequences of one evaluation, at most
    deterministic: bool = False  # deterministic kernels, no TF32
    gc_every_steps: int = 100  # Python's garbage collector runs then, and only then, on every rank at once
    timeout_seconds: int = 600  # a collective that takes longer ends the job
    step_timeout_seconds: int | None = None  # a step that takes longer, too; None: 0.9 timeouts or 3 longest steps
    start_seconds: int = 300  # at the start of a job, a rank that does not answer for so long is named, and all end


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many stay. One is always written at the end."""

    every_steps: int | None = None  # None: only at the end
    keep_last: int = 3
    keep_every_steps: int | None = None  # those at multiples of it stay for good; None: none
    keep_best: int = 0  # so many of the lowest held-out loss stay as well
    dir: str | None = None  # a path, or a URL that fsspec opens (s3://bucket/prefix); None: RUN_DIR/checkpoints
    asynchronous: bool = True  # training goes on while a copy of the state is written
    timeout_seconds: int = 1800  # a rank whose part of a save comes this much later than another's ends the job


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """What is done about a step whose loss or gradient is not finite, or whose loss is far above the last ones."""

    on_nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    on_spike: Literal["report", "skip", "rollback", "stop"] = "report"
    spike_window: int = 100  # updates whose losses a loss is compared with; before so many, none is a spike
    spike_z: float = 8.0  # deviations above their median (robust: from the median absolute deviation)
    max_skips: int = 10  # in a row; one more stops the run
    max_rollbacks: int = 3  # since the run's start; one more stops it


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases. auto: online where there is a key, offline otherwise."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str = "roundtable"
    entity: str | None = None


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where a run's numbers go besides metrics.jsonl and the terminal."""

    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, complete. The saved copy reproduces it."""

    name: str = "run"
    run_dir: str | None = None  # None: runs/NAME
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    schedule: ScheduleConfig = field(default_factory=CosineSchedule)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def run_path(self) -> Path:
        """The run directory, relative to the current directory unless run_dir is absolute."""
        return Path(self.run_dir) if self.run_dir is not None else Path("runs") / self.name

    @property
    def checkpoint_location(self) -> str:
        """The path or URL of the folder that the checkpoints lie in."""
        return self.checkpoint.dir if self.checkpoint.dir is not None else str(self.run_path / "checkpoints")
