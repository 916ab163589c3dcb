"""Damages a checkpoint's files in every way, and checks that a restart detects it and goes back to the one before."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.dataset import open_dataset
from launcher.config.tree import RunConfig
from launcher.training.loop import build_engine, run_step
from launcher.training.state import TrainState, restore, save
from parallel.checkpoint.retention import Retention
from parallel.mesh import Mesh, close_mesh, open_mesh
from parallel.processes.start import run_ranks
from sealed import reseal

BEFORE, VICTIM = "step-00000001", "step-00000002"
OTHER = "other"  # a run of another seed, of the same sizes
TIMEOUT_SECONDS = 900
BLOCK = 4096


@dataclass(frozen=True)
class Damage:
    """One damage to the newest checkpoint; the restart's warning must name one of ``files``."""

    name: str
    files: tuple[str, ...]
    do: Callable[[Path], object]  # called with the folder of checkpoints


def save_two_steps(config: RunConfig, folder: Path) -> None:
    """Saves two checkpoints of this run in folder/own, and two of another seed in folder/other. All ranks call it."""
    mesh = open_mesh(config.parallel, TIMEOUT_SECONDS)
    engine = build_engine(config, mesh)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    for name, seed in (("own", 0), (OTHER, 1)):
        engine.initialize_weights(seed)
        state = TrainState()
        for _ in range(2):
            run_step(config, engine, dataset, state)
            save(folder / name, engine, state, None, Retention(keep_last=3))
    close_mesh()


def all_damages(folder: Path, n_flips: int, seed: int = 0) -> Iterator[Damage]:
    """Every kind of damage to every file of folder/own's newest checkpoint, at random offsets drawn from ``seed``.

    ``n_flips``: the number of flipped bits that are tried in each file.
    """
    draw = random.Random(seed)
    victim = folder / "own" / VICTIM
    files = sorted(path.relative_to(victim).as_posix() for path in victim.rglob("*") if path.is_file())
    for file in files:
        size = (victim / file).stat().st_size
        for bit in sorted(draw.sample(range(8 * size), min(n_flips, 8 * size))):
            yield Damage(f"{file}: bit {bit} flipped", (file,), Flip(file, bit))
        for length in sorted({0, 1, draw.randrange(size), size - 1}):
            yield Damage(f"{file}: cut to {length} bytes", (file,), Cut(file, length))
        start = draw.randrange(size)
        yield Damage(f"{file}: a block of other bytes at {start}", (file,), Overwrite(file, start))
        yield Damage(f"{file}: a byte more", (file,), Append(file))
        yield Damage(f"{file}: deleted", (file,), Delete(file))
        for kind in ("folder", "link", "pipe"):
            yield Damage(f"{file}: a {kind} instead", (file,), Instead(file, kind))
        for source in (f"own/{BEFORE}", f"{OTHER}/{VICTIM}"):
            yield from replaced(folder, file, source, files)
        for other in files:
            if other != file:
                yield Damage(f"{file}: replaced by {other}", (file,), Replace(file, victim / other, victim / file))
            if other > file:
                yield Damage(f"{file}: swapped with {other}", (file, other), Swap(file, other))
    for change in (forget_shard, forget_tensor, leave_folder):
        yield Damage(f"resealed: {change.__name__}", ("manifest.json",), Reseal(change))
    yield Damage("the checkpoint before it under its name", ("manifest.json",), Rename())
    yield Damage("all files deleted", ("manifest.json",), Empty())


def replaced(folder: Path, file: str, source: str, files: list[str]) -> Iterator[Damage]:
    """The file replaced by that of another checkpoint; with a foreign manifest any of the files may be blamed."""
    own, foreign = folder / "own" / VICTIM / file, folder / source / file
    if own.read_bytes() != foreign.read_bytes():
        blamed = tuple(files) if file == "manifest.json" else (file,)
        yield Damage(f"{file}: that of {source}", blamed, Replace(file, foreign, own))


