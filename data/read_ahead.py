"""Reading the samples of the next steps ahead, by a thread, while the present step is computed.

The training order alone determines these samples, so reading ahead gives what the dataset would give later. A step
makes the same requests as to the dataset; samples that were read ahead for other steps are never handed out.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np

from data.batch import Batch
from data.dataset import Dataset
from data.errors import DataError, UnreadObject, reason_of

Prepared = TypeVar("Prepared")
LOOK_SECONDS = 1.0  # how often a waiting step checks that the thread, which may have died, still lives
CLOSE_SECONDS = 5.0  # a thread that a disk blocks for longer is left to end with the process


class UnreadSamples(Exception):
    """Raised where a step's samples could not be read for another reason than bad data or a store, such as the disk.

    The message is one line.
    """


@dataclass(frozen=True)
class Request:
    """A step's request: to count its samples' targets and tokens, or to read some of its samples."""

    kind: Literal["count", "read"]
    samples: bytes  # the samples' numbers, int64


@dataclass(frozen=True)
class Answer:
    """The answer to a request: a value, or the error that was raised."""

    value: Any
    error: Exception | None = None


class ReadAhead(Generic[Prepared]):
    """Answers the requests of a run's steps, in their order, with what a thread has read ahead. A context manager.

    Each step first has its samples counted (``count``), then reads this rank's part of them, micro-batch by micro-batch
    (``read``). The thread is at most ``depth`` steps ahead of the step that counted last; with a depth of 0 there is no
    thread, and each request is answered when it is made.
    """

    def __init__(
        self,
        dataset: Dataset,
        share: Callable[[np.ndarray], np.ndarray],
        prepare: Callable[[Batch], Prepared],
        *,
        depth: int,
        n_further: int = 0,
    ) -> None:
        """``share`` maps a step's samples to those that this rank reads, (n, micro_batch_size).

        The thread calls ``prepare`` with each batch that it has read. ``n_further`` is the number of depths that
        ``count_further`` counts.
        """
        self.dataset, self.share, self.prepare, self.depth, self.n_further = dataset, share, prepare, depth, n_further
        self._waited = 0.0  # seconds that requests took, since ``figures`` or ``expect``
        self._n_thrown_away = 0  # micro-batches that were read and never requested
        self._plan: Iterator[tuple[int, np.ndarray]] = iter(())
        self._step = 0  # the step of the last request
        self._counts: tuple[bytes, tuple[tuple[int, int], list[int]]] = (b"", ((0, 0), []))
        self._expected: deque[tuple[int, Request]] = deque()  # (step, request) not yet made
        self._to_find: deque[Request] = deque()  # the last ones of _expected, which the thread has not yet begun
        self._found: deque[Answer] = deque()  # answers to the first ones of _expected
        self._plan_number = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="read ahead", daemon=True) if depth else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def expect(self, plan: Iterable[tuple[int, np.ndarray]]) -> None:
        """Sets the steps that come next, with their samples: call it at the start, and after each rollback.

        What was read for other steps is thrown away.
        """
        with self._changed:
            self._forget()
            self._plan, self._waited = iter(plan), 0.0
            self._changed.notify_all()

    def count(self, indices: np.ndarray) -> tuple[int, int]:
        """(targets that count in the loss, input tokens that are no padding) of a step's samples; cached in a step."""
        return self._counted(indices)[0]

    def count_further(self, indices: np.ndarray, depth: int) -> list[int]:
        """``Dataset.count_further`` of a step's samples, for at most ``n_further`` depths."""
        assert depth <= self.n_further
        return self._counted(indices)[1][:depth]

    def read(self, indices: np.ndarray) -> Prepared:
        """The batch of these samples, prepared by ``prepare``.

        Raises DataError, UnreadObject or UnreadSamples, which name the step.
        """
        return self._answer(Request("read", _as_bytes(indices)))

    def documents(self, indices: np.ndarray) -> list[dict[str, Any]]:
        """Where the samples' input tokens come from: ``Dataset.documents``, without reading ahead."""
        return self.dataset.documents(indices)

    def progress(self, consumed: int, skipped: Any = ()) -> dict[str, float]:
        """Metrics of the progress in each source: ``Dataset.progress``."""
        return self.dataset.progress(consumed, skipped)

    def figures(self) -> dict[str, float]:
        """Metrics of a step that has ended; call it once a step.

        ``loader_wait_seconds`` is the time that its requests took, ``loader_thrown_away`` the number of micro-batches
        that were read ahead in vain since the start, if there are any.
        """
        waited, self._waited = self._waited, 0.0
        thrown_away = {"loader_thrown_away": self._n_thrown_away} if self._n_thrown_away else {}
        return {"loader_wait_seconds": waited, **thrown_away}

    def _counted(self, indices: np.ndarray) -> tuple[tuple[int, int], list[int]]:
        samples = _as_bytes(indices)
        if self._counts[0] != samples:
            self._counts = (samples, self._answer(Request("count", samples)))
        return self._counts[1]

    def _answer(self, request: Request) -> Any:
        """The value of the answer. Raises the error that occurred, with the step's number in its line."""
        if os.getpid() != self._process:  # a fork of a rank has no thread, and may have inherited a held lock
            return self._find(request)
        began = time.perf_counter()
        found = self._wait_for_samples() if self._comes_next(request) else None
        answer = found or self._attempt(request)
        self._waited += time.perf_counter() - began
        if isinstance(answer.error, DataError):
            raise DataError(*(f"step {self._step}: {line}" for line in answer.error.problems)) from answer.error
        if answer.error is not None:
            kind = UnreadObject if isinstance(answer.error, UnreadObject) else UnreadSamples
            raise kind(f"step {self._step}: its samples cannot be read: {reason_of(answer.error)}") from answer.error
        return answer.value

    def _comes_next(self, request: Request) -> bool:
        """Whether the request is the expected one; if not, everything that was read ahead is thrown away."""
        with self._changed:
            if not self._expected:
                self._plan_step()
            if not self._expected or self._expected[0][1] != request:
                self._forget()
                return False
            self._step, _ = self._expected.popleft()
            if self._thread is None:
                self._to_find.popleft()
            self._changed.notify_all()  # the thread may have room for one step more
            return True

    def _wait_for_samples(self) -> Answer | None:
        """The thread's answer to the request that was next; None where there is no thread, or it has died."""
        with self._changed:
            while self._thread is not None and self._thread.is_alive():
                if self._found:
                    return self._found.popleft()
                self._changed.wait(LOOK_SECONDS)
        return None

    def _plan_step(self) -> None:
        """Adds the requests of the plan's next step, if there is one, to those expected."""
        for step, indices in self._plan:
            parts = [Request("read", _as_bytes(part)) for part in self.share(indices)]
            requests = [Request("count", _as_bytes(indices)), *parts]
            self._expected.extend((step, request) for request in requests)
            self._to_find.extend(requests)
            break

    def _forget(self) -> None:
        """Throws away all answers and expected requests; an answer that the thread still works on will be dropped."""
        in_vain = zip(self._expected, self._found, strict=False)
        self._n_thrown_away += sum(request.kind == "read" for (_, request), _ in in_vain)
        self._plan, self._plan_number = iter(()), self._plan_number + 1
        for each in (self._expected, self._to_find, self._found):
            each.clear()

    def _work(self) -> None:
        """The thread's loop: it answers one request after another."""
        while (order := self._next_order()) is not None:
            plan_number, request = order
            answer = self._attempt(request)
            with self._changed:
                if plan_number == self._plan_number:
                    self._found.append(answer)
                else:
                    self._n_thrown_away += request.kind == "read"
                self._changed.notify_all()

    def _next_order(self) -> tuple[int, Request] | None:
        """(number of the plan, next request to answer), after waiting for room; None once the reader is closed."""
        with self._changed:
            while not self._is_closed:
                n_steps = sum(request.kind == "count" for _, request in self._expected)
                if not self._to_find and n_steps < self.depth:
                    self._plan_step()
                if self._to_find:
                    return self._plan_number, self._to_find.popleft()
                self._changed.wait()
        return None

    def _attempt(self, request: Request) -> Answer:
        try:
            return Answer(self._find(request))
        except Exception as error:  # of any kind: it is raised when the step makes the request
            return Answer(None, error)

    def _find(self, request: Request) -> Any:
        indices = np.frombuffer(request.samples, np.int64)
        if request.kind == "read":
            return self.prepare(self.dataset.read(indices))
        further = self.dataset.count_further(indices, self.n_further) if self.n_further else []
        return self.dataset.count(indices), further


def _as_bytes(indices: np.ndarray) -> bytes:
    return np.ascontiguousarray(indices, dtype=np.int64).tobytes()
