"""Loading: any piece of any logical tensor, whatever layout wrote it."""

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from modeling.logical import logical_shapes
from parallel.checkpoint.boxes import Box, whole
from parallel.checkpoint.manifest import (
    BUFFER,
    WEIGHT,
    DamagedCheckpoint,
    Location,
    Manifest,
    check_files,
    check_sizes,
    differences,
    hash_problem,
    read_manifest,
)
from parallel.checkpoint.places import open_folder
from parallel.checkpoint.regular import UnfitFile
from parallel.checkpoint.safetensors_stream import NotSafetensors
from parallel.checkpoint.scatter import ShardReader, Target, span_of
from parallel.checkpoint.schema import Piece
from parallel.checkpoint.store import MANIFEST, Folder
from parallel.mesh import Mesh
from parallel.zero.engine import Engine

LARGEST_SMALL_BYTES = 256 << 20  # of a file of the tokenizer, or the run's config

Targets = Mapping[tuple[str, str], Sequence[Target]]  # (kind, name) -> what is wanted of it
Wanted = dict[str, list[tuple[Piece, Target]]]  # file -> its pieces that hold elements of a target, with the target


class Checkpoint:
    """A checkpoint opened for reading: logical tensors by name, whole or in boxes.

    ``is_verified`` says whether the files' hashes were checked already; if not, ``verify`` does it, or ``load_state``
    on its way. What is read afterwards is of the same files: one that was replaced since is refused.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.is_verified = False
        self.stamps: dict[str, Any] = {}  # of the files that must not change from now on
        self.pieces: dict[tuple[str, str], list[Piece]] = {}
        for piece in manifest.pieces:
            self.pieces.setdefault((piece.kind, piece.name), []).append(piece)
        self.copies: dict[str, Path] = {}

    @property
    def step(self) -> int:
        """The update after which it was saved."""
        return self.manifest.step

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's folder, if one was saved: a copy that lasts as long as this object."""
        return self.attached("tokenizer")

    def attached(self, name: str) -> Path | None:
        """A small file, or folder of them, that was saved with the tensors; None where there is none.

        It is a copy, which lasts as long as this object, of the bytes whose hashes were compared; so that nobody who
        reads the folder meets a file that the manifest does not list. Raises DamagedCheckpoint.
        """
        found = [(file, below) for file in self.manifest.files if (below := _below(file, name)) is not None]
        if not found:
            return None
        if len({below for _, below in found}) != len(found):
            raise DamagedCheckpoint(f"{self.folder.path(MANIFEST)} lists more than one {name}")
        if name not in self.copies:
            copy = Path(tempfile.mkdtemp())
            weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
            for file, below in found:
                path = copy / (below or name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(read_small(self.folder, self.manifest, file))
            self.copies[name] = copy if found[0][1] else copy / name
        return self.copies[name]

    def verify(self) -> None:
        """Compares every file with its hash; raises DamagedCheckpoint, which names them. For one process."""
        self.hold(self.manifest.files)
        problems = check_files(self.manifest, self.folder, self.manifest.files)
        if problems:
            raise DamagedCheckpoint("; ".join(problems))
        self.is_verified = True

    def hold(self, files: Iterable[str]) -> None:
        """Has later reads refuse these files where they were written to or replaced since. Raises DamagedCheckpoint."""
        self.stamps |= {file: _stamp(self.folder, file) for file in files}

    def names(self, kind: str = "weight") -> list[str]:
        """Logical tensors that have this kind."""
        return self.manifest.kinds.get(kind, [])

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole logical tensor's shape."""
        return tuple(self.manifest.tensors[name])

    def read(self, name: str, kind: str = "weight") -> Tensor:
        """One whole logical tensor, fp32 on the CPU."""
        return self.read_box(name, whole(self.shape(name)), kind)

    def read_box(self, name: str, box: Box, kind: str = "weight") -> Tensor:
        """The elements of ``box``, fp32 on the CPU, put together from the pieces that hold them."""
        result = torch.empty(box.shape, dtype=torch.float32)
        problems = self.fill(self.wanted({(kind, name): [Target(box, result)]}))
        if problems:
            raise DamagedCheckpoint("; ".join(problems))
        return result

    def wanted(self, targets: Targets) -> Wanted:
        """The pieces that hold elements of the targets, by file."""
        wanted: Wanted = {}
        for key, boxes in targets.items():
            for piece in self.pieces[key]:
                box = piece.box
                for target in boxes:
                    if box.intersect(target.box) is not None:
                        wanted.setdefault(piece.file, []).append((piece, target))
        return wanted

    def fill(self, wanted: Wanted, hashed: Iterable[str] = ()) -> list[str]:
        """Reads the elements into the targets; what is wrong with the files, one line each.

        The files of ``hashed`` are read whole and compared with their hashes.
        """
        hashed, problems = set(hashed), []
        device = next((target.values.device for pairs in wanted.values() for _, target in pairs), torch.device("cpu"))
        reader = ShardReader(self.folder, device)
        for file in sorted(hashed | wanted.keys()):
            try:
                digest = reader.read(file, wanted.get(file, []), hashes=file in hashed)
                stamp = self.folder.stamp(file)
            except FileNotFoundError:
                problems.append(f"{self.folder.path(file)} is missing")
            except (NotSafetensors, UnfitFile) as error:
                problems.append(f"{self.folder.path(file)} {error}")
            else:
                if digest is not None and digest != self.manifest.files[file]["xxh3_128"]:
                    problems.append(hash_problem(self.folder, file))
                elif stamp != self.stamps.get(file, stamp):
                    problems.append(f"{self.folder.path(file)} was replaced while the checkpoint was read")
        return problems


def _below(file: str, name: str) -> str | None:
    """What follows ``name`` in the file's path: "" where it ends with it, None where it has no such part."""
    parts = file.split("/")
    return "/".join(parts[parts.index(name) + 1 :]) if name in parts else None


def _stamp(folder: Folder, file: str) -> Any:
    try:
        return folder.stamp(file)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder.path(file)} is missing") from None
    except UnfitFile as error:
        raise DamagedCheckpoint(f"{folder.path(file)} {error}") from None


