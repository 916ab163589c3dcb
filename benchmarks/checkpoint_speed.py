"""Saving and loading against the disk, a memory copy, and torch.distributed.checkpoint.

    python benchmarks/checkpoint_speed.py [--million-parameters 90] [--rounds 3] [--folder DIR]

Two processes hold one model's fp32 masters and Adam moments under ZeRO 1 (12 bytes a parameter, half on each). Each
round starts fresh processes, in which all sides take turns on the same tensors and the same disk; between sides the
disk is left idle (sync). A side's time is that of the slower process. Ratios are medians over the rounds:

- save: bytes a second of the synchronous save (hash, fsync, certificate, commit) / of two writers of the same bytes
  from one buffer, with fsync;  at least 0.7
- hold: what training waits for in an asynchronous save / the synchronous save (at most 0.1), / a copy of the same
  bytes from the same tensors into one buffer (at most 1.2)
- load: bytes a second of load_state until masters and moments are in place and every hash is checked / of reading the
  same files into memory that is there; at least 0.6. cold: the files' pages were dropped from the page cache before
  either side; warm: they are all in it.
- dcp_*: torch.distributed.checkpoint of the same tensors, one file each, synced, over ours (above 1: ours is faster)

``*_extra_mib`` is how far a process's resident memory rose above what it was before the call, at most. Prints one JSON
line.
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

from launcher.state import TrainState
from modeling.config import ModelConfig
from modeling.optimizers.config import AdamWConfig
from parallel.checkpoint.folder import LocalStore
from parallel.checkpoint.read import load_state, open_together
from parallel.checkpoint.saver import Saver
from parallel.checkpoint.write import collect_pieces
from parallel.config import ParallelConfig
from parallel.engine import Engine
from parallel.mesh import close_mesh, open_mesh
from parallel.process import run_ranks

RANKS = 2
CHUNK = 4 << 20
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


def main() -> None:
    """All rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million-parameters", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder or os.environ.get("TMPDIR")) as folder:
        print(json.dumps(compare(args, Path(folder))))


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The medians over the rounds."""
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
        "hold_over_copy": ratio("hold_seconds", "copy_seconds"),
        "load_over_read_cold": ratio("read_cold_seconds", "load_cold_seconds"),
        "load_over_read_warm": ratio("read_warm_seconds", "load_warm_seconds"),
        "dcp_save_over_ours": ratio("dcp_save_seconds", "save_seconds"),
        "dcp_load_over_ours_warm": ratio("dcp_load_seconds", "load_warm_seconds"),
        **{name: round(value, 4) for name, value in middle.items() if name.endswith(("seconds", "mib"))},
    }


def measure(million_parameters: int, folder: Path) -> dict[str, float]:
    """One rank's seconds of every side."""
    mesh = open_mesh(ParallelConfig(), 1800)
    engine = build(million_parameters, mesh)
    tensors = collect_pieces(engine, "")[1]
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    buffer = torch.ones(n_bytes // 4)
    own = folder / f"plain-{mesh.rank}"
    seen: dict[str, float] = {"bytes": n_bytes}
    seen["write_seconds"] = timed(lambda: write_plainly(own, buffer))
    seen |= measure_saves(engine, folder)
    seen["copy_seconds"] = min(timed(lambda: copy_plainly(tensors, buffer)) for _ in range(2))
    store = LocalStore(folder / "sync")
    checkpoint = open_together(store, "step-00000001", mesh)
    shard = Path(store.folder("step-00000001").path(f"shard-{mesh.rank:05d}.safetensors"))

    publish, published = engine.publish_weights, []

    def load() -> None:
        checkpoint.is_verified = False
        load_state(engine, checkpoint)

    def publish_later() -> None:
        """Stops the clock of loading: what follows is what an update's end does as well (masters to weights)."""
        published.append(time.perf_counter())
        publish()

    engine.publish_weights = publish_later

    for cache in ("cold", "warm"):
        for name, path, work in (("read", own, lambda: read_plainly(own, buffer)), ("load", shard, load)):
            if cache == "cold":
                drop_pages(path)
            with Peak() as peak:
                seen[f"{name}_{cache}_seconds"] = timed(work)
            if name == "load":
                seen[f"{name}_{cache}_seconds"] -= time.perf_counter() - published[-1]
            seen[f"{name}_extra_mib"] = peak.extra_mib
    seen |= measure_dcp(tensors, folder, mesh.rank)
    close_mesh()
    if mesh.rank == 0:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return seen


def build(million_parameters: int, mesh: Any) -> Engine:
    """A dense model of about this size, in fp32 under ZeRO 1 with AdamW."""
    d_model = 512
    n_layers = max(1, round(million_parameters * 1e6 / (12 * d_model**2)))
    model = ModelConfig(
        vocab_size=256, d_model=d_model, n_layers=n_layers, n_heads=8, n_kv_heads=8, d_ff=8 * d_model // 3
    )
    engine = Engine(mesh, model, AdamWConfig(), parallel=ParallelConfig(zero=1), precision="fp32", micro_batch_size=1)
    engine.initialize_weights(0)
    for fragment in engine.fragments:
        for values in engine.pieces(fragment).values():
            values.add_(0.125)
    return engine


def measure_saves(engine: Engine, folder: Path) -> dict[str, float]:
    """Our save, waiting and not waiting. The buffer of the asynchronous saver is there before, as in training."""
    with Saver(LocalStore(folder / "sync"), engine, asynchronous=False) as saver, Peak() as peak:
        save = timed(lambda: saver.save(TrainState(step=1)))
    assert saver.last is not None and saver.last.error is None
    saves = {"save_seconds": save, "save_extra_mib": peak.extra_mib}
    with Peak() as peak, Saver(LocalStore(folder / "async"), engine) as saver:
        holds = []
        for step in (1, 2):
            holds.append(timed(lambda step=step: saver.save(TrainState(step=step)), settle=step == 1))
            saver.wait()
    return saves | {"hold_seconds": min(holds), "asynchronous_extra_mib": peak.extra_mib}


def measure_dcp(tensors: dict[str, torch.Tensor], folder: Path, rank: int) -> dict[str, float]:
    """torch.distributed.checkpoint of the same tensors."""
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

    state = {f"{rank}/{key}": tensor for key, tensor in tensors.items()}
    path = folder / "dcp"
    saving = timed(lambda: save(state, storage_writer=FileSystemWriter(path, single_file_per_rank=True)))
    return {
        "dcp_save_seconds": saving,
        "dcp_load_seconds": timed(lambda: load(state, storage_reader=FileSystemReader(path))),
    }


def timed(work: Callable[[], Any], *, settle: bool = True) -> float:
    """Seconds of this rank's work, begun together with the other's on an idle disk."""
    if settle:
        os.sync()
    dist.barrier()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def write_plainly(path: Path, buffer: torch.Tensor) -> None:
    """The floor of saving."""
    view = buffer.numpy().data.cast("B")
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(view), CHUNK):
            file.write(view[start : start + CHUNK])
        os.fsync(file.fileno())


def read_plainly(path: Path, buffer: torch.Tensor) -> None:
    """The floor of loading."""
    view = buffer.numpy().data.cast("B")
    with open(path, "rb", buffering=0) as file:
        done = 0
        while done < len(view):
            done += file.readinto(view[done : done + CHUNK]) or 0


def copy_plainly(tensors: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """The floor of holding: each flat tensor that the state lies in, copied once."""
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
    """How far this process's resident memory rises above where it was, sampled each millisecond."""

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
    """Of this process, files that are mapped left out."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE_KIB / 1024


if __name__ == "__main__":
    main()
