"""Times saving and loading against the disk, a memory copy, and torch.distributed.checkpoint.

    python benchmarks/checkpoint_speed.py [--million-parameters 90] [--rounds 3] [--folder DIR]

Two processes hold one model's fp32 masters and Adam moments under ZeRO 1 (12 bytes a parameter, half on each). Each
round starts new processes, in which all sides take turns, TURNS times, on the same tensors and the same disk; between
sides the disk is left idle (sync). A side's time is that of the slower process, and of its turns the fastest counts.
Ratios are medians over the rounds:

- save: bytes a second of the synchronous save (hash, fsync, certificate, commit) / of two writers of the same bytes
  from one buffer into new files, with fsync, through the page cache or past it, whichever is faster;  at least 0.7
- hold: the time that training waits for an asynchronous save / that of the synchronous save (at most 0.1): in the call,
  and before an update that comes after STEP_SECONDS of forward and backward passes (here: of matrix products)
- stall: that time where the update comes at once / that of a copy of the same bytes from the same tensors into one
  buffer (at most 1.2)
- load: bytes a second of load_state until masters and moments are in place and every hash is checked / of reading the
  same files into memory that is allocated already; at least 0.6. cold: the files' pages were dropped from the page
  cache before either side; warm: they are all in it.
- dcp_*: the time of torch.distributed.checkpoint for the same tensors, one file for each rank, synced, over that of
  Roundtable (above 1: Roundtable is faster)

``*_extra_mib`` is the largest rise of a process's resident memory above its value before the call, in calls that are
not timed. Prints one JSON line.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.training.state import TrainState
from modeling.config import ModelConfig
from modeling.optimizers.config import AdamWConfig
from parallel.checkpoint.load import load_state, open_together
from parallel.checkpoint.local import BLOCK_BYTES, LocalStore
from parallel.checkpoint.saver import Saver, host_buffer
from parallel.checkpoint.write import collect_owned
from parallel.config import ParallelConfig
from parallel.mesh import close_mesh, open_mesh
from parallel.processes.start import run_ranks
from parallel.zero.engine import Engine

RANKS = 2
CHUNK = 4 << 20
TURNS = 2
STEP_SECONDS = 1.0
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


def main() -> None:
    """Parses the arguments, runs all rounds and prints the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million-parameters", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder or os.environ.get("TMPDIR")) as folder:
        print(json.dumps(compare(args, Path(folder))))


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs all rounds; returns the medians of ratios and seconds over them."""
    rounds = []
    for number in range(args.rounds):
        ranks = run_ranks(measure, RANKS, args.million_parameters, folder, timeout_seconds=3600, threads=1)
        rounds.append({name: max(rank[name] for rank in ranks) for name in ranks[0]} | {"round": number})
    middle = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}

    def ratio(above: str, below: str) -> float:
        return statistics.median(each[above] / each[below] for each in rounds)

    return {
        "benchmark": "checkpoint_speed",
        "mib_a_rank": middle["bytes"] / 2**20,
        "save_over_floor": ratio("write_seconds", "save_seconds"),
        "hold_over_save": ratio("hold_seconds", "save_seconds"),
        "stall_over_copy": ratio("stall_seconds", "copy_seconds"),
        "load_over_read_cold": ratio("read_cold_seconds", "load_cold_seconds"),
        "load_over_read_warm": ratio("read_warm_seconds", "load_warm_seconds"),
        "dcp_save_over_ours": ratio("dcp_save_seconds", "save_seconds"),
        "dcp_load_over_ours_warm": ratio("dcp_load_seconds", "load_warm_seconds"),
        **{name: round(value, 4) for name, value in middle.items() if name.endswith(("seconds", "mib"))},
    }


def measure(million_parameters: int, folder: Path) -> dict[str, float]:
    """One rank's seconds of every side in one round. All ranks call it."""
    mesh = open_mesh(ParallelConfig(), 1800)
    engine = build(million_parameters, mesh)
    tensors = collect_owned(engine)[1]
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    buffer = host_buffer(n_bytes // 4, mesh.device)
    seen: dict[str, float] = {"bytes": n_bytes}
    seen |= measure_saves(engine, tensors, buffer, folder)
    seen |= measure_loads(engine, torch.ones(n_bytes // 4), LocalStore(folder / "sync"))
    seen |= measure_dcp(tensors, folder, mesh.rank)
    close_mesh()
    if mesh.rank == 0:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seen


def fastest(turns: list[dict[str, float]]) -> dict[str, float]:
    """The shortest time of each side over all turns."""
    return {name: min(turn[name] for turn in turns) for name in turns[0]}


class TimedEngine(Engine):
    """An engine that records when a load has filled the masters and begins to publish them as weights."""

    published = 0.0

    def publish_weights(self) -> None:
        self.published = time.perf_counter()
        super().publish_weights()


def build(million_parameters: int, mesh: Any) -> TimedEngine:
    """A dense model of about this size, in fp32 under ZeRO 1 with AdamW."""
    d_model = 512
    n_layers = max(1, round(million_parameters * 1e6 / (12 * d_model**2)))
    model = ModelConfig(
        vocab_size=256, d_model=d_model, n_layers=n_layers, n_heads=8, n_kv_heads=8, d_ff=8 * d_model // 3
    )
    engine = TimedEngine(
        mesh, model, AdamWConfig(), parallel=ParallelConfig(zero=1), precision="fp32", micro_batch_size=1
    )
    engine.initialize_weights(0)
    for fragment in engine.fragments:
        for values in engine.pieces(fragment).values():
            values.add_(0.125)
    return engine


def measure_saves(
    engine: Engine, tensors: dict[str, torch.Tensor], buffer: torch.Tensor, folder: Path
) -> dict[str, float]:
    """Times Roundtable's synchronous and asynchronous saves, and the plain writes and copies beside them.

    The asynchronous saver's buffer exists before timing begins, as in training.
    """
    own = folder / f"plain-{engine.mesh.rank}"
    turns = []
    with (
        Saver(LocalStore(folder / "sync"), engine, asynchronous=False) as waiting,
        Saver(LocalStore(folder / "async"), engine) as saver,
    ):
        for _ in range(TURNS):
            turn = {
                "write_cached_seconds": timed(lambda: write_plainly(own, buffer)),
                "write_direct_seconds": timed(lambda: write_plainly(own, buffer, os.O_DIRECT)),
                "save_seconds": timed(lambda: waiting.save(TrainState(step=1))),
                "copy_seconds": timed(lambda: copy_plainly(tensors, buffer)),
                "stall_seconds": hold_of(saver, 0.0),
                "hold_seconds": hold_of(saver, STEP_SECONDS),
            }
            turns.append(turn)
        assert waiting.last is not None and waiting.last.error is None
        with Peak() as peak:
            waiting.save(TrainState(step=1))
    own.unlink()
    with Peak() as asynchronous, Saver(LocalStore(folder / "async"), engine) as saver:
        saver.save(TrainState(step=1))
        saver.wait()
    best = fastest(turns)
    return best | {
        "write_seconds": min(best["write_cached_seconds"], best["write_direct_seconds"]),
        "save_extra_mib": peak.extra_mib,
        "asynchronous_extra_mib": asynchronous.extra_mib,
    }


def hold_of(saver: Saver, step_seconds: float) -> float:
    """The seconds that training waits for an asynchronous save whose next update comes ``step_seconds`` later."""
    rows = torch.ones(512, 512)

    def step() -> None:
        saver.save(TrainState(step=1))
        until = time.perf_counter() + step_seconds
        while time.perf_counter() < until:
            rows @ rows
        saver.engine.announce_change()

    timed(step)
    (saved,) = saver.wait()
    return saved.hold_seconds


def measure_loads(engine: TimedEngine, buffer: torch.Tensor, store: LocalStore) -> dict[str, float]:
    """Times Roundtable's load, and the plain reading of the same files."""
    checkpoint = open_together(store.folder("step-00000001"), engine.mesh)
    shard = Path(store.folder("step-00000001").path(f"shard-{engine.mesh.rank:05d}.safetensors"))

    def load() -> None:
        checkpoint.is_verified = False
        load_state(engine, checkpoint)

    def timed_load() -> float:
        seconds = timed(load)
        return seconds - (time.perf_counter() - engine.published)

    with Peak() as peak:
        load()
    turns = []
    for _ in range(TURNS):
        turn = {}
        for cache in ("cold", "warm"):
            for name, work in (("read", lambda: timed(lambda: read_plainly(shard, buffer))), ("load", timed_load)):
                if cache == "cold":
                    drop_pages(shard)
                turn[f"{name}_{cache}_seconds"] = work()
        turns.append(turn)
    return fastest(turns) | {"load_extra_mib": peak.extra_mib}


def measure_dcp(tensors: dict[str, torch.Tensor], folder: Path, rank: int) -> dict[str, float]:
    """Times torch.distributed.checkpoint's save and load of the same tensors."""
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

    state = {f"{rank}/{key}": tensor for key, tensor in tensors.items()}
    path = folder / "dcp"
    saving = timed(lambda: save(state, storage_writer=FileSystemWriter(path, single_file_per_rank=True)))
    return {
        "dcp_save_seconds": saving,
        "dcp_load_seconds": timed(lambda: load(state, storage_reader=FileSystemReader(path))),
    }


def timed(work: Callable[[], Any]) -> float:
    """Seconds of this rank's work, which all ranks start together on an idle disk."""
    os.sync()
    dist.barrier()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def write_plainly(path: Path, buffer: torch.Tensor, flags: int = 0) -> None:
    """Writes the buffer to a new file with fsync: the fastest that a save could be."""
    path.unlink(missing_ok=True)
    view = buffer.numpy().data.cast("B")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)
    whole = len(view) // BLOCK_BYTES * BLOCK_BYTES if flags else len(view)
    for start in range(0, whole, CHUNK):
        os.write(handle, view[start : min(start + CHUNK, whole)])
    os.fsync(handle)
    os.close(handle)


def read_plainly(path: Path, buffer: torch.Tensor) -> None:
    """Reads the file into the buffer: the fastest that a load could be."""
    view = buffer.numpy().data.cast("B")
    with open(path, "rb", buffering=0) as file:
        done = 0
        while done < len(view):
            done += file.readinto(view[done : done + CHUNK]) or 0


def copy_plainly(tensors: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Copies each tensor of the state once into the buffer: the least that training could wait for a save."""
    done = 0
    for tensor in tensors.values():
        buffer[done : done + tensor.numel()].copy_(tensor.view(-1))
        done += tensor.numel()


def drop_pages(path: Path) -> None:
    """Takes a synced file out of the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Peak:
    """Measures how far this process's resident memory rises while entered, sampled each millisecond."""

    def __enter__(self) -> "Peak":
        self.before = self.highest = resident_mib()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.over.wait(0.001):
            self.highest = max(self.highest, resident_mib())

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.extra_mib = self.highest - self.before


def resident_mib() -> float:
    """The resident memory of this process in MiB, without mapped files."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE_KIB / 1024


if __name__ == "__main__":
    main()
