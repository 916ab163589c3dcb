"""What a checkpoint is made of: the pieces that each rank owns, and the manifest that puts them together."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from modeling.logical import logical_tensors
from parallel.checkpoint.errors import IncompleteSave
from parallel.checkpoint.manifest import BUFFER, WEIGHT, Manifest, certify, decode_manifest, encode_manifest
from parallel.checkpoint.safetensors_stream import write_hashed, write_tensors
from parallel.checkpoint.schema import LARGEST_MANIFEST_BYTES, Malformed, Piece
from parallel.checkpoint.store import Folder
from parallel.zero.engine import Engine

FileRecords = dict[str, dict[str, Any]]  # file -> bytes, xxh3_128: as in the manifest


def collect_pieces(engine: Engine, file: str) -> tuple[list[Piece], dict[str, Tensor]]:
    """What this rank owns, as boxes of logical tensors: their description, and the fp32 tensors by key, not copied."""
    pieces: list[Piece] = []
    tensors: dict[str, Tensor] = {}

    def add(kind: str, name: str, start: tuple[int, ...], value: Tensor) -> None:
        key = f"{kind}/{name}/{'.'.join(map(str, start))}"
        tensors[key] = value.detach().float()
        pieces.append(Piece(kind, name, start, tuple(value.shape), file, key))

    for fragment in (fragment for fragment in engine.fragments if fragment.is_owner):
        boxes = fragment.boxes()
        for kind, flat in engine.pieces(fragment).items():
            done = 0
            for box in boxes:
                add(kind, fragment.name, box.start, flat.narrow(0, done, box.numel).view(box.shape))
                done += box.numel
    if engine.mesh.replicas.rank == 0 and engine.mesh.tp.rank == 0:  # buffers are the same on every rank of a stage
        for name, buffer in engine.model.named_buffers():
            add(BUFFER, name, (0,) * buffer.ndim, buffer)
    return pieces, tensors


def write_shard(folder: Folder, file: str, pieces: Sequence[Piece], chunks: Iterable[memoryview]) -> FileRecords:
    """Writes and syncs a rank's shard; ``chunks`` are the bytes of its pieces in their order. No pieces, no file."""
    if not pieces:
        return {}
    return {file: write_tensors(folder, file, {piece.key: piece.shape for piece in pieces}, chunks)}


def write_attachments(folder: Folder, prefix: str, attachments: Mapping[str, Path | bytes]) -> FileRecords:
    """Copies small files (the tokenizer, the run's config), or their content, into the checkpoint, hashed as shards."""
    return {
        prefix + name: write_hashed(
            folder, prefix + name, [source if isinstance(source, bytes) else source.read_bytes()]
        )
        for name, source in attachments.items()
    }


def build_manifest(
    engine: Engine, step: int, scalars: dict[str, Any], shards: Sequence[tuple[list[Piece], FileRecords]]
) -> Manifest:
    """The manifest of all ranks' shards."""
    tensors = logical_tensors(engine.model_config)
    parameters = {name: tensor.weight for name, tensor in tensors.items() if not tensor.is_buffer}
    kinds = {WEIGHT: list(parameters)}
    for kind in engine.rule.states:
        kinds[kind] = [name for name, weight in parameters.items() if kind in engine.rule.states_of(weight)]
    kinds[BUFFER] = [name for name, tensor in tensors.items() if tensor.is_buffer]
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    manifest = Manifest(step=step, scalars=scalars, tensors=shapes, kinds=kinds)
    for pieces, files in shards:
        manifest.pieces += pieces
        manifest.files |= files
    return manifest


def certified(manifest: Manifest) -> bytes:
    """The content of manifest.json; raises IncompleteSave where it would be refused when it is read."""
    content = encode_manifest(manifest)
    try:
        if len(content) > LARGEST_MANIFEST_BYTES:
            raise Malformed(f"has {len(content)} bytes, more than {LARGEST_MANIFEST_BYTES}")
        problems = certify(decode_manifest(content))
    except Malformed as error:
        problems = [str(error)]
    if problems:
        raise IncompleteSave(f"the coverage certificate of step {manifest.step} fails: " + "; ".join(problems[:5]))
    return content
