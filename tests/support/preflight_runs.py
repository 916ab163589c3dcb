"""Preflights of local processes that act as ranks on several nodes, with faults planted in some of them."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.preflight import course, device
from parallel.processes.lifeline import end_with_parent
from parallel.processes.roll_call import RollCall, RollCallError
from parallel.processes.start import claimed_port, fork_server, rank_environments

STAGE_SECONDS = 20.0
START_SECONDS = 100.0


@dataclasses.dataclass
class Seen:
    """One rank's result: its exit code, and findings (rank 0), the lines of a RollCallError, or neither."""

    code: int | None  # negative: a signal
    findings: dict[str, Any] | None = None
    lines: list[str] | None = None
    is_disagreement: bool = False


def preflight(hosts: Sequence[str], folder: Path, faults: Mapping[int, str] | None = None) -> list[Seen]:
    """Runs a preflight with one rank for each of ``hosts`` and faults by rank; returns each rank's result."""
    context = fork_server(["parallel.preflight.course"])
    n_ranks = len(hosts)
    processes = []
    with claimed_port() as port:
        environments = rank_environments(n_ranks, port)
    for rank, environment in enumerate(environments):
        given = (environment, list(hosts), (faults or {}).get(rank, ""), folder)
        processes.append(context.Process(target=_rank, args=given, daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + 250
    stopped = [rank for rank, fault in (faults or {}).items() if fault.startswith("stopped")]
    try:
        for rank in (rank for rank in range(n_ranks) if rank not in stopped):
            processes[rank].join(max(1.0, deadline - time.monotonic()))
            assert processes[rank].exitcode is not None, f"rank {rank} still lives"
    finally:
        for process in processes:
            process.kill()
            process.join()
    told = [folder / f"rank-{rank}.json" for rank in range(n_ranks)]
    said = [json.loads(path.read_text()) if path.exists() else {} for path in told]
    return [Seen(process.exitcode, **each) for process, each in zip(processes, said, strict=True)]


def _rank(environment: dict[str, str], hosts: list[str], fault: str, folder: Path) -> None:
    end_with_parent()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    rank = int(environment["RANK"])
    course.SEEN_SECONDS, course.LATE_SECONDS = 3.0, 3.0
    shared = folder / ("own" if fault == "a disk of its own" else "shared")
    problems = ["run.yaml: no such file; check it"] if fault == "no config" else []
    plant(fault)
    try:
        found = course.run_course(RollCall(START_SECONDS, hosts), shared, problems, STAGE_SECONDS)
        said = {"findings": None if found is None else dataclasses.asdict(found)}
    except RollCallError as error:
        said = {"lines": error.lines, "is_disagreement": error.is_disagreement}
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))
    sys.exit(0)


def plant(fault: str) -> None:
    """Breaks this process in the named way; an unknown name breaks nothing."""
    if fault == "a wrong product":
        device.torch.mm = lambda left, right, out: out.fill_(float(len(left))).view(-1)[7].add_(64)  # type: ignore
    elif fault == "forgetful memory":
        fill = device._fill

        def forget(blocks: list[Any], expected: Any) -> None:
            fill(blocks, expected)
            blocks[-1][-3] ^= 4

        device._fill = forget
    elif fault in ("stopped at its second meeting", "stuck at its second meeting"):
        meet, names = course.meet, []

        def meet_twice(store: Any, name: str, *rest: Any) -> Any:
            names.append(name)
            if len(names) == 2:
                os.kill(os.getpid(), signal.SIGSTOP) if fault.startswith("stopped") else time.sleep(10_000)
            return meet(store, name, *rest)

        course.meet = meet_twice
    elif fault == "killed in the memory test":
        course.check_memory = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
