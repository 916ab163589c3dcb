"""Checks, before the process group is opened, that all ranks are there and agree; every rank names those that do not.

A process group that lacks a rank only reports a timeout, and one whose ranks run different code reports nothing. The
roll call uses the same store, at MASTER_ADDR:MASTER_PORT, as the process group after it.
"""

import contextlib
import datetime
import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from parallel.processes.environment import TOKEN, number
from parallel.processes.rendezvous import ForeignStore, rendezvous_store, signed, verified

NODE_SECONDS = 60  # that a rank waits for another one of its node before it does the work itself
LINGER_SECONDS = 10  # that rank 0, which hosts the store, waits for the others to read the verdict before it may end


class RollCallError(Exception):
    """Ranks are missing, or disagree. ``lines`` says how, and is the same on every rank that could be reached."""

    def __init__(self, lines: Sequence[str], *, is_disagreement: bool) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)
        self.is_disagreement = is_disagreement  # False: a rank did not answer


class RollCall:
    """The ranks' agreement over a store that they share. All ranks make one, at the same time.

    Keep it until the process group is open, since rank 0 hosts the store. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    must be set. ``hosts``: each rank's node, where that is known. Raises RollCallError where rank 0 cannot listen,
    where it cannot be reached within ``limit_seconds``, and where the store is another job's.
    """

    def __init__(self, limit_seconds: float, hosts: Sequence[str] | None = None) -> None:
        self.rank, self.world_size = number("RANK"), number("WORLD_SIZE")
        self.limit_seconds = limit_seconds
        self.hosts = hosts
        try:
            self.store = rendezvous_store(limit_seconds)
        except OSError as error:
            raise RollCallError([self._cannot_listen(error)], is_disagreement=False) from error
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise RollCallError([self._unreachable()], is_disagreement=False) from error
        except ForeignStore as error:
            raise RollCallError([self._foreign(error)], is_disagreement=False) from error

    def _cannot_listen(self, error: OSError) -> str:
        place = f"MASTER_ADDR={os.environ['MASTER_ADDR']} and MASTER_PORT={os.environ['MASTER_PORT']}"
        remedy = "choose another MASTER_PORT" if error.errno == errno.EADDRINUSE else "set them to a place of its own"
        reason = os.strerror(error.errno) if error.errno else str(error)
        return f"{self._name(0)} must be able to listen at {place}, and cannot: {reason}; {remedy}"

    def _unreachable(self) -> str:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        return (
            f"{self._name(self.rank)} could not reach {self._name(0)} at {address}:{port} within "
            f"{self.limit_seconds:g} s (train.start_seconds); "
            f"is that node up, and is {address} its address on the network of the nodes?"
        )

    def _foreign(self, error: ForeignStore) -> str:
        return (
            f"{self._name(self.rank)}: {error}; choose another MASTER_PORT, and set {TOKEN} to one secret word on all "
            "ranks of this job alone"
        )

    def agree(self, name: str, facts: Mapping[str, str]) -> None:
        """Returns when all ranks have called it with equal facts. All ranks call it.

        Else raises RollCallError on all of them: with a line that names the missing ranks, or with a line for each fact
        that differs.
        """
        self._round(name, dict(facts), lambda answers: self._differences(answers))

    def fail_together(self, name: str, problems: Sequence[str]) -> None:
        """Returns when all ranks have called it without problems. All ranks call it.

        Else raises RollCallError on all of them, with every rank's problems, or with a line that names missing ranks.
        """
        self._round(
            name, list(problems), lambda answers: list(dict.fromkeys(line for each in answers for line in each))
        )

    def judge(self, name: str, answer: Any, problems: Callable[[list[Any]], list[str]]) -> None:
        """Returns when all ranks have called it and rank 0 finds no problems in their answers. All ranks call it.

        Rank 0 calls ``problems`` with the answers, by rank, which must be values that JSON can hold. Else raises
        RollCallError on all ranks, with the problems or a line that names missing ranks.
        """
        self._round(name, answer, problems)

    def share(self, name: str, text: str | None = None) -> str:
        """Rank 0's text, on every rank, over the store. All ranks call it; only rank 0's ``text`` counts."""
        if self.rank == 0:
            self._set(f"{name}/text", text or "")
        return self._get(f"{name}/text")

    def once_on_node(self, name: str, what: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, run by one rank of a node for all of its ranks that pass the same ``what``.

        The result must be a value that JSON can hold. The first rank to call it does the work. A rank that has waited
        for NODE_SECONDS does the work too, since the first may have ended.
        """
        key = f"{name}/{hashlib.sha256(f'{socket.gethostname()} {what}'.encode()).hexdigest()}"
        if self.store.add(f"{key}/ranks", 1) > 1 and self._comes(key, min(NODE_SECONDS, self.limit_seconds / 2)):
            return json.loads(self._get(key))
        result = work()
        self._set(key, json.dumps(result))
        return result

    def _comes(self, key: str, limit_seconds: float) -> bool:
        """Whether the key appears within the limit. It is polled, since a store's wait that times out breaks it."""
        deadline, pause = time.monotonic() + limit_seconds, 0.05
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)  # longer and longer, so that a thousand ranks do not overload the store
        return True

    def decide_together(
        self,
        name: str,
        answer: Any,
        expected: Collection[int],
        limit_seconds: float,
        decide: Callable[[dict[int, Any]], Any],
    ) -> Any:
        """The decision of rank 0's ``decide`` on the answers that came within the limit, on every rank that is there.

        The ranks of ``expected``, which must include rank 0, call it. ``decide`` gets the answers by rank; a rank that
        does not answer is left out, and nothing is raised for it. Answers and decision must be values that JSON can
        hold. Raises RollCallError where rank 0 does not decide within twice the limit, counted from this rank's answer.
        """
        self._set(f"{name}/{self.rank}", json.dumps(answer))
        if self.rank == 0:
            missing = self._wait_for(name, expected, limit_seconds)
            answers = {rank: self._answer(name, rank) for rank in sorted(expected) if rank not in missing}
            decision = decide(answers)
            self._set(name, json.dumps(decision))
            self._linger([f"{name}/read/{rank}" for rank in answers if rank != 0])
            return decision
        try:
            self.store.wait([name], datetime.timedelta(seconds=2 * limit_seconds))
            decision = json.loads(self._get(name))
            self.store.set(f"{name}/read/{self.rank}", "")
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            line = f"{self._name(0)} ended or was cut off in '{name}'"
            raise RollCallError([line], is_disagreement=False) from error
        return decision

    def _round(self, name: str, answer: Any, judge: Callable[[list[Any]], list[str]]) -> None:
        """Hands this rank's answer to rank 0's ``judge``; raises RollCallError on all ranks if it returns any lines."""
        self._set(f"{name}/{self.rank}", json.dumps(answer))
        if self.rank == 0:
            missing = self._wait_for(name, range(self.world_size), self.limit_seconds)
            present = [rank for rank in range(self.world_size) if rank not in missing]
            verdict = self._verdict(name, missing, judge)
            self._set(name, json.dumps(verdict))
        else:
            present = []
            verdict = self._read_verdict(name)
        with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):  # rank 0 did not linger long enough
            self.store.set(f"{name}/read/{self.rank}", "")
        self._linger([f"{name}/read/{rank}" for rank in present])
        lines = verdict.get("missing") or verdict["differ"]
        if lines:
            raise RollCallError(lines, is_disagreement="differ" in verdict)

    def _verdict(
        self, name: str, missing: Collection[int], judge: Callable[[list[Any]], list[str]]
    ) -> dict[str, list[str]]:
        """On rank 0, what is wrong: {"missing": lines} or {"differ": lines}, the latter empty if nothing is."""
        if missing:
            return {"missing": [self._absence(missing)]}
        try:
            return {"differ": judge([self._answer(name, rank) for rank in range(self.world_size)])}
        except RollCallError as error:
            return {"missing": error.lines}

    def _answer(self, name: str, rank: int) -> Any:
        return json.loads(self._get(f"{name}/{rank}"))

    def _set(self, key: str, text: str) -> None:
        self.store.set(key, signed(key, text))

    def _get(self, key: str) -> str:
        """The text that a rank of this job has set. Raises RollCallError where another process has set it."""
        try:
            return verified(key, self.store.get(key))
        except ForeignStore as error:
            raise RollCallError([self._foreign(error)], is_disagreement=False) from error

    def _wait_for(self, name: str, expected: Collection[int], limit_seconds: float) -> set[int]:
        """On rank 0, those of the expected ranks that have not answered within the limit."""
        deadline, missing = time.monotonic() + limit_seconds, set(expected)
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not self.store.check([f"{name}/{rank}"])}
            time.sleep(0.02 if missing else 0)
        return missing

    def _read_verdict(self, name: str) -> dict[str, list[str]]:
        """On the other ranks, rank 0's verdict; where rank 0 cannot be reached, a verdict that says so."""
        try:
            self.store.wait([name], datetime.timedelta(seconds=self.limit_seconds + LINGER_SECONDS))
            return json.loads(self._get(name))
        except (dist.DistNetworkError, dist.DistStoreError):
            line = f"{self._name(0)} ended or was cut off before all ranks were there; its log says why"
            return {"missing": [line]}

    def _linger(self, keys: list[str]) -> None:
        """Waits until the keys are there, at most LINGER_SECONDS. Only rank 0 passes any."""
        deadline = time.monotonic() + LINGER_SECONDS
        while keys and not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _absence(self, missing: Collection[int]) -> str:
        nodes = f" on {', '.join(sorted({self.hosts[rank] for rank in missing}))}" if self.hosts else ""
        return (
            f"no answer from {_ranks(sorted(missing))}{nodes} within {self.limit_seconds:g} s (train.start_seconds); "
            f"the other {self.world_size - len(missing)} of {self.world_size} ranks are there"
        )

    def _differences(self, answers: list[dict[str, str]]) -> list[str]:
        """A line for each fact that is not the same on all ranks."""
        lines = []
        for fact in dict.fromkeys(key for answer in answers for key in answer):
            held: dict[str, list[int]] = {}
            for rank, answer in enumerate(answers):
                held.setdefault(answer.get(fact, "nothing"), []).append(rank)
            if len(held) > 1:
                each = "; ".join(f"{value} on {self._names(ranks)}" for value, ranks in held.items())
                lines.append(
                    f"{fact} must be the same on all ranks, and is {each}; make the nodes' installations equal"
                )
        return lines

    def _name(self, rank: int) -> str:
        host = self.hosts[rank] if self.hosts else socket.gethostname() if rank == self.rank else None
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def _names(self, ranks: list[int]) -> str:
        return (
            f"{_ranks(ranks)} ({', '.join(dict.fromkeys(self.hosts[r] for r in ranks))})"
            if self.hosts
            else _ranks(ranks)
        )


def _ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks in words, with neighbours joined: ``rank 3``, ``ranks 0-3, 6``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
