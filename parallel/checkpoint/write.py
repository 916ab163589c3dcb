"""Saving: every rank writes the pieces it owns, and one atomic rename makes them a checkpoint."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from parallel.checkpoint.manifest import Manifest, Piece, certify, hash_file, sync_directory, write_manifest
from parallel.engine import Engine
from parallel.mesh import Mesh

BUFFER = "buffer"  # the kind of what is not a parameter: router biases


class IncompleteSave(Exception):
    """The coverage certificate failed, or a rank could not write: nothing was committed."""


def step_directory(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint after update ``step`` lies."""
    return checkpoints / f"step-{step:08d}"


def save_checkpoint(
    checkpoints: Path,
    step: int,
    engine: Engine,
    scalars: dict[str, Any],
    *,
    tokenizer: Path | None = None,
    on_shard: Callable[[Path], None] | None = None,
) -> Path:
    """Writes the state after update ``step``; returns its directory. All ranks call it, and all raise together.

    Shards go to a hidden sibling directory. When all are synced and hashed, rank 0 checks the coverage certificate,
    writes the manifest and renames the directory. ``on_shard`` is called with each shard's path once it is on disk.
    """
    final = step_directory(checkpoints, step)
    partial = checkpoints / f".{final.name}.partial"
    mesh = engine.mesh
    _together(mesh, lambda: _fresh(partial) if mesh.rank == 0 else None)
    descriptions = _together(mesh, lambda: _write_shard(partial, engine, on_shard))
    _together(mesh, lambda: _commit(partial, final, step, engine, scalars, descriptions, tokenizer))
    return final


def _together(mesh: Mesh, work: Callable[[], Any]) -> list[Any]:
    """Every rank's result of its own ``work``; if any failed, IncompleteSave on all ranks, naming it. A barrier."""
    try:
        mine = ("done", work())
    except (OSError, SafetensorError, IncompleteSave) as error:
        mine = ("failed", f"rank {mesh.rank}: {error}")
    everyone: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(everyone, mine, group=mesh.control)
    failures = [text for verdict, text in everyone if verdict == "failed"]
    if failures:
        raise IncompleteSave("; ".join(failures))
    return [result for _, result in everyone]


def _fresh(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()


def _write_shard(
    partial: Path, engine: Engine, on_shard: Callable[[Path], None] | None
) -> tuple[list[Piece], dict[str, dict[str, Any]]]:
    """Writes and syncs this rank's shard; returns its pieces, and its size and hash."""
    file = f"shard-{engine.mesh.rank:05d}.safetensors"
    pieces, tensors = collect_pieces(engine, file)
    if not tensors:
        return [], {}
    path = partial / file
    save_file(tensors, path)
    path.chmod(0o666 & ~_umask())  # safetensors makes files that their owner alone can read
    with open(path, "rb") as written:
        os.fsync(written.fileno())
    if on_shard is not None:
        on_shard(path)
    return pieces, {file: {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def collect_pieces(engine: Engine, file: str) -> tuple[list[Piece], dict[str, Tensor]]:
    """What this rank owns, as boxes of logical tensors: their description, and the tensors by key."""
    pieces: list[Piece] = []
    tensors: dict[str, Tensor] = {}

    def add(kind: str, name: str, start: tuple[int, ...], value: Tensor) -> None:
        key = f"{kind}/{name}/{'.'.join(map(str, start))}"
        tensors[key] = value.detach().to("cpu", torch.float32).contiguous()
        pieces.append(Piece(kind, name, start, tuple(value.shape), file, key))

    for fragment in (fragment for fragment in engine.fragments if fragment.is_owner):
        for kind, flat in engine.pieces(fragment).items():
            done = 0
            for box in fragment.boxes():
                add(kind, fragment.name, box.start, flat.narrow(0, done, box.numel).view(box.shape))
                done += box.numel
    if engine.mesh.replicas.rank == 0 and engine.mesh.tp.rank == 0:  # buffers are the same on every rank of a stage
        for name, buffer in engine.model.named_buffers():
            add(BUFFER, name, (0,) * buffer.ndim, buffer)
    return pieces, tensors


def _commit(
    partial: Path,
    final: Path,
    step: int,
    engine: Engine,
    scalars: dict[str, Any],
    descriptions: list[tuple[list[Piece], dict[str, dict[str, Any]]]],
    tokenizer: Path | None,
) -> None:
    if engine.mesh.rank != 0:
        return
    parameters = {name: list(shape) for name, shape in engine.shapes.parameters.items()}
    buffers = {name: list(shape) for name, shape in engine.shapes.buffers.items()}
    kinds = {kind: list(parameters) for kind in ("weight", *engine.state_names)} | {BUFFER: list(buffers)}
    manifest = Manifest(step=step, scalars=scalars, tensors=parameters | buffers, kinds=kinds)
    for pieces, files in descriptions:
        manifest.pieces += pieces
        manifest.files |= files
    problems = certify(manifest)
    if problems:
        raise IncompleteSave(f"the coverage certificate of step {step} fails: " + "; ".join(problems[:5]))
    if tokenizer is not None:
        manifest.files |= _copy_tokenizer(tokenizer, partial)
    write_manifest(manifest, partial)
    if final.exists():  # the same step, saved again: the old one makes room only now
        shutil.rmtree(final)
    partial.rename(final)
    sync_directory(final.parent)


def _copy_tokenizer(tokenizer: Path, partial: Path) -> dict[str, dict[str, Any]]:
    files = {}
    (partial / "tokenizer").mkdir()
    for source in sorted(path for path in tokenizer.iterdir() if path.is_file()):
        target = partial / "tokenizer" / source.name
        shutil.copyfile(source, target)
        with open(target, "rb") as copied:
            os.fsync(copied.fileno())
        files[f"tokenizer/{source.name}"] = {"bytes": target.stat().st_size, "xxh3_128": hash_file(target)}
    return files


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """The checkpoints' directories, oldest first. Damaged and partial ones have other names."""
    found = [path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
