"""Loads a checkpoint into an engine; the layout that wrote it and the engine's own may differ."""

import heapq
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from modeling.logical import logical_shapes
from parallel.checkpoint.boxes import whole
from parallel.checkpoint.errors import UnreachableStore
from parallel.checkpoint.manifest import (
    BUFFER,
    WEIGHT,
    DamagedCheckpoint,
    check_sizes,
    differences,
    read_manifest,
)
from parallel.checkpoint.read import Checkpoint, Targets, Wanted
from parallel.checkpoint.scatter import Target, span_of
from parallel.checkpoint.schema import Piece
from parallel.checkpoint.store import MANIFEST, Folder
from parallel.mesh import Mesh
from parallel.zero.engine import Engine


def open_together(folder: Folder, mesh: Mesh) -> Checkpoint:
    """The checkpoint in ``folder``, opened by all ranks; its manifest, certificate and files' sizes are checked.

    All ranks call it. Each reads the manifest and checks the sizes of its share of the files; the hashes are left to
    ``load_state``. Raises on all ranks: DamagedCheckpoint, or OSError where the manifest was replaced meanwhile or a
    rank could not read.
    """
    checkpoint = together(mesh, lambda: _checked(folder, mesh))
    assert checkpoint is not None
    read: list[str] = [""] * mesh.world_size
    mine = xxhash.xxh3_128_hexdigest(json.dumps(checkpoint.manifest.files).encode())
    dist.all_gather_object(read, mine, group=mesh.control)
    if len(set(read)) > 1:
        raise OSError(f"{checkpoint.folder.path(MANIFEST)} was replaced while the ranks read it; start again")
    return checkpoint


def _checked(folder: Folder, mesh: Mesh) -> Checkpoint:
    manifest = read_manifest(folder)
    problems = check_sizes(manifest, folder, sorted(manifest.files)[mesh.rank :: mesh.world_size])
    if problems:
        raise DamagedCheckpoint("; ".join(problems))
    return Checkpoint(folder, manifest)


def together(mesh: Mesh, work: Callable[[], Any]) -> Any:
    """This rank's result of ``work()``, once it has succeeded on all ranks. All ranks call it.

    If ``work`` raised an OSError on any rank, all raise UnreachableStore; else, if it raised DamagedCheckpoint on any,
    all raise that. The errors' texts are all-gathered over ``mesh.control``.
    """
    result = damage = failure = None
    try:
        result = work()
    except DamagedCheckpoint as error:
        damage = str(error)
    except OSError as error:
        failure = f"{mesh.place}: {error}"
    everyone: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(everyone, (damage, failure), group=mesh.control)
    failures = [text for _, text in everyone if text is not None]
    if failures:  # a disk that cannot be read is no reason to set a checkpoint aside
        raise UnreachableStore("; ".join(failures))
    damages = [text for text, _ in everyone if text is not None]
    if damages:
        raise DamagedCheckpoint("; ".join(dict.fromkeys("; ".join(damages).split("; "))))
    return result


@torch.no_grad()
def load_state(engine: Engine, checkpoint: Checkpoint) -> None:
    """Fills the engine's masters, optimizer states, buffers, step and loss scale. All ranks call it.

    Each rank reads only the boxes that it holds. A state that the checkpoint lacks (such as momentum that was switched
    on since) starts at zero. Raises DamagedCheckpoint on all ranks where a file does not match its hash; the engine's
    state is then undefined, and must be loaded again.
    """
    together(engine.mesh, lambda: _check_tensors(engine, checkpoint))
    kept = [(kind, each.name) for each in engine.fragments for kind in engine.rule.states_of(each.weight)]
    missing = {kind for kind, name in kept if not checkpoint.has(kind, name)}
    complete = [kind for kind in engine.rule.states if kind not in missing]
    engine.reset_states(int(checkpoint.manifest.scalars["updates"]), kept=complete)
    _read_together(engine, checkpoint)
    engine.restore_loss_scaler(checkpoint.manifest.scalars["loss_scaler"])
    engine.publish_weights()


@torch.no_grad()
def load_weights(engine: Engine, checkpoint: Checkpoint) -> None:
    """Fills the engine's masters and buffers; the rest becomes as before the first update. All ranks call it.

    That is the optimizer's states and step, and the loss scale.
    Raises DamagedCheckpoint on all ranks where a file does not match its hash; the engine's state is then undefined.
    """
    together(engine.mesh, lambda: _check_tensors(engine, checkpoint))
    engine.reset_states(0)
    engine.restore_loss_scaler({})
    _read_together(engine, checkpoint, kinds=(WEIGHT,))
    engine.publish_weights()


