"""Runs a preflight stage by stage; after each stage only the nodes without a failure go on.

Rank 0 hosts the store, collects the answers and decides; it goes on doing so if its own node drops out. A rank that
does not answer within a stage's limit drops out with its node, so one broken node delays the others by one limit. Each
rank works in a thread of its own: a call that never returns (NCCL connecting to a peer that it cannot reach, a driver
that hangs) delays neither the verdict nor the end of the process.
"""

import faulthandler
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from parallel.preflight.device import check_memory, host_free_gib, multiply, open_device, sizes_of
from parallel.preflight.disk import file_bytes, missing_files, read_file, remove_file, write_file
from parallel.preflight.findings import Device, Disk, Findings, Link
from parallel.preflight.network import meet, schedule
from parallel.processes.roll_call import RollCall, RollCallError

STAGE_SECONDS = 120.0  # limit of a stage; a collective has a third of it. On sound nodes the longest takes seconds
LATE_SECONDS = 10.0  # by which a rank may begin a stage later than rank 0
ENDING_SECONDS = 30.0  # that a process may take to end where some of its work is stuck
SEEN_SECONDS = 20.0  # that a file may stay invisible to a node though it was written before the node looked
LOOKED_FOR = 8  # nodes whose files each node looks for: all of them would be a million look-ups for 1000 nodes

Answers = dict[int, dict[str, Any]]  # by rank: {"found": what the work returned} or {"failure": why it did not}


class DroppedOut(Exception):
    """This rank's node takes no further part, since this rank or another one there failed or was too late."""


def run_course(
    roll: RollCall,
    folder: Path,
    problems: Sequence[str] = (),
    stage_seconds: float = STAGE_SECONDS,
    tell: Callable[[str], object] = lambda line: None,
) -> Findings | None:
    """All measurements on rank 0, None on other ranks. All ranks call it, while no process group is open.

    A folder is made within ``folder``, on the shared disk, and removed again. ``problems`` are reasons why this rank
    cannot begin. ``tell`` is called with a line where a stage fails on this rank. Raises RollCallError on all ranks
    where rank 0 has problems (with ``is_disagreement`` set if all ranks have some: a mistake of the user's), and where
    rank 0 ended or cannot be reached. A rank that is stuck for longer than a stage may take prints its stacks on stderr
    and drops out; its process should end soon after, and is ended after 30 s (exit code 1).
    """
    course = _Course(roll, stage_seconds, tell)
    try:
        return course.run(folder, list(problems))
    except DroppedOut:
        return None
    finally:
        if course.is_stuck:  # what is stuck may keep Python from ending
            faulthandler.dump_traceback_later(ENDING_SECONDS, exit=True)


