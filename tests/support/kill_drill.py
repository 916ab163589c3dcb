"""The kill drill: runs in which ranks, the launcher or its fork server are killed at random moments.

Nobody is left 10 seconds after a kill, and each run is resumed and compared with one that was not killed.

``python tests/support/kill_drill.py --runs 200`` prints a line a run and a JSON summary at the end. What happens in run
n is a function of (seed, n): ``--seed S --only N`` repeats it.

One kill is a real SIGKILL, sent by rank 0 from a thread of its own a random time after it has entered a moment: an
update, the writing of a shard, the commit, the deletion of old checkpoints, a load. Each start is a process of its own
with a fork server of its own, as the command is, but both are forked from a process that has imported everything, so a
start costs what the ranks need to build their engines.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does; the ranks get the same path

import launcher.training.start
from launcher.commands.checkpoint import find
from launcher.config.dump import dump_config
from launcher.config.tree import CheckpointConfig, MetricsConfig, WandbConfig
from launcher.errors import UserError
from launcher.watch.metrics import read_metrics
from layout_runs import MOE_MODEL, run_config, write_tokens
from modeling.moe_config import BiasBalance
from modeling.optimizers.config import AdamWConfig
from orphans import lives, wait_for
from parallel.checkpoint.verify import problems_of
from parallel.config import ParallelConfig
from parallel.processes.lifeline import end_with_parent
from parallel.processes.start import SERVER_KILLED, fork_server

STEPS, EVERY = 8, 2
BATCH = 8
LAYOUTS = {
    "dp2 zero1": (2, ParallelConfig(zero=1)),
    "dp2 ep2 zero3": (2, ParallelConfig(zero=3, ep=2)),
    "tp2 ep2 zero2": (2, ParallelConfig(zero=2, tp=2, ep=2)),
    "pp2 zero1": (2, ParallelConfig(zero=1, pp=2)),
    "cp2 ep2 zero1": (2, ParallelConfig(zero=1, cp=2, ep=2)),
    "pp2 dp2 ep2 zero1": (4, ParallelConfig(zero=1, pp=2, ep=2)),
}
assert MOE_MODEL.moe is not None
MODEL = replace(MOE_MODEL, moe=replace(MOE_MODEL.moe, balance=BiasBalance(rate=0.01)))
MOMENTS = {  # moment -> module and name of a function that rank 0 enters, and the longest delay of the kill (seconds)
    "step": ("launcher.training.loop", "run_step", 0.3),
    "save": ("parallel.checkpoint.saver", "write_shard", 0.03),
    "commit": ("parallel.checkpoint.local", "LocalStore.commit", 0.02),
    "cleanup": ("parallel.checkpoint.retention", "Retention.apply", 0.01),
    "load": ("launcher.training.loop", "restore", 0.04),
}
PIDS = "pids"
LAUNCHER, SERVER, ALL = "launcher", "fork server", "all ranks"  # victims, besides single ranks
PRELOAD = (
    "launcher.training.start",
    "launcher.training.loop",
    "data.rules",
    "data.prepared",
    "modeling.counts",
    "modeling.optimizers.build",
)


@dataclass(frozen=True)
class Kill:
    """The kill that is planned for one start of a run."""

    moment: str
    occurrence: int  # the n-th time that rank 0 enters it, from 1
    delay_seconds: float
    victim: str  # LAUNCHER, SERVER, ALL, or "rank 0", "rank 1", ...


@dataclass
class Outcome:
    """The outcome of one run of the drill, with a line for each problem found."""

    number: int
    layout: str
    kills: list[Kill]
    landed: list[str] = field(default_factory=list)  # for each kill: "inside" or "after" the moment, or "not at all"
    resumed_from: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def plan(seed: int, number: int) -> tuple[str, list[Kill]]:
    """The layout and the kills of run ``number``, determined by ``seed`` and ``number``."""
    draw = random.Random(f"{seed}-{number}")
    layout = draw.choice(list(LAYOUTS))
    n_ranks = LAYOUTS[layout][0]

    def kill(moment: str, occurrences: int) -> Kill:
        victim = draw.choice([LAUNCHER, SERVER, ALL, *(f"rank {rank}" for rank in range(n_ranks))])
        return Kill(moment, draw.randint(1, occurrences), draw.random() ** 3 * MOMENTS[moment][2], victim)

    moment = list(MOMENTS)[number % len(MOMENTS)]
    if moment == "load":  # there must be something to load: a first kill later than the first checkpoint
        first = replace(kill("step", STEPS), occurrence=draw.randint(2 * EVERY, STEPS))
        return layout, [first, kill("load", 1)]
    last = {"step": STEPS, "cleanup": STEPS // EVERY - 1}  # after the last clean-up the run may have ended already
    return layout, [kill(moment, last.get(moment, STEPS // EVERY))]


def write_config(folder: Path, name: str, tokens: str, layout: str) -> Path:
    """Writes the config of a run in folder/name; returns its path."""
    config = run_config(
        tokens,
        model=MODEL,
        optimizer=AdamWConfig(lr=1e-3),
        parallel=LAYOUTS[layout][1],
        steps=STEPS,
        micro_batch_size=1 if layout.startswith("pp2 dp2") else 2,
        global_batch_size=BATCH,
    )
    config = replace(
        config,
        name=name,
        run_dir=str(folder / name),
        checkpoint=CheckpointConfig(every_steps=EVERY, keep_last=2),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(config))
    return path


def start(config: Path, n_ranks: int, kill: Kill | None, plant: Callable[[], None] | None = None) -> tuple[int, str]:
    """Trains as ``roundtable train`` does, in a process of its own, with a kill planned; returns exit code and stderr.

    ``plant`` is called in each rank before it trains.
    """
    folder = config.with_suffix(".kill")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / PIDS).mkdir(parents=True)
    process = fork_server(PRELOAD).Process(target=launch, args=(config, folder, n_ranks, kill, plant))
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    assert process.exitcode is not None
    return process.exitcode, (folder / "launcher.err").read_text()


def launch(config: Path, folder: Path, n_ranks: int, kill: Kill | None, plant: Callable[[], None] | None) -> None:
    """The launcher's process: trains with its own fork server, and ranks that are set up to be killed."""
    end_with_parent()
    output_to(folder / "launcher.out", 1)
    output_to(folder / "launcher.err", 2)
    sign(folder, LAUNCHER)
    fork_a_fork_server(folder)
    launcher.training.start.train_rank = functools.partial(doomed_rank, folder, n_ranks, kill, plant)
    sys.exit(launcher.training.start.start_training(config, [], n_ranks))