@dataclass(frozen=True)
class Flip:
    """Flips one bit of one file."""

    file: str
    bit: int

    def __call__(self, checkpoints: Path) -> None:
        path = checkpoints / VICTIM / self.file
        content = bytearray(path.read_bytes())
        content[self.bit // 8] ^= 1 << self.bit % 8
        path.write_bytes(content)


@dataclass(frozen=True)
class Cut:
    """Cuts off a file after ``length`` bytes."""

    file: str
    length: int

    def __call__(self, checkpoints: Path) -> None:
        path = checkpoints / VICTIM / self.file
        path.write_bytes(path.read_bytes()[: self.length])


@dataclass(frozen=True)
class Overwrite:
    """Changes every byte of one block of a file, as where a disk returns other contents."""

    file: str
    start: int

    def __call__(self, checkpoints: Path) -> None:
        path = checkpoints / VICTIM / self.file
        content = path.read_bytes()
        stop = self.start + BLOCK
        changed = bytes(byte ^ 0xFF for byte in content[self.start : stop])
        path.write_bytes(content[: self.start] + changed + content[stop:])


@dataclass(frozen=True)
class Append:
    """Appends one byte to a file."""

    file: str

    def __call__(self, checkpoints: Path) -> None:
        with open(checkpoints / VICTIM / self.file, "ab") as file:
            file.write(b"\n")


@dataclass(frozen=True)
class Delete:
    """Deletes a file."""

    file: str

    def __call__(self, checkpoints: Path) -> None:
        (checkpoints / VICTIM / self.file).unlink()


@dataclass(frozen=True)
class Instead:
    """Replaces a file by a folder, a pipe, or a link to the file itself."""

    file: str
    kind: str

    def __call__(self, checkpoints: Path) -> None:
        path = checkpoints / VICTIM / self.file
        path.rename(checkpoints / "elsewhere")
        match self.kind:
            case "folder":
                path.mkdir()
            case "link":
                path.symlink_to(checkpoints / "elsewhere")
            case _:
                os.mkfifo(path)


@dataclass(frozen=True)
class Reseal:
    """Changes the manifest's contents and writes it with the right hash."""

    change: Callable[[dict[str, Any]], object]

    def __call__(self, checkpoints: Path) -> None:
        reseal(checkpoints / VICTIM, self.change)


def forget_shard(body: dict[str, Any]) -> None:
    """Removes a shard's entry, and so its hash, from the manifest."""
    del body["files"]["shard-00001.safetensors"]


def forget_tensor(body: dict[str, Any]) -> None:
    """Removes a tensor from the manifest, which stays consistent but is that of another model."""
    del body["tensors"]["embed.weight"]
    body["kinds"] = {kind: [name for name in names if name != "embed.weight"] for kind, names in body["kinds"].items()}
    body["cuts"] = [cut for cut in body["cuts"] if cut["name"] != "embed.weight"]


def leave_folder(body: dict[str, Any]) -> None:
    """Renames a shard in the manifest to a path outside of the checkpoint's folder."""
    body["files"]["../shard"] = body["files"].pop("shard-00001.safetensors")


@dataclass(frozen=True)
class Replace:
    """Replaces a file by the content of ``source``, with the time stamps of ``times``."""

    file: str
    source: Path
    times: Path

    def __call__(self, checkpoints: Path) -> None:
        target = checkpoints / VICTIM / self.file
        shutil.copyfile(self.source, target)
        shutil.copystat(self.times, target)


@dataclass(frozen=True)
class Swap:
    """Exchanges the names of two files."""

    file: str
    other: str

    def __call__(self, checkpoints: Path) -> None:
        first, second = checkpoints / VICTIM / self.file, checkpoints / VICTIM / self.other
        between = first.rename(first.with_name("between"))
        second.rename(first)
        between.rename(second)


@dataclass(frozen=True)
class Rename:
    """Puts the undamaged checkpoint of an earlier step under the name of the newest."""

    def __call__(self, checkpoints: Path) -> None:
        shutil.rmtree(checkpoints / VICTIM)
        shutil.copytree(checkpoints / BEFORE, checkpoints / VICTIM)


@dataclass(frozen=True)
class Empty:
    """Leaves the checkpoint's folder without files, as after a crash of a file system."""

    def __call__(self, checkpoints: Path) -> None:
        shutil.rmtree(checkpoints / VICTIM)
        (checkpoints / VICTIM).mkdir()


def restart_after(config: RunConfig, folder: Path, damages: list[Damage], skip_hashes: bool = False) -> list[str]:
    """Damages a copy of the checkpoints in each way and restarts from it; returns a line for each wrong reaction.

    All ranks call it. ``skip_hashes`` plants a fault that the drill must detect: loading checks only file sizes.
    """
    if skip_hashes:
        trust_sizes()
    mesh = open_mesh(config.parallel, TIMEOUT_SECONDS)
    engine = build_engine(config, mesh)
    problems = []
    for number, damage in enumerate(damages):
        copy = folder / f"copy-{number}"
        if mesh.rank == 0:
            shutil.copytree(folder / "own", copy)
            damage.do(copy)
        mesh_barrier(mesh)
        state, warnings = restore(copy, engine, config.seed)
        problems += [f"{damage.name}: {line}" for line in judge(damage, state, warnings, copy)]
        mesh_barrier(mesh)
        if mesh.rank == 0:
            shutil.rmtree(copy)
    close_mesh()
    return problems


def judge(damage: Damage, state: TrainState, warnings: list[str], copy: Path) -> list[str]:
    """A line for each thing that the restart did wrong.

    It must load the step before, warn once, naming a damaged file, and set the damaged checkpoint aside.
    """
    problems = []
    if state.step != 1:
        problems.append(f"step {state.step} was loaded")
    if len(warnings) != 1 or not any(f"{VICTIM}/{file}" in warnings[0] for file in damage.files):
        problems.append(f"no file of {damage.files} is named in {warnings}")
    if (copy / VICTIM).exists() or not (copy / f"{VICTIM}.damaged").is_dir():
        problems.append("it was not set aside")
    return problems


def mesh_barrier(mesh: Mesh) -> None:
    """Waits for all ranks."""
    dist.barrier(group=mesh.control)


def trust_sizes() -> None:
    """Plants the fault that shards are loaded without comparing their hashes."""
    from parallel.checkpoint.scatter import ShardReader

    read = ShardReader.read
    ShardReader.read = lambda self, file, wanted, *, hashes: read(self, file, wanted, hashes=False)


def drill(config: RunConfig, n_ranks: int, folder: Path, damages: list[Damage], skip_hashes: bool = False) -> list[str]:
    """Runs ``restart_after`` on ``n_ranks`` processes; returns the lines that any rank found, each once."""
    found = run_ranks(
        restart_after, n_ranks, config, folder, damages, skip_hashes, timeout_seconds=TIMEOUT_SECONDS, threads=1
    )
    return list(dict.fromkeys(line for rank in found for line in rank))