class _Worker:
    """A thread that runs one function after another, so that the caller can stop waiting for one that is stuck."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                self._results.put((work(), None))
            except BaseException as error:
                self._results.put((None, error))

    def do(self, work: Callable[[], Any], seconds: float) -> Any:
        """What ``work`` returns; raises what it raises, or queue.Empty where it takes longer than ``seconds``."""
        self._work.put(work)
        result, error = self._results.get(timeout=seconds)
        if error is not None:
            raise error
        return result


class _Course:
    def __init__(self, roll: RollCall, stage_seconds: float, tell: Callable[[str], object]) -> None:
        self.roll, self.rank, self.stage_seconds, self.tell = roll, roll.rank, stage_seconds, tell
        self.going = list(range(roll.world_size))  # the ranks that take part
        self.node_of = list(roll.hosts or [f"(the node of rank {rank})" for rank in self.going])
        self.device = torch.device("cpu")
        self.is_stuck = False  # some work of this rank has not returned
        self.worker = _Worker()  # CUDA's current device belongs to a thread, so one thread does everything
        self.failures: dict[str, list[str]] = {}  # on rank 0: by node, what went wrong there

    def run(self, folder: Path, problems: list[str]) -> Findings | None:
        """Runs all stages; returns the findings on rank 0, None elsewhere."""
        silent = self._begin(problems)
        devices = self._devices()
        disks = self._disks(folder)
        within = self._links("within the nodes", [(node,) for node in self._nodes()])
        pairs = []
        for number, meetings in enumerate(schedule(self._nodes())):
            here = set(self._nodes())
            pairs += self._links(f"pairs, round {number + 1}", [pair for pair in meetings if here.issuperset(pair)])
        nodes = tuple(self._nodes())
        whole = self._links("all nodes", [nodes]) if len(nodes) > 2 else []
        if self.rank != 0:
            return None
        return Findings(
            nodes=tuple(dict.fromkeys(self.node_of)),
            devices=tuple(devices),
            within=tuple(within),
            pairs=tuple(pairs),
            whole=whole[0] if whole else None,
            disks=tuple(disks),
            silent=tuple(silent),
            failures={node: tuple(lines) for node, lines in self.failures.items()},
        )

    def _nodes(self) -> list[str]:
        """The nodes that still take part, in the order of their ranks."""
        return list(dict.fromkeys(self.node_of[rank] for rank in self.going))

    def _ranks(self, *nodes: str) -> list[int]:
        return [rank for rank in self.going if self.node_of[rank] in nodes]

    def _begin(self, problems: list[str]) -> list[str]:
        """Finds out which ranks are there, and on which nodes; returns the nodes that did not answer, on rank 0."""
        silent: list[str] = []
        limit = self.roll.limit_seconds

        def decide(answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
            hosts = self.roll.hosts
            nodes = [hosts[r] if hosts else answers.get(r, {}).get("host", self.node_of[r]) for r in self.going]
            wrong = {rank: each["problems"] for rank, each in answers.items() if each["problems"]}
            silence = [f"did not begin within {limit:g} s (train.start_seconds)"]
            for rank, node in enumerate(nodes):
                lines = wrong.get(rank, [] if rank in answers else silence)
                if lines:
                    self.failures.setdefault(node, []).extend(f"rank {rank}: {line}" for line in lines)
                if lines is silence and node not in silent:
                    silent.append(node)
            going = [rank for rank, node in enumerate(nodes) if node not in self.failures]
            return {"nodes": nodes, "going": going, "lines": wrong.get(0, []), "all": len(wrong) == len(answers)}

        said = self.roll.decide_together(
            "begin", {"host": socket.gethostname(), "problems": problems}, self.going, limit, decide
        )
        if said["lines"]:
            raise RollCallError(said["lines"], is_disagreement=said["all"])
        self.node_of, self.going = said["nodes"], said["going"]
        self._leave_if_dropped()
        return silent

    def _devices(self) -> list[Device]:
        """Measures each rank's device by itself; returns the results on rank 0, an empty list elsewhere."""

        def opened() -> list[str]:
            self.device = open_device()
            return [self.device.type, torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"]

        kinds = self._stage("opening the device", opened, judge=_without_gpu)
        sizes = sizes_of(self.device)
        speeds = self._stage("matrix products", lambda: multiply(self.device, sizes))
        memories = self._stage("memory", lambda: [*check_memory(self.device, sizes), host_free_gib()])
        return [
            Device(
                rank=rank,
                node=self.node_of[rank],
                kind=kinds[rank]["found"][0],
                name=kinds[rank]["found"][1],
                matmul_tflops=max(speeds[rank]["found"]),
                matmul_worst_tflops=min(speeds[rank]["found"]),
                memory_gib=memory["found"][0],
                memory_gb_per_second=memory["found"][1],
                host_free_gib=memory["found"][2],
            )
            for rank, memory in memories.items()
            if "found" in memory
        ]

    def _disks(self, folder: Path) -> list[Disk]:
        """Measures the shared disk from one rank of each node; returns the results on rank 0, nothing elsewhere."""
        nodes, me = self._nodes(), self.node_of[self.rank]
        token = self.roll.share("token", str(time.time_ns()))
        folder = folder / f"disk-{token}"
        n_bytes = file_bytes(max(1, len(nodes)), sizes_of(self.device).disk_bytes)
        speaks = self.rank in self.going and self._ranks(me)[0] == self.rank

        def read() -> dict[str, Any]:
            here = nodes.index(me)
            following = [*nodes[here + 1 :], *nodes[:here]][:LOOKED_FOR]
            missed = missing_files(folder, following, SEEN_SECONDS)
            source = next((node for node in following if node not in missed), me)
            seconds = read_file(folder, source, token, n_bytes)
            return {"bytes": n_bytes, "from": source, "seconds": seconds, "misses": missed}

        written = self._stage("writing to the disk", lambda: speaks and write_file(folder, me, token, n_bytes))
        found = self._stage("reading from the disk", lambda: speaks and read())
        if speaks:
            remove_file(folder, me)
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # files of nodes that have dropped out
        return [
            Disk(
                node=self.node_of[rank],
                gb=answer["found"]["bytes"] / 1e9,
                write_seconds=written[rank]["found"],
                read_seconds=answer["found"]["seconds"],
                reads_from=answer["found"]["from"],
                misses=tuple(answer["found"]["misses"]),
            )
            for rank, answer in found.items()
            if answer.get("found")
        ]

    def _links(self, name: str, parties: list[tuple[str, ...]]) -> list[Link]:
        """Measures collectives among the ranks of each group of nodes, all groups at once; the results on rank 0.

        A failure is recorded for the whole group; which node is to blame follows from the other groups it was in.
        """
        parties = [nodes for nodes in parties if len(self._ranks(*nodes)) > 1]
        mine = next((nodes for nodes in parties if self.node_of[self.rank] in nodes), None)
        members = {nodes: self._ranks(*nodes) for nodes in parties}

        def work() -> tuple[float, float] | None:
            if mine is None:
                return None
            limit = self.stage_seconds / 3
            place = f"{name}, {mine[0]}"
            return meet(self.roll.store, place, members[mine], self.rank, self.device, sizes_of(self.device), limit)

        answers = self._stage(name, work, drops=False) if parties else {}
        return [_link(nodes, [answers.get(rank, {}) for rank in members[nodes]]) for nodes in parties if answers]

    def _stage(
        self,
        name: str,
        work: Callable[[], Any],
        *,
        judge: Callable[[Answers], dict[int, str]] | None = None,
        drops: bool = True,
    ) -> Answers:
        """Runs ``work`` on every rank that takes part; returns their answers on rank 0, an empty dict elsewhere.

        A rank drops out with its node where it does not answer, where ``judge`` gives a reason, and, with ``drops``,
        where its work fails. All ranks that take part, and rank 0, call it.
        """
        answer = self._answer(name, work) if self.rank in self.going else {}
        collected: Answers = {}

        def decide(answers: Answers) -> list[int]:
            collected.update({rank: each for rank, each in answers.items() if rank in self.going and each})
            gone = {rank: f"no answer within {self.stage_seconds:g} s" for rank in self.going if rank not in collected}
            if drops:
                gone |= {rank: each["failure"] for rank, each in collected.items() if "failure" in each}
            gone |= judge(collected) if judge is not None else {}
            for rank, why in gone.items():
                self.failures.setdefault(self.node_of[rank], []).append(f"rank {rank}, {name}: {why}")
            return [rank for rank in self.going if self.node_of[rank] not in self.failures]

        limit = self.stage_seconds + LATE_SECONDS
        self.going = self.roll.decide_together(name, answer, {0, *self.going}, limit, decide)
        self._leave_if_dropped()
        return collected

    def _answer(self, name: str, work: Callable[[], Any]) -> dict[str, Any]:
        """{"found": what ``work`` returned} or {"failure": why it did not}; empty where it is stuck."""
        faulthandler.dump_traceback_later(self.stage_seconds + LATE_SECONDS, exit=True)  # stuck with Python's lock held
        try:
            answer = {"found": self.worker.do(work, self.stage_seconds)}
        except queue.Empty:
            faulthandler.dump_traceback()
            self.is_stuck = True
            return {}
        except (RuntimeError, OSError) as error:  # torch's and the disk's; anything else is a fault of this code
            answer = {"failure": " ".join(str(error).split())[:300] or type(error).__name__}
            place = f"rank {self.rank} on {self.node_of[self.rank]}"
            self.tell(f"{place}: {name}: {answer['failure']}")
        finally:
            faulthandler.cancel_dump_traceback_later()
        return answer

    def _leave_if_dropped(self) -> None:
        if self.rank not in (0, *self.going):
            raise DroppedOut


def _without_gpu(answers: Answers) -> dict[int, str]:
    """A reason for each rank that has no GPU where other ranks have one: they have no collectives in common."""
    kinds = {rank: each["found"][0] for rank, each in answers.items() if "found" in each}
    if "cuda" not in kinds.values():
        return {}
    return {rank: "torch finds no GPU, as it does elsewhere" for rank, kind in kinds.items() if kind != "cuda"}


def _link(nodes: tuple[str, ...], answers: list[dict[str, Any]]) -> Link:
    """The link's result from its ranks' answers: the slowest rank's bandwidths, or the first failure of any rank."""
    failures = [each["failure"] for each in answers if "failure" in each]
    found = [each["found"] for each in answers if "found" in each]
    if failures or len(found) < len(answers):
        return Link(nodes=nodes, failure=failures[0] if failures else "no answer")
    all_reduce, all_to_all = (min(each) for each in zip(*found, strict=True))
    return Link(nodes=nodes, all_reduce_gb_per_second=all_reduce, all_to_all_gb_per_second=all_to_all)