def fork_a_fork_server(folder: Path) -> None:
    """Starts this process's fork server by forking, so that it need not import everything again.

    multiprocessing itself would start it as a new interpreter.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(connection.arbitrary_address("AF_UNIX"))  # type: ignore[attr-defined]
    listener.listen()
    alive_read, alive_write = os.pipe()
    launcher_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(alive_write)
            end_with_parent(launcher_pid)  # as parallel.processes.tied does first
            sign(folder, SERVER)
            forkserver.main(listener.detach(), alive_read, [])
        finally:
            os._exit(0)
    own: Any = forkserver._forkserver  # type: ignore[attr-defined]
    own._forkserver_address = listener.getsockname()
    own._forkserver_alive_fd, own._forkserver_pid = alive_write, pid
    os.close(alive_read)
    listener.close()


def output_to(path: Path, descriptor: int) -> None:
    with open(path, "wb") as file:
        os.dup2(file.fileno(), descriptor)


def sign(folder: Path, who: str) -> None:
    """Writes this process's pid and start time to a file; the time tells it from a later process with the same pid."""
    (folder / PIDS / who).write_text(f"{os.getpid()} {psutil.Process().create_time()}")


def living(folder: Path) -> list[psutil.Process]:
    """The processes that have signed and are still alive."""
    found = []
    for path in (folder / PIDS).iterdir():
        pid, began = path.read_text().split()
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.create_time() == float(began) and lives(process):
                found.append(process)
    return found


def doomed_rank(
    folder: Path, n_ranks: int, kill: Kill | None, plant: Callable[[], None] | None, *arguments: Any
) -> Any:
    """One rank: signs, sets the trap if it is rank 0, and trains as usual."""
    if plant is not None:
        plant()
    rank = int(os.environ["RANK"])
    output_to(folder / f"rank-{rank}.log", 1)
    os.dup2(1, 2)
    sign(folder, f"rank {rank}")
    if kill is not None and rank == 0:
        set_trap(folder, n_ranks, kill)
    return launcher.training.start.train_rank(*arguments)


