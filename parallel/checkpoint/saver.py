"""Saves checkpoints while training goes on: on each rank a thread copies the state and writes it.

Forward and backward passes only read the state, so the copy is taken during those of the next step, whose update waits
for the copy's end (Mohan et al., CheckFreq, FAST 2021, section 4.1). Each rank's thread writes its shard; then the
threads communicate in a process group of their own, rank 0 checks the certificate and commits, and all ranks get the
result. A rank that dies breaks the group's connections, and one that hangs is given up after a time limit: in both
cases the other ranks' threads end.
"""

import mmap
import secrets
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.logical import logical_tensors
from parallel.checkpoint import write
from parallel.checkpoint.cuts import Packed, pack
from parallel.checkpoint.errors import BrokenSave, IncompleteSave
from parallel.checkpoint.safetensors_stream import ELEMENT_BYTES, chunks_of, copy_all, staged
from parallel.checkpoint.store import Store, step_name
from parallel.checkpoint.write import build_manifest, certified, write_attachments, write_shard
from parallel.zero.engine import Engine

SECONDS_AFTER_FAILURE = 30  # a process that fails gives its writer this long to end
DEFAULT_TIMEOUT_SECONDS = 1800  # a rank whose shard is this much later than another's is given up


class Savable(Protocol):
    """The part of the training state that is saved besides the engine's tensors."""

    step: int

    def scalars(self, engine: Engine) -> dict[str, Any]:
        """The scalars for the manifest, as values that JSON can hold, at the time when the save begins."""
        ...


@dataclass(frozen=True)
class Saved:
    """The result of one save, the same on every rank except for the times."""

    step: int
    location: str
    error: str | None = None  # why nothing was committed, in one line; None: it was committed
    warning: str | None = None  # committed, but older checkpoints could not be deleted
    hold_seconds: float = 0.0  # how long training waited for it: in ``save``, and before the next update
    seconds: float = 0.0  # from its beginning to the commit


@dataclass(frozen=True)
class _Job:
    step: int
    scalars: dict[str, Any]
    file: str
    owned: Packed
    shapes: dict[str, tuple[int, ...]]  # of the shard's tensors, by key
    chunks: Iterable[memoryview]
    attempt: str
    started: float
    copy: Callable[[], None] = lambda: None  # takes the copy from which ``chunks`` come; then the state may change


@dataclass
class Hooks:
    """Functions that rank 0's writer calls around a commit (in a thread, unless saving is synchronous)."""

    before_commit: Callable[[], None] = lambda: None  # makes durable what the checkpoint relies on: metrics.jsonl
    guard: Callable[[], AbstractContextManager[Any]] = nullcontext  # held while a checkpoint is committed or deleted
    after_commit: Callable[[Store], Any] = lambda store: None  # deletes older checkpoints
    while_waiting: Callable[[], None] = lambda: None  # on every rank, each second that training waits for the writer


