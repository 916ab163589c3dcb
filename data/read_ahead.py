"""The samples of the next steps, read by a thread while the present one is computed.

Which samples these are follows from the order of the data alone, so what is read ahead is what the dataset gives when
it is asked later. A step asks as it would ask the dataset; a guess that was wrong is never handed out.
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
LOOK_SECONDS = 1.0  # a thread that has died says nothing, so it is looked for
CLOSE_SECONDS = 5.0  # a thread that a disk holds for longer is left to end with the process


class UnreadSamples(Exception):
    """A step's samples could not be read, through no fault of the data's or a store's: the disk's, say. One line."""


@dataclass(frozen=True)
class Request:
    """What a step asks for: how many targets and tokens its samples have, or some samples themselves."""

    kind: Literal["count", "read"]
    samples: bytes  # their numbers, int64


@dataclass(frozen=True)
class Answer:
    """What was found, or what went wrong."""

    value: Any
    error: Exception | None = None


class ReadAhead(Generic[Prepared]):
    """Answers the requests of a run's steps, in their order, with what a thread has read ahead.

    Each step asks to ``count`` its samples, then to ``read`` this rank's part of them, micro-batch by micro-batch. The
    thread is at most ``depth`` steps ahead of the step that counted last; with a depth of 0 there is no thread, and
    each request is answered when it comes. To be used as a context.
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
        """``share``: of a step's samples those that this rank reads, (n, micro_batch_size).

        ``prepare`` is done with each batch in the thread, once it is read. ``n_further``: so many depths are counted
        by ``count_further``.
        """
        self.dataset, self.share, self.prepare, self.depth, self.n_further = dataset, share, prepare, depth, n_further
        self._waited = 0.0  # seconds that requests took, since ``figures`` or ``expect``
        self._n_thrown_away = 0  # micro-batches that were read and never asked for
        self._plan: Iterator[tuple[int, np.ndarray]] = iter(())
        self._step = 0  # the last one that counted
        self._counts: tuple[bytes, tuple[tuple[int, int], list[int]]] = (b"", ((0, 0), []))
        self._expected: deque[tuple[int, Request]] = deque()  # of which step; not yet asked for
        self._to_find: deque[Request] = deque()  # the last of them, not yet begun
        self._found: deque[Answer] = deque()  # to the first of them
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
        """The steps that come next and their samples: at the start, and whenever the run goes elsewhere.

        What was read for other steps is thrown away.
        """
        with self._changed:
            self._forget()
            self._plan, self._waited = iter(plan), 0.0
            self._changed.notify_all()

    def count(self, indices: np.ndarray) -> tuple[int, int]:
        """As ``Dataset.count``, for the samples of a step; asked again in the same step, it costs nothing."""
        return self._counted(indices)[0]

    def count_further(self, indices: np.ndarray, depth: int) -> list[int]:
        """As ``Dataset.count_further``, for at most ``n_further`` depths."""
        assert depth <= self.n_further
        return self._counted(indices)[1][:depth]

    def read(self, indices: np.ndarray) -> Prepared:
        """As ``Dataset.read``, prepared."""
        return self._answer(Request("read", _as_bytes(indices)))

    def documents(self, indices: np.ndarray) -> list[dict[str, Any]]:
        """As ``Dataset.documents``."""
        return self.dataset.documents(indices)

    def progress(self, consumed: int, skipped: Any = ()) -> dict[str, float]:
        """As ``Dataset.progress``."""
        return self.dataset.progress(consumed, skipped)

    def figures(self) -> dict[str, float]:
        """For the metrics of a step that has ended.

        ``loader_wait_seconds``: how long its requests took. ``loader_thrown_away``: micro-batches that were read ahead
        in vain since the start, where there are any.
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
        """The answer. Raises what went wrong, with the step's number in the line."""
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
        """Whether the request is the one that was expected; if not, nothing is expected any more."""
        with self._changed:
            if not self._expected:
                self._plan_step()
            if not self._expected or self._expected[0][1] != request:
                self._forget()
                return False
            self._step, _ = self._expected.popleft()
            if self._thread is None:
                self._to_find.popleft()
            self._changed.notify_all()  # there may be room for a step more
            return True

    def _wait_for_samples(self) -> Answer | None:
        """What the thread found for the request that was next; None where there is no thread."""
        with self._changed:
            while self._thread is not None and self._thread.is_alive():
                if self._found:
                    return self._found.popleft()
                self._changed.wait(LOOK_SECONDS)
        return None

    def _plan_step(self) -> None:
        """Expects the requests of one step more, if there is one."""
        for step, indices in self._plan:
            parts = [Request("read", _as_bytes(part)) for part in self.share(indices)]
            requests = [Request("count", _as_bytes(indices)), *parts]
            self._expected.extend((step, request) for request in requests)
            self._to_find.extend(requests)
            break

    def _forget(self) -> None:
        """Throws away what was found, and expects nothing; what is being looked for will be thrown away."""
        in_vain = zip(self._expected, self._found, strict=False)
        self._n_thrown_away += sum(request.kind == "read" for (_, request), _ in in_vain)
        self._plan, self._plan_number = iter(()), self._plan_number + 1
        for each in (self._expected, self._to_find, self._found):
            each.clear()

    def _work(self) -> None:
        """What the thread does: it reads one order after the other."""
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
        """What is to be found next, and by which plan; waits for room. None: nothing more."""
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
        except Exception as error:  # whatever it is: the loop raises it when it comes to this step
            return Answer(None, error)

    def _find(self, request: Request) -> Any:
        indices = np.frombuffer(request.samples, np.int64)
        if request.kind == "read":
            return self.prepare(self.dataset.read(indices))
        further = self.dataset.count_further(indices, self.n_further) if self.n_further else []
        return self.dataset.count(indices), further


def _as_bytes(indices: np.ndarray) -> bytes:
    return np.ascontiguousarray(indices, dtype=np.int64).tobytes()
