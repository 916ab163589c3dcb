"""Loading: any piece of any logical tensor, whatever layout wrote it."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.checkpoint.boxes import Box, whole
from parallel.checkpoint.folder import Folder, LocalFolder, Store, open_folder
from parallel.checkpoint.manifest import (
    DamagedCheckpoint,
    Location,
    Manifest,
    Piece,
    certify,
    check_files,
    check_sizes,
    hash_problem,
    read_manifest,
)
from parallel.checkpoint.safetensors_stream import NotSafetensors
from parallel.checkpoint.scatter import ShardReader, Target, span_of
from parallel.checkpoint.write import BUFFER
from parallel.engine import Engine
from parallel.mesh import Mesh

Targets = Mapping[tuple[str, str], Sequence[Target]]  # (kind, name) -> what is wanted of it
Wanted = dict[str, list[tuple[Piece, Target]]]  # file -> its pieces that hold elements of a target, with the target


class Checkpoint:
    """A checkpoint opened for reading: logical tensors by name, whole or in boxes.

    ``is_verified`` says whether the files' hashes were checked already; if not, ``load_state`` does it on its way.
    """

    def __init__(self, folder: Folder, manifest: Manifest, *, is_verified: bool) -> None:
        self.folder = folder
        self.manifest = manifest
        self.is_verified = is_verified
        self.pieces: dict[tuple[str, str], list[Piece]] = {}
        for piece in manifest.pieces:
            self.pieces.setdefault((piece.kind, piece.name), []).append(piece)
        self.copies: dict[str, tempfile.TemporaryDirectory[str]] = {}

    @property
    def step(self) -> int:
        """The update after which it was saved."""
        return self.manifest.step

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's folder, if one was saved; from an object store a copy that lasts as long as this object."""
        return self.attached("tokenizer")

    def attached(self, name: str) -> Path | None:
        """The path of a small file, or folder of them, that was saved with the tensors; None where there is none."""
        if isinstance(self.folder, LocalFolder):
            path = self.folder.directory / name
            return path if path.exists() else None
        found = [(file, below) for file in self.manifest.files if (below := _below(file, name)) is not None]
        if not found:
            return None
        if name not in self.copies:
            self.copies[name] = tempfile.TemporaryDirectory()
            for file, below in found:
                (Path(self.copies[name].name) / (below or name)).write_bytes(self.folder.read_bytes(file))
        return Path(self.copies[name].name, *([] if found[0][1] else [name]))

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
            except FileNotFoundError:
                problems.append(f"{self.folder.path(file)} is missing")
            except NotSafetensors as error:
                problems.append(f"{self.folder.path(file)} {error}")
            else:
                if digest is not None and digest != self.manifest.files[file]["xxh3_128"]:
                    problems.append(hash_problem(self.folder, file))
        return problems


def _below(file: str, name: str) -> str | None:
    """What follows ``name`` in the file's path: "" where it ends with it, None where it has no such part."""
    parts = file.split("/")
    return "/".join(parts[parts.index(name) + 1 :]) if name in parts else None


def open_checkpoint(location: Location, *, verify: bool = True) -> Checkpoint:
    """The checkpoint in a directory or at a URL; raises DamagedCheckpoint where it is not whole. For one process."""
    folder = open_folder(location)
    manifest = read_manifest(folder)
    problems = certify(manifest)
    if verify:
        problems += check_files(manifest, folder, list(manifest.files))
    if problems:
        raise DamagedCheckpoint("; ".join(problems))
    return Checkpoint(folder, manifest, is_verified=verify)


def open_together(store: Store, name: str, mesh: Mesh) -> Checkpoint:
    """A checkpoint whose manifest, certificate and files' sizes hold; ``load_state`` checks the hashes as it reads.

    All ranks call it, and share the looking; all raise DamagedCheckpoint together.
    """
    folder = store.folder(name)
    manifest = together(mesh, lambda: _checked(folder, mesh))
    assert manifest is not None
    return Checkpoint(folder, manifest, is_verified=False)


def _checked(folder: Folder, mesh: Mesh) -> Manifest:
    manifest = read_manifest(folder)
    problems = certify(manifest)
    problems += check_sizes(manifest, folder, sorted(manifest.files)[mesh.rank :: mesh.world_size])
    if problems:
        raise DamagedCheckpoint("; ".join(problems))
    return manifest


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
    names = [fragment.name for fragment in engine.fragments]
    complete = [kind for kind in engine.state_names if all((kind, name) in checkpoint.pieces for name in names)]
    engine.reset_states(int(checkpoint.manifest.scalars["updates"]), kept=complete)
    targets, buffers = _targets(engine, checkpoint)
    wanted = checkpoint.wanted(targets)
    hashed = [] if checkpoint.is_verified else _share_hashing(checkpoint, wanted, engine.mesh)
    together(engine.mesh, lambda: _fill(checkpoint, wanted, hashed))
    checkpoint.is_verified = True
    for name, buffer in engine.model.named_buffers():
        buffer.copy_(buffers[name])
    engine.restore_loss_scaler(checkpoint.manifest.scalars["loss_scaler"])
    engine.publish_weights()


def _fill(checkpoint: Checkpoint, wanted: Wanted, hashed: Sequence[str]) -> None:
    problems = checkpoint.fill(wanted, hashed)
    if problems:
        raise DamagedCheckpoint("; ".join(problems))


def _targets(engine: Engine, checkpoint: Checkpoint) -> tuple[Targets, dict[str, Tensor]]:
    """Everything that this rank needs: views of the engine's own tensors, and new tensors for the model's buffers."""
    targets: dict[tuple[str, str], list[Target]] = {}
    for fragment in engine.fragments:
        boxes = fragment.boxes()
        for kind, flat in engine.pieces(fragment).items():
            if (kind, fragment.name) in checkpoint.pieces:
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