def set_trap(folder: Path, n_ranks: int, kill: Kill) -> None:
    """Wraps the function of the kill's moment, so that the kill follows its n-th call after a delay."""
    module_name, path, _ = MOMENTS[kill.moment]
    *above, name = path.split(".")
    holder: Any = functools.reduce(getattr, above, __import__(module_name, fromlist=["_"]))
    real = getattr(holder, name)
    calls = 0

    @functools.wraps(real)
    def entered(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != kill.occurrence:
            return real(*arguments, **named)
        inside = threading.Event()
        inside.set()
        threading.Thread(target=execute, args=(folder, n_ranks, kill, inside), daemon=True).start()
        try:
            return real(*arguments, **named)
        finally:
            inside.clear()

    setattr(holder, name, entered)


def execute(folder: Path, n_ranks: int, kill: Kill, inside: threading.Event) -> None:
    """Waits for the delay, then kills the victims, this process last if it is one of them."""
    time.sleep(kill.delay_seconds)
    victims = [kill.victim] if kill.victim != ALL else [f"rank {rank}" for rank in [*range(1, n_ranks), 0]]
    pids = [int((folder / PIDS / victim).read_text().split()[0]) for victim in victims]
    (folder / "landed").write_text("inside" if inside.is_set() else "after")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the run has ended meanwhile
            os.kill(pid, signal.SIGKILL)


def updates(run: Path) -> list[tuple]:
    """Step, loss, norm and tokens of each update in metrics.jsonl."""
    rows = read_metrics(run / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in rows if "loss" in row]


def newest_checkpoint(run: Path) -> int:
    """The step of the run's newest checkpoint, 0 where there is none."""
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit()), default=0)


class Drill:
    """A folder with token files, the uninterrupted runs of each layout, and the runs that are killed."""

    def __init__(self, folder: Path, seed: int, plant: Callable[[], None] | None = None) -> None:
        """``plant`` is called in every rank of a restart, to break it on purpose."""
        self.folder = folder
        self.seed = seed
        self.plant = plant
        self.tokens = write_tokens(folder)
        self.references: dict[str, tuple[list[tuple], list[dict]]] = {}

    def reference(self, layout: str) -> tuple[list[tuple], list[dict]]:
        """Updates and ledger of the layout's uninterrupted run."""
        if layout not in self.references:
            config = write_config(self.folder, layout.replace(" ", "-"), self.tokens, layout)
            code, errors = start(config, LAYOUTS[layout][0], None)
            assert code == 0, errors
            run = config.with_suffix("")
            self.references[layout] = updates(run), read_metrics(run / "ledger.jsonl")
        return self.references[layout]

    def run(self, number: int) -> Outcome:
        """One run: kills it as planned, resumes it to its end and judges it; its folder is kept if it has problems."""
        layout, kills = plan(self.seed, number)
        outcome = Outcome(number, layout, kills)
        reference = self.reference(layout)
        began = time.monotonic()
        config = write_config(self.folder, f"run-{number:03d}", self.tokens, layout)
        run, n_ranks = config.with_suffix(""), LAYOUTS[layout][0]
        for attempt, kill in enumerate([*kills, None]):
            newest = newest_checkpoint(run) if run.exists() else 0
            code, errors = start(config, n_ranks, kill, self.plant if attempt else None)
            outcome.problems += judge_left(config.with_suffix(".kill"))
            landed = config.with_suffix(".kill") / "landed"
            if kill is not None:
                outcome.landed.append(landed.read_text() if landed.exists() else "not at all")
                outcome.problems += judge_kill(kill.victim, outcome.landed[-1], code, errors)
            elif code != 0:
                outcome.problems.append(f"the last start ended with code {code}: {errors.strip()[-500:]}")
            if attempt and kill is None:
                outcome.resumed_from.append(newest)
        try:
            outcome.problems += judge_restart(run, newest)
            outcome.problems += judge_end(run, *reference)
        except UserError as error:  # metrics.jsonl or the ledger is not in order
            outcome.problems += error.problems
        outcome.seconds = time.monotonic() - began
        if not outcome.problems:
            shutil.rmtree(run)
        return outcome


def judge_kill(victim: str, landed: str, code: int, errors: str) -> list[str]:
    """Problems with the exit code and stderr of a start in which ``victim`` was killed.

    It must end with code 1 and say which process was killed; a killed launcher ends by the signal, without a message.
    """
    if landed == "not at all":
        return [] if code == 0 else [f"nobody was killed, and the start ended with code {code}: {errors[-500:]}"]
    if code == 0:
        return []  # the kill hit a run that had nothing left to do
    if victim == LAUNCHER:
        expected = code == -signal.SIGKILL and errors == ""
    else:
        expected = code == 1 and (SERVER_KILLED if victim == SERVER else "SIGKILL") in errors
    return [] if expected else [f"code {code} after a kill of {victim}, and stderr {errors[-500:]!r}"]