def _read_together(engine: Engine, checkpoint: Checkpoint, kinds: Collection[str] | None = None) -> None:
    """Reads ``kinds`` (None: all) and the model's buffers into the engine, and checks hashes. All ranks call it."""
    targets, buffers = _targets(engine, checkpoint, kinds)
    wanted = checkpoint.wanted(targets)
    hashed = [] if checkpoint.is_verified else _share_hashing(checkpoint, wanted, engine.mesh)
    together(engine.mesh, lambda: checkpoint.hold({*wanted, *hashed}))
    together(engine.mesh, lambda: _fill(checkpoint, wanted, hashed))
    checkpoint.is_verified = True
    for name, buffer in engine.model.named_buffers():
        buffer.copy_(buffers[name])


def _check_tensors(engine: Engine, checkpoint: Checkpoint) -> None:
    """Raises DamagedCheckpoint where the manifest's tensors are not those of the engine's model."""
    differing = differences(checkpoint.manifest, logical_shapes(engine.model_config))
    if differing:
        raise DamagedCheckpoint(f"{checkpoint.folder.path(MANIFEST)} has {differing[0]}")


def _fill(checkpoint: Checkpoint, wanted: Wanted, hashed: Sequence[str]) -> None:
    problems = checkpoint.fill(wanted, hashed)
    if problems:
        raise DamagedCheckpoint("; ".join(problems))


def _targets(
    engine: Engine, checkpoint: Checkpoint, kinds: Collection[str] | None
) -> tuple[Targets, dict[str, Tensor]]:
    """The targets of all that this rank reads: views of the engine's tensors, and new tensors for the model's buffers.

    The latter are returned by name too.
    """
    targets: dict[tuple[str, str], list[Target]] = {}
    for fragment in engine.fragments:
        boxes = fragment.boxes()
        for kind, flat in engine.pieces(fragment).items():
            if checkpoint.has(kind, fragment.name) and (kinds is None or kind in kinds):
                done = 0
                for box in boxes:
                    values = flat.narrow(0, done, box.numel).view(box.shape)
                    targets.setdefault((kind, fragment.name), []).append(Target(box, values))
                    done += box.numel
    buffers = {name: torch.empty(buffer.shape) for name, buffer in engine.model.named_buffers()}
    for name, values in buffers.items():
        targets[BUFFER, name] = [Target(whole(tuple(values.shape)), values)]
    return targets, buffers


def _share_hashing(checkpoint: Checkpoint, wanted: Wanted, mesh: Mesh) -> list[str]:
    """The files that this rank must hash; each file goes to the rank that reads most of it. All ranks call it.

    The numbers of bytes that each rank reads of each file are all-gathered over ``mesh.control``.
    """
    mine = {file: sum(_bytes_of(*each) for each in pairs) for file, pairs in wanted.items()}
    everyone: list[dict[str, int]] = [{} for _ in range(mesh.world_size)]
    dist.all_gather_object(everyone, mine, group=mesh.control)
    sizes = {file: record["bytes"] for file, record in checkpoint.manifest.files.items()}
    return [file for file, rank in deal_hashing(sizes, everyone).items() if rank == mesh.rank]


def deal_hashing(sizes: Mapping[str, int], read: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The rank that must hash each file, by file.

    ``sizes``: each file's bytes. ``read``: by rank, how many bytes it reads of each file. Files are assigned from the
    largest on: each to the rank that reads most of it, among equals to the one with the fewest bytes to hash so far. A
    file that no rank reads goes to the rank with the fewest bytes to hash.
    """
    most: dict[str, int] = {}
    readers: dict[str, list[int]] = {}  # the ranks that read most of the file
    for rank, mine in enumerate(read):
        for file, n_bytes in mine.items():
            if n_bytes > most.get(file, 0):
                most[file], readers[file] = n_bytes, [rank]
            elif n_bytes == most.get(file):
                readers[file].append(rank)
    loads, idle, found = [0] * len(read), [(0, rank) for rank in range(len(read))], {}
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        while idle[0][0] != loads[idle[0][1]]:  # the rank got another file since: its entry in the heap is out of date
            heapq.heapreplace(idle, (loads[idle[0][1]], idle[0][1]))
        those = readers.get(file, [idle[0][1]])
        found[file] = rank = min(those, key=lambda rank: (loads[rank], rank))
        loads[rank] += sizes[file]
    return found


def _bytes_of(piece: Piece, target: Target) -> int:
    span = span_of(piece, target.box)
    return 0 if span is None else span[1] - span[0]
