"""Records the communication that this process waits in, the number begun in each group, and the time spent waiting.

torch's own flight recorder does not record gloo's point-to-point transfers, nor gloo's states, so the calls themselves
are wrapped: every collective, Roundtable's, DeepSpeed's and the pipeline's, passes through ``ProcessGroup`` and
``Work.wait``. That costs 7 microseconds a collective (2 busy cores, 2026-11-21). On NCCL ``wait`` does not block; there
the communication that was begun last is what counts.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

OPERATIONS = {  # ProcessGroup's methods -> the names that torch.distributed gives them
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
REMEMBERED = 256  # communications begun and perhaps not yet waited for


@dataclass(frozen=True)
class Call:
    """One communication: its operation, its group's name, its number among the group's collectives, and its peer."""

    operation: str
    group: str
    number: int
    peer: int | None = None  # of send and recv: the other rank's number in the group


class Waits:
    """Records the communications of this process from ``install`` to ``remove``. Any thread may read the record."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # group's name -> collectives begun there; sends and receives are not counted
        self.begun = 0  # communications of any kind
        self.seconds = 0.0  # that the main thread has spent in communication
        self.current: dict[int, tuple[Call, float]] = {}  # thread -> the call it is in, and since when (monotonic)
        self.last: Call | None = None
        self._of_work: OrderedDict[int, Call] = OrderedDict()
        self._originals: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        """Wraps the methods of torch's ``ProcessGroup`` and ``Work`` in this process."""
        for method, name in OPERATIONS.items():
            if method in vars(dist.ProcessGroup):
                self._wrap(dist.ProcessGroup, method, lambda call, name=name: self._begin(call, name))
        self._wrap(dist.Work, "wait", self._wait)

    def remove(self) -> None:
        """Puts torch's own methods back."""
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def _wrap(self, owner: type, name: str, around: Callable[[Any], Any]) -> None:
        self._originals.append((owner, name, vars(owner)[name]))  # as the class holds it, which binds
        setattr(owner, name, around(getattr(owner, name)))

    def _begin(self, original: Any, name: str) -> Any:
        is_transfer = name in ("send", "recv")

        def begin(group: Any, *arguments: Any, **options: Any) -> Any:
            key = group.group_name
            number = self.counts.get(key, 0)
            if not is_transfer:
                self.counts[key] = number = number + 1
            peer = arguments[1] if is_transfer and len(arguments) > 1 and isinstance(arguments[1], int) else None
            call = Call(name, key, number, peer)
            self.begun += 1
            self.last = call
            work = self._hold(call, lambda: original(group, *arguments, **options))
            if work is not None:
                self._of_work[id(work)] = call
                self._of_work.move_to_end(id(work))
                if len(self._of_work) > REMEMBERED:
                    self._of_work.popitem(last=False)
            return work

        return begin

    def _wait(self, original: Any) -> Any:
        def wait(work: Any, *arguments: Any, **options: Any) -> Any:
            call = self._of_work.pop(id(work), None) or self.last or Call("communication", "", 0)
            return self._hold(call, lambda: original(work, *arguments, **options))

        return wait

    def _hold(self, call: Call, inside: Callable[[], Any]) -> Any:
        """What ``inside()`` returns; while it runs, ``call`` is recorded as what this thread is in."""
        thread, started = threading.get_ident(), time.monotonic()
        self.current[thread] = (call, started)
        try:
            result = inside()
        except BaseException:
            self.current[thread] = (call, started)  # it failed, and stays recorded as what the thread was in
            raise
        del self.current[thread]
        if thread == threading.main_thread().ident:
            self.seconds += time.monotonic() - started
        return result