def read_small(folder: Folder, manifest: Manifest, file: str) -> bytes:
    """The bytes of a listed small file, of which the hash was compared; raises DamagedCheckpoint."""
    expected, path = manifest.files[file], folder.path(file)
    if expected["bytes"] > LARGEST_SMALL_BYTES:
        raise DamagedCheckpoint(f"{path} has {expected['bytes']} bytes; {LARGEST_SMALL_BYTES} are the most")
    try:
        content = folder.read_bytes(file, expected["bytes"])
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except UnfitFile as error:
        raise DamagedCheckpoint(f"{path} {error}") from None
    if xxhash.xxh3_128_hexdigest(content) != expected["xxh3_128"]:
        raise DamagedCheckpoint(hash_problem(folder, file))
    return content


def open_checkpoint(location: Location, *, verify: bool = True) -> Checkpoint:
    """The checkpoint in a directory or at a URL; raises DamagedCheckpoint where it is not whole. For one process."""
    folder = open_folder(location)
    checkpoint = Checkpoint(folder, read_manifest(folder))
    if verify:
        checkpoint.verify()
    return checkpoint


def open_together(folder: Folder, mesh: Mesh) -> Checkpoint:
    """A checkpoint whose manifest, certificate and files' sizes hold; ``load_state`` checks the hashes as it reads.

    All ranks call it, and share the looking; all raise DamagedCheckpoint together.
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
    """This rank's result of ``work``; if it raised DamagedCheckpoint or OSError on any rank, it raises on all."""
    result = damage = failure = None
    try:
        result = work()
    except DamagedCheckpoint as error:
        damage = str(error)
    except OSError as error:
        failure = f"{mesh.place}: {type(error).__name__}: {error}"
    everyone: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(everyone, (damage, failure), group=mesh.control)
    failures = [text for _, text in everyone if text is not None]
    if failures:  # a disk that cannot be read is no reason to set a checkpoint aside
        raise OSError("; ".join(failures))
    damages = [text for text, _ in everyone if text is not None]
    if damages:
        raise DamagedCheckpoint("; ".join(dict.fromkeys("; ".join(damages).split("; "))))
    return result


@torch.no_grad()
def load_state(engine: Engine, checkpoint: Checkpoint) -> None:
    """Fills the engine's masters, optimizer states, buffers, step and loss scale. All ranks call it.

    A state that the checkpoint lacks (momentum switched on since) starts at zero. Raises DamagedCheckpoint on all
    ranks where a file does not match its hash; the engine's state is then undefined, and must be loaded again.
    """
    together(engine.mesh, lambda: _check_tensors(engine, checkpoint))
    names = [fragment.name for fragment in engine.fragments]
    complete = [kind for kind in engine.state_names if all((kind, name) in checkpoint.pieces for name in names)]
    engine.reset_states(int(checkpoint.manifest.scalars["updates"]), kept=complete)
    _read_together(engine, checkpoint)
    engine.restore_loss_scaler(checkpoint.manifest.scalars["loss_scaler"])
    engine.publish_weights()


@torch.no_grad()
def load_weights(engine: Engine, checkpoint: Checkpoint) -> None:
    """Fills the engine's masters and buffers, as before a first step: the optimizer's states are zero.

    All ranks call it. Raises DamagedCheckpoint as ``load_state`` does.
    """
    together(engine.mesh, lambda: _check_tensors(engine, checkpoint))
    engine.reset_states(0)
    _read_together(engine, checkpoint, kinds=(WEIGHT,))
    engine.publish_weights()


def _read_together(engine: Engine, checkpoint: Checkpoint, kinds: Collection[str] | None = None) -> None:
    """Reads ``kinds`` (None: all) and the model's buffers into the engine, the hashes checked. All ranks call it."""
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
    """Everything that this rank needs: views of the engine's own tensors, and new tensors for the model's buffers."""
    targets: dict[tuple[str, str], list[Target]] = {}
    for fragment in engine.fragments:
        boxes = fragment.boxes()
        for kind, flat in engine.pieces(fragment).items():
            if (kind, fragment.name) in checkpoint.pieces and (kinds is None or kind in kinds):
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
    """The files that this rank is to hash: each goes to the rank that reads most of it. All ranks call it."""
    mine = {file: sum(_bytes_of(*each) for each in pairs) for file, pairs in wanted.items()}
    everyone: list[dict[str, int]] = [{} for _ in range(mesh.world_size)]
    dist.all_gather_object(everyone, mine, group=mesh.control)
    loads, hashed = [0] * mesh.world_size, []
    for file, record in sorted(checkpoint.manifest.files.items(), key=lambda item: (-item[1]["bytes"], item[0])):
        rank = min(range(mesh.world_size), key=lambda rank: (-everyone[rank].get(file, 0), loads[rank], rank))
        loads[rank] += record["bytes"]
        hashed += [file] if rank == mesh.rank else []
    return hashed


def _bytes_of(piece: Piece, target: Target) -> int:
    span = span_of(piece, target.box)
    return 0 if span is None else span[1] - span[0]