def judge_left(folder: Path) -> list[str]:
    """A line for each process of fork server and ranks that is still alive some seconds after its launcher ended."""
    left = wait_for(lambda: living(folder))
    for process in left:
        process.kill()
    return [f"{process} outlived its launcher" for process in left]


def judge_restart(run: Path, newest: int) -> list[str]:
    """Problems of a restart: it must resume from the newest checkpoint, and no checkpoint may be damaged."""
    resumed = [row["step"] for row in read_metrics(run / "metrics.jsonl") if row.get("event") == "resume"]
    problems = []
    if 0 < newest < STEPS and resumed[-1:] != [newest]:
        problems.append(f"resumed from {resumed[-1:]}, and step {newest} was there")
    damaged = [path.name for path in (run / "checkpoints").iterdir() if "damaged" in path.name]
    return problems + [f"{name} was set aside after a kill" for name in damaged]


def judge_end(run: Path, rows: list[tuple], ledger: list[dict]) -> list[str]:
    """Problems of the finished run: its numbers, samples and files must be those of the uninterrupted run."""
    problems = []
    if updates(run) != rows:
        problems.append(f"updates differ: {updates(run)}, uninterrupted {rows}")
    seen = read_metrics(run / "ledger.jsonl")
    if seen != ledger:
        problems.append(f"the ledger differs: {seen}, uninterrupted {ledger}")
    samples = [(row["step"], row["first_sample"], row["last_sample"]) for row in seen]
    if samples != [(step, BATCH * (step - 1), BATCH * step - 1) for step in range(1, STEPS + 1)]:
        problems.append(f"samples were skipped or repeated: {samples}")
    found = find(str(run))
    if [int(directory.name.removeprefix("step-")) for directory in found.directories] != [STEPS - EVERY, STEPS]:
        problems.append(f"checkpoints {[directory.name for directory in found.directories]} are left")
    problems += [f"{path.name} is left" for path in found.partial]
    return problems + [line for directory in found.directories for line in problems_of(directory)]


def summary(outcomes: list[Outcome], seed: int) -> dict[str, Any]:
    """The drill's summary for JSON: counts by moment, victim and layout, and the failed runs."""
    last = [(outcome, outcome.kills[-1], outcome.landed[-1]) for outcome in outcomes]
    return {
        "runs": len(outcomes),
        "seed": seed,
        "resumed": sum(not outcome.problems for outcome in outcomes),
        "failed": [asdict(outcome) for outcome in outcomes if outcome.problems],
        "moments": {
            moment: dict(Counter(landed for _, kill, landed in last if kill.moment == moment)) for moment in MOMENTS
        },
        "victims": dict(sorted(Counter(kill.victim for _, kill, _ in last).items())),
        "layouts": dict(Counter(outcome.layout for outcome in outcomes)),
        "resumed_from": dict(sorted(Counter(step for outcome in outcomes for step in outcome.resumed_from).items())),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
    }


def line_of(outcome: Outcome) -> str:
    """One run's outcome as a line of text."""
    kill = outcome.kills[-1]
    verdict = f"FAILED: {outcome.problems}" if outcome.problems else "resumed, equal"
    what = f"{outcome.layout}: {kill.victim} killed {outcome.landed[-1]} {kill.moment} {kill.occurrence}"
    return f"{outcome.seconds:4.1f} s  {what}: {verdict}"


def main() -> int:
    """The command; returns 1 where a run has problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="seed of the runs (default: a new one each time)")
    parser.add_argument("--only", type=int, default=None, help="make only this run of the seed")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    numbers = [options.only] if options.only is not None else range(options.runs)
    folder = Path(tempfile.mkdtemp(prefix="kill-drill-"))
    print(f"seed {seed}, in {folder}", file=sys.stderr, flush=True)
    drill, outcomes = Drill(folder, seed), []
    # Ctrl-C ends the drill with the summary of what was run; standard output holds nothing but that.
    with contextlib.suppress(KeyboardInterrupt), contextlib.redirect_stdout(sys.stderr):
        for number in numbers:
            outcomes.append(drill.run(number))
            print(f"{number + 1}/{options.runs}  {line_of(outcomes[-1])}", file=sys.stderr, flush=True)
    result = summary(outcomes, seed)
    print(json.dumps(result))
    if not result["failed"]:
        shutil.rmtree(folder)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    from kill_drill import main as importable_main  # so that the ranks find these functions by their module's name

    sys.exit(importable_main())