class Saver:
    """Writes checkpoints of one engine's state. It is a context manager; leaving it waits for the writer.

    All ranks make one, and call ``save`` at the same steps. If it is asynchronous, it holds host memory for a copy of
    what this rank owns (4 bytes for each element of each fp32 master and optimizer state; allocated once, page-locked
    on CUDA); otherwise the extra memory is the engine's ``sizes.staging_bytes``.
    """

    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        asynchronous: bool = True,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        tag: str = "0",
        attachments: Mapping[str, Path | bytes] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        """Opens the writers' process group: all ranks call it.

        ``timeout_seconds``: how much later than another's a rank's shard may be. ``tag``: the first part of the names
        of attempts, such as the number of this start; rank 0's counts. ``attachments``: small files, or their contents,
        by name.
        """
        self.store = store
        self.engine = engine
        self.mesh = engine.mesh
        self.asynchronous = asynchronous
        self.attachments = attachments or {}
        self.hooks = hooks or Hooks()
        self.group = open_group(timeout_seconds)
        self.tag = self._from_first(f"{tag}-{secrets.token_hex(3)}")  # differs from those of earlier starts
        self.attempts = 0
        self.thread: threading.Thread | None = None
        self.finished: list[Saved] = []
        self.broken: BaseException | None = None
        self.last: Saved | None = None
        self.copied = threading.Event()  # set: the state may change
        self.copied.set()
        self.hold_seconds = 0.0  # seconds that training has waited for the save under way
        device = engine.mesh.device
        self.stream = torch.cuda.Stream(device) if asynchronous and device.type == "cuda" else None
        engine.before_change.append(self.let_copy_end)
        self.names = list(logical_tensors(engine.model_config))
        _, tensors = write.collect_owned(engine)
        owned = sum(tensor.numel() for tensor in tensors.values())
        staging = engine.sizes.staging_bytes // ELEMENT_BYTES
        self.buffer = host_buffer(owned if asynchronous else staging, engine.mesh.device)

    def save(self, state: Savable) -> None:
        """Starts saving the state; ``poll`` returns the result. All ranks call it, at the same steps.

        It waits for the previous save, and where saving is synchronous also for this one. The engine's next update
        waits for the copy (``let_copy_end``); until then no code may write to masters, optimizer states or buffers.
        Raises BrokenSave.
        """
        started = time.perf_counter()
        self._join()
        self.attempts += 1
        file = f"shard-{self.mesh.rank:05d}.safetensors"
        owned, tensors = write.collect_owned(self.engine)
        packed, shapes = pack(owned, self.names), {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        scalars = state.scalars(self.engine)
        attempt = f"{self.tag}-{self.attempts}"
        if not self.asynchronous:
            chunks = staged(tensors.values(), self.buffer)
            self._run(_Job(state.step, scalars, file, packed, shapes, chunks, attempt, started))
            self._raise_if_broken()
            return
        used = self.buffer[: sum(tensor.numel() for tensor in tensors.values())]
        updated = None if self.stream is None else torch.cuda.current_stream(self.mesh.device).record_event()
        copy = partial(self._copy, list(tensors.values()), used, updated)
        job = _Job(state.step, scalars, file, packed, shapes, chunks_of(used), attempt, started, copy)
        self.copied.clear()
        self.thread = threading.Thread(target=self._run, args=(job,), name="checkpoint writer", daemon=True)
        self.hold_seconds = time.perf_counter() - started
        self.thread.start()

    def let_copy_end(self) -> None:
        """Waits until the state that is being saved has been copied. The engine calls it before it changes anything."""
        if not self.copied.is_set():
            started = time.perf_counter()
            self.copied.wait()
            self.hold_seconds += time.perf_counter() - started

    def poll(self) -> list[Saved]:
        """The results of saves that ended since the last call, committed or failed. Never waits. Raises BrokenSave."""
        self._raise_if_broken()
        ended, self.finished = self.finished, []
        return ended

    def wait(self) -> list[Saved]:
        """Waits for a save under way; then returns the results of ended saves like ``poll``. Raises BrokenSave."""
        self._join()
        return self.poll()

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way on this rank."""
        return self.thread is not None and self.thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the writer; where an exception leaves the block, at most SECONDS_AFTER_FAILURE."""
        self.engine.before_change.remove(self.let_copy_end)
        if kind is None or issubclass(kind, SystemExit):
            self._join()
        elif self.thread is not None:
            self.thread.join(SECONDS_AFTER_FAILURE)

    def _join(self) -> None:
        while self.thread is not None:
            self.thread.join(1.0)
            self.hooks.while_waiting()
            self.thread = self.thread if self.thread.is_alive() else None
        self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self.broken is not None:
            raise BrokenSave(str(self.broken)) from self.broken

    def _run(self, job: _Job) -> None:
        """The writer's work. Whatever happens on one rank, all ranks exchange their results once and agree."""
        name = step_name(job.step)
        location = self.store.folder(name).location
        try:
            verdict, text = self._agree(job, name, self._attempt(lambda: self._write_own(job, name)))
        except RuntimeError as error:  # gloo's: a peer's connection closed, or the time limit passed
            verdict, text = "broken", f"saving {name}: a rank is gone or did not answer in time ({error})"
        except BaseException as error:  # a fault of this code: raised where training sees it, not lost with the thread
            self.broken = error
            return
        if verdict == "broken":
            self.broken = RuntimeError(text)
            return
        error, warning = (text, None) if verdict == "failed" else (None, text)
        seconds = time.perf_counter() - job.started
        hold = self.hold_seconds if self.asynchronous else seconds
        self.last = Saved(job.step, location, error, warning, hold, seconds)
        self.finished.append(self.last)

    def _copy(self, tensors: Sequence[Tensor], used: Tensor, updated: Any) -> None:
        """Copies the state to ``used``; on CUDA in a stream of its own, after the event ``updated``, an update's end.

        CUDA's current device is set first, since in a new thread it is the node's first GPU: returning there when the
        stream's block is left would open a CUDA context on that GPU.
        """
        try:
            if self.stream is not None:
                torch.cuda.set_device(self.mesh.device)
            with torch.cuda.stream(self.stream):  # None: no other stream
                if self.stream is not None:
                    self.stream.wait_event(updated)
                copy_all(tensors, used)
        finally:
            self.copied.set()

    def _write_own(self, job: _Job, name: str) -> tuple[Packed, write.FileRecords]:
        """What this rank owns and its shard's file record, after taking the copy (if any) and writing the shard."""
        job.copy()
        folder, prefix = self.store.begin(name, job.attempt)
        return job.owned, write_shard(folder, prefix + job.file, job.shapes, job.chunks)

    def _agree(self, job: _Job, name: str, mine: tuple[str, Any]) -> tuple[str, Any]:
        """Rank 0's verdict on the save, on all ranks, which call it with the results of writing their own shards.

        The results are gathered on rank 0, which commits or discards the checkpoint and broadcasts the verdict.
        """
        first = self.mesh.rank == 0
        everyone: list[Any] | None = [None] * self.mesh.world_size if first else None
        dist.gather_object(mine, everyone, dst=0, group=self.group)
        return self._from_first(self._attempt(lambda: self._finish(job, name, everyone or [])) if first else None)

    def _from_first(self, value: Any) -> Any:
        """Rank 0's value, on all ranks, which all call it. The value must be picklable."""
        shared = [value]
        dist.broadcast_object_list(shared, src=0, group=self.group)
        return shared[0]

    def _attempt(self, work: Callable[[], Any]) -> tuple[str, Any]:
        """("done", result of ``work``); ("failed", why) if the disk or the certificate fails; else ("broken", why)."""
        try:
            return "done", work()
        except OSError as error:
            return "failed", f"{self.mesh.place}: {type(error).__name__}: {error}"
        except IncompleteSave as error:
            return "failed", str(error)
        except BrokenSave as error:
            return "broken", str(error)
        except Exception:  # a fault of this code on one rank: reported on all, instead of leaving them waiting
            return "broken", f"{self.mesh.place}:\n{traceback.format_exc()}"

    def _finish(self, job: _Job, name: str, everyone: list[tuple[str, Any]]) -> str | None:
        """Commits the checkpoint; returns a warning, or None. Where it cannot, removes what was written, and raises.

        Rank 0 alone calls it, after every rank has reported whether its shard is on disk.
        """
        try:
            for kind in ("broken", "failed"):
                problems = [text for verdict, text in everyone if verdict == kind]
                if problems:
                    raise (BrokenSave if kind == "broken" else IncompleteSave)("; ".join(problems))
            manifest = build_manifest(self.engine, job.step, job.scalars, [shard for _, shard in everyone])
            folder, prefix = self.store.begin(name, job.attempt)
            manifest.files |= write_attachments(folder, prefix, self.attachments)
            content = certified(manifest)
            self.hooks.before_commit()
            with self.hooks.guard():
                self.store.commit(name, job.attempt, content)
        except BaseException:
            with suppress(OSError):  # the first error is reported; the next sweep tries again
                self.store.discard(name, job.attempt)
            raise
        try:
            with self.hooks.guard():
                self.hooks.after_commit(self.store)
        except OSError as error:
            return f"older checkpoints were not deleted: {error}"
        return None


def open_group(timeout_seconds: float) -> dist.ProcessGroup:
    """A gloo group of all ranks that only writers use, so that their collectives never mix with those of training.

    All ranks call it.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def host_buffer(n_elements: int, device: torch.device) -> Tensor:
    """A flat fp32 CPU tensor whose pages are already in memory, page-locked where copies come from a CUDA device.

    It is a memory map of its own, which begins at a block boundary, for writes that bypass the page cache. It is
    page-locked by registration, since torch's own allocator would round the size up to a power of two. Raises
    RuntimeError where CUDA cannot.
    """
    pages = mmap.mmap(-1, max(n_elements, 1) * ELEMENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=torch.float32)[:n_elements]
    buffer.fill_(1.0)  # not with zeros: their pages may be ones that the kernel has yet to allocate
    if device.type == "cuda" and n_elements:
        runtime: Any = torch.cuda.cudart()
        address = buffer.data_ptr()
        code = runtime.cudaHostRegister(address, buffer.numel() * ELEMENT_BYTES, 0)
        if int(code) != 0:
            raise RuntimeError(
                f"{buffer.nbytes / 1e9:.1f} GB of host memory for a checkpoint's copy could not be page-locked "
                f"(CUDA error {int(code)}); set checkpoint.asynchronous=false, or give each rank more memory"
            )
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return buffer
