"""Loading: any piece of any logical tensor, whatever layout wrote it."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from parallel.checkpoint.boxes import Box, whole
from parallel.checkpoint.manifest import DamagedCheckpoint, Manifest, Piece, certify, check_files, read_manifest
from parallel.checkpoint.write import BUFFER, list_checkpoints
from parallel.engine import Engine
from parallel.mesh import Mesh


class Checkpoint:
    """A checkpoint directory opened for reading: logical tensors by name, whole or in boxes."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self.pieces: dict[tuple[str, str], list[Piece]] = {}
        for piece in manifest.pieces:
            self.pieces.setdefault((piece.kind, piece.name), []).append(piece)
        self.handles: dict[str, safe_open] = {}

    @property
    def step(self) -> int:
        """The update after which it was saved."""
        return self.manifest.step

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's folder, if one was saved."""
        path = self.directory / "tokenizer"
        return path if path.is_dir() else None

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
        for piece in self.pieces[kind, name]:
            common = piece.box.intersect(box)
            if common is not None:
                part = self.open(piece.file).get_slice(piece.key)
                value = (
                    part[common.shifted(piece.start).slices]
                    if common.shape
                    else self.open(piece.file).get_tensor(piece.key)
                )
                result[common.shifted(box.start).slices] = value
        return result

    def open(self, file: str) -> safe_open:
        """The safetensors file, mapped once."""
        if file not in self.handles:
            self.handles[file] = safe_open(self.directory / file, framework="pt")
        return self.handles[file]


def open_checkpoint(directory: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint in ``directory``; raises DamagedCheckpoint where it is not whole. For one process."""
    manifest = read_manifest(directory)
    problems = certify(manifest)
    if verify:
        problems += check_files(manifest, directory, list(manifest.files))
    if problems:
        raise DamagedCheckpoint("; ".join(problems))
    return Checkpoint(directory, manifest)


def open_latest(checkpoints: Path, mesh: Mesh) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint, and what was wrong with newer ones. All ranks call it; they share the hashing.

    A damaged checkpoint is renamed step-N.damaged, so that step N can be saved again.
    """
    warnings = []
    for directory in reversed(list_checkpoints(checkpoints)):
        problems = _check_together(directory, mesh)
        if not problems:
            return Checkpoint(directory, read_manifest(directory)), warnings
        warnings.append(f"checkpoint {directory.name} is damaged and was set aside: " + "; ".join(problems))
        dist.barrier(group=mesh.control)
        if mesh.rank == 0:
            set_aside(directory)
        dist.barrier(group=mesh.control)
    return None, warnings


def _check_together(directory: Path, mesh: Mesh) -> list[str]:
    try:
        manifest = read_manifest(directory)
        problems = certify(manifest)
        problems += check_files(manifest, directory, sorted(manifest.files)[mesh.rank :: mesh.world_size])
    except DamagedCheckpoint as error:
        problems = [str(error)]
    everyone: list[list[str]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(everyone, problems, group=mesh.control)
    return list(dict.fromkeys(problem for part in everyone for problem in part))


def set_aside(directory: Path) -> Path:
    """Renames a damaged checkpoint; returns its new path."""
    target = directory.with_name(f"{directory.name}.damaged")
    number = 1
    while target.exists():
        number += 1
        target = directory.with_name(f"{directory.name}.damaged-{number}")
    return directory.rename(target)


@torch.no_grad()
def load_state(engine: Engine, checkpoint: Checkpoint) -> None:
    """Fills the engine's masters, optimizer states, buffers, step and loss scale. All ranks call it.

    A state that the checkpoint lacks (momentum switched on since) starts at zero.
    """
    engine.reset_states(int(checkpoint.manifest.scalars["updates"]))
    for fragment in engine.fragments:
        for kind, flat in engine.pieces(fragment).items():
            if (kind, fragment.name) in checkpoint.pieces:
                parts = [checkpoint.read_box(fragment.name, box, kind).view(-1) for box in fragment.boxes()]
                flat.copy_(torch.cat(parts))
    for name, buffer in engine.model.named_buffers():
        buffer.copy_(checkpoint.read(name, BUFFER))
    engine.restore_loss_scaler(checkpoint.manifest.scalars["loss_scaler"])
    engine.publish_weights()
