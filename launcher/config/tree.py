"""The config tree: the four packages' dataclasses composed into one. Each number's type states its legal range."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from data.config import DataConfig
from launcher.slurm.config import YEAR_SECONDS, SlurmConfig
from launcher.training.batch_ramp import Batches, BatchRamp, batches_of
from modeling.config import ModelConfig
from modeling.optimizers.config import AdamWConfig, OptimizerConfig
from modeling.precision_config import Precision, Stored, stored_as
from modeling.schedules import CosineSchedule, ScheduleConfig
from parallel.config import ParallelConfig

Steps = Annotated[int, Interval(ge=1, le=10**10)]
Seconds = Annotated[int, Interval(ge=1, le=YEAR_SECONDS)]
Times = Annotated[int, Interval(ge=0, le=10**6)]
LONGEST_WINDOW = 10_000  # each step looks at all of its losses


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how large, how precise."""

    steps: Steps = 1000  # updates
    global_batch_size: Annotated[int, Interval(ge=1, le=2**24)] = 8  # sequences of an update, over all ranks
    # a global batch that grows to that size over the first updates; null: it has it from the first one on
    batch_ramp: BatchRamp | None = None
    micro_batch_size: Annotated[int, Interval(ge=1, le=2**20)] = 1  # sequences of one forward pass on one rank
    # of the forward and backward passes; the optimizer's state is fp32 always. fp8: bf16, but layers' and experts'
    # products have factors of 8 bits (GPUs since Hopper)
    precision: Precision = "bf16"
    # under precision fp8: weights are cut to 8 bits once an update, not in every pass, and take two bytes more for each
    # of their elements
    fp8_keep_weights: bool = False
    # what the backward pass computes again to save memory
    recompute: Literal["none", "selective", "feed_forward", "full"] = "none"
    # GiB of activations that a rank may hold for its micro-batches in flight: each layer computes again as little as
    # that allows; None: what `recompute` says, in all layers
    activation_gib: Annotated[float, Interval(ge=1e-9, le=2**20)] | None = field(default=None, metadata={"usual": 16.0})
    # what layers keep for the backward pass waits on the host: copied there while the next layer computes, and fetched
    # back while the one behind it goes backward
    offload_activations: bool = False
    # norms, rotations, gates and the loss as one kernel each: auto on GPUs that have a compiler, on always, off never
    compile: Literal["auto", "on", "off"] = "auto"
    # the FlashAttention of GPUs: 2 is torch's own, 3 (Hopper) and 4 (Hopper, Blackwell; torch 2.12) are packages
    flash_attention: Literal[2, 3, 4] = 2
    # steps between held-out evaluations; None: none
    eval_every_steps: Steps | None = field(default=None, metadata={"usual": 100})
    # held-out sequences of one evaluation, at most
    eval_sequences: Annotated[int, Interval(ge=1, le=10**7)] = 64
    # evaluate each source's held-out text by itself, too: eval_sequences of each, as eval_loss/SOURCE
    eval_by_source: bool = False
    # tasks of lm-evaluation-harness, by name or a YAML file's path, that are scored on the weights as they train
    eval_tasks: tuple[str, ...] = ()
    # steps between evaluations of `eval_tasks`; None: those of `eval_every_steps`, and at the end
    eval_tasks_every_steps: Steps | None = field(default=None, metadata={"usual": 1000})
    # documents of each of `eval_tasks`, at most; None: all
    eval_tasks_limit: Annotated[int, Interval(ge=1, le=10**7)] | None = field(default=None, metadata={"usual": 100})
    deterministic: bool = False  # deterministic kernels, no TF32
    gc_every_steps: Steps = 100  # steps between runs of Python's garbage collector, on all ranks at once
    timeout_seconds: Seconds = 600  # a collective that takes longer ends the job
    # a step that takes longer ends the job; None: 0.9 x timeout_seconds, or three times the longest step so far
    step_timeout_seconds: Seconds | None = field(default=None, metadata={"usual": 540})
    # at the start of a job, a rank that does not answer for so long is named, and all end
    start_seconds: Seconds = 300

    @property
    def batches(self) -> Batches:
        """How many sequences each update takes."""
        return batches_of(self.global_batch_size, self.batch_ramp)

    @property
    def stored(self) -> Stored:
        """The precision of weights and activations."""
        return stored_as(self.precision)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many stay. One is always written at the end."""

    # steps between checkpoints; None: only at the end
    every_steps: Steps | None = field(default=None, metadata={"usual": 100})
    keep_last: Annotated[int, Interval(ge=1, le=10**6)] = 3  # the newest checkpoints that stay
    # checkpoints at multiples of it stay for good; a multiple of `every_steps`; None: none
    keep_every_steps: Steps | None = field(default=None, metadata={"usual": 1000})
    keep_best: Times = 0  # so many checkpoints of the lowest held-out loss stay as well
    # where checkpoints lie: a path, or a URL that fsspec opens (`s3://bucket/prefix`), for this run alone; None:
    # RUN_DIR/checkpoints
    dir: str | None = None
    # training goes on while a copy of the state is written; False: it waits for the disk, and no copy is made
    asynchronous: bool = True
    # a rank whose part of a save comes this much later than another's ends the job
    timeout_seconds: Seconds = 1800


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """What is done about a step whose loss or gradient is not finite, or whose loss is far above the last ones."""

    # what is done about a loss or gradient that is not finite
    on_nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    # what is done about a loss far above the last ones
    on_spike: Literal["report", "skip", "rollback", "stop"] = "report"
    # updates whose losses a loss is compared with; before so many, none is a spike
    spike_window: Annotated[int, Interval(ge=2, le=LONGEST_WINDOW)] = 100
    spike_z: Annotated[float, Interval(ge=0.001, le=1e6)] = 8.0  # deviations above their median that make a spike
    max_skips: Times = 10  # steps skipped in a row; one more stops the run
    max_rollbacks: Times = 3  # rollbacks since the run was last started; one more stops it


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases. auto: online where there is a key, offline otherwise."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"  # auto: online where there is a key, else offline
    project: str = "roundtable"  # W&B project
    entity: str | None = None  # W&B user or team; None: the key's own


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where a run's numbers go. metrics.jsonl has those of every step, and so has W&B."""

    # steps between rows with each expert's share of the tokens; None: each row where layers x experts are at most
    # 1024, else every 100 steps
    expert_shares_every_steps: Steps | None = field(default=None, metadata={"usual": 100})
    # at the start, say what memory and time are planned, and after 10 steps by how much that missed
    plan: bool = True
    # None: all in the live view; plain lines now and then
    terminal_every_steps: Steps | None = field(default=None, metadata={"usual": 10})
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, complete. The saved copy reproduces it."""

    name: str = "run"  # the run's name; its directory is runs/NAME
    run_dir: str | None = None  # the run directory, if it is another
    init_from: str | None = None  # the run or checkpoint (a folder, a URL) whose weights it begins with; None: drawn
    # fixes the first weights and the order of the data
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
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
