"""The `slurm` section of a config. A cluster's profile (slurm/clusters/*.yaml) has the same keys; the run's win."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval

YEAR_SECONDS = 31_536_000  # clocks, Slurm and torch's timeouts count further; a job that waits so long does not
LONGEST_NOTICE = 65_535  # sbatch --signal takes no more

PerNode = Annotated[int, Interval(ge=1, le=4096)]


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """How `roundtable submit` asks for nodes, and what its job does at the end of its time."""

    partition: str | None = None  # None: the cluster's default
    account: str | None = None  # the account that pays
    qos: str | None = None  # quality of service
    constraint: str | None = None  # kinds of nodes, as the cluster names them
    exclude: str | None = None  # nodes not to use: n3,n[7-9]
    nodes: Annotated[int, Interval(ge=1, le=2**16)] = 1  # nodes of the job
    gpus_per_node: Annotated[int, Interval(ge=0, le=1024)] = 8  # GPUs of a node; 0: the job asks for none
    # the GPU, a name in configs/hardware or a file like them: what does not fit is refused; None: as Slurm says
    gpu: str | None = None
    # processes of a node; None: one for each GPU, or one where there is none
    tasks_per_node: PerNode | None = field(default=None, metadata={"usual": 8})
    # cores of a process; None: as the cluster has it
    cpus_per_task: PerNode | None = field(default=None, metadata={"usual": 8})
    memory: str | None = None  # of a node: `500G`, `"0"` for all; None: as the cluster has it
    # the time limit of one job, not of the run
    time_minutes: Annotated[int, Interval(ge=1, le=YEAR_SECONDS // 60)] = 1440
    # so long before the time limit the ranks are told to save and stop
    notice_seconds: Annotated[int, Interval(ge=1, le=LONGEST_NOTICE)] = 300
    requeue: bool = True  # a job that was stopped (time limit, preemption, lost node) is queued again
    # jobs submitted at once, each of which begins when the one before has ended
    chain: Annotated[int, Interval(ge=1, le=1000)] = 1
    # a failed run is started again in the same job, so many times in a row without a new checkpoint
    restarts: Annotated[int, Interval(ge=0, le=10**6)] = 3
    # a job measures its nodes when it begins and after each failure, and leaves slow and broken ones out
    preflight: bool = True
    # nodes that the job has beyond `nodes`, to take the place of slow and broken ones
    spare_nodes: Annotated[int, Interval(ge=0, le=2**16)] = field(default=0, metadata={"usual": 1})
    # the interpreter on the nodes, or within the container, where there is one; None: the one that submits
    python: str | None = None
    modules: tuple[str, ...] = ()  # environment modules that the job loads first
    container: str | None = None  # an image for srun's `--container-image` (pyxis)
    # further folders that the container sees: PATH, FROM:TO or FROM:TO:ro
    container_mounts: tuple[str, ...] = ()
    network_interface: str | None = None  # that NCCL and gloo meet on, e.g. `ib0`; None: they choose
    # a folder on each node's own disk, for compiled kernels, where `$NAME` is the job's variable; None: the home
    scratch: str | None = None
    environment: tuple[str, ...] = ()  # further NAME=value; NAME alone takes the submitting shell's value, for secrets
    options: tuple[str, ...] = ()  # further options of sbatch, NAME or NAME=value: `reservation=week`, `exclusive`

    @property
    def passed_on(self) -> tuple[str, ...]:
        """The variables whose values the submitting shell has; only Slurm and the job see these."""
        return tuple(each for each in self.environment if "=" not in each)

    @property
    def n_tasks_per_node(self) -> int:
        """The number of processes on each node."""
        return self.tasks_per_node if self.tasks_per_node is not None else max(1, self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self.nodes * self.n_tasks_per_node
