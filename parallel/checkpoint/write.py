"""Makes the parts of a checkpoint: what each rank owns, its shard, attachments, and the certified manifest."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from modeling.logical import logical_tensors
from parallel.checkpoint.boxes import whole
from parallel.checkpoint.cuts import Owned, Packed, key_of, merge
from parallel.checkpoint.errors import IncompleteSave
from parallel.checkpoint.manifest import BUFFER, WEIGHT, Manifest, certify, decode_manifest, encode_manifest
from parallel.checkpoint.safetensors_stream import write_hashed, write_tensors
from parallel.checkpoint.schema import LARGEST_MANIFEST_BYTES, Malformed
from parallel.checkpoint.store import Folder
from parallel.zero.engine import Engine

FileRecords = dict[str, dict[str, Any]]  # file -> bytes, xxh3_128: as in the manifest


def collect_owned(engine: Engine) -> tuple[list[Owned], dict[str, Tensor]]:
    """What this rank owns of the logical tensors, and its boxes' fp32 tensors by key, in the same order.

    The tensors are the engine's own where these are fp32, not copies. No communication.
    """
    owned: list[Owned] = []
    tensors: dict[str, Tensor] = {}
    for fragment in (fragment for fragment in engine.fragments if fragment.is_owner):
        values = engine.pieces(fragment)
        owned.append(Owned(tuple(values), fragment.name, fragment.held, fragment.start, fragment.numel))
        for kind, flat in values.items():
            done = 0
            for box in fragment.boxes():
                part = flat.narrow(0, done, box.numel).view(box.shape)
                tensors[key_of(kind, fragment.name, box.start)] = part.detach().float()
                done += box.numel
    if engine.mesh.replicas.rank == 0 and engine.mesh.tp.rank == 0:  # buffers are the same on every rank of a stage
        for name, buffer in engine.model.named_buffers():
            held = whole(tuple(buffer.shape))
            owned.append(Owned((BUFFER,), name, held, 0, held.numel))
            tensors[key_of(BUFFER, name, held.start)] = buffer.detach().float()
    return owned, tensors


def write_shard(
    folder: Folder, file: str, shapes: Mapping[str, Sequence[int]], chunks: Iterable[memoryview]
) -> FileRecords:
    """Writes and syncs one shard; returns its file record. Without tensors no file is written.

    ``shapes``: the tensors' shapes by key. ``chunks``: their bytes, in that order.
    """
    if not shapes:
        return {}
    return {file: write_tensors(folder, file, shapes, chunks)}


def write_attachments(folder: Folder, prefix: str, attachments: Mapping[str, Path | bytes]) -> FileRecords:
    """Copies small files (the tokenizer, the run's config) into the checkpoint; returns their file records.

    ``attachments``: by name, a file's path or its content. ``prefix`` precedes the names.
    """
    return {
        prefix + name: write_hashed(
            folder, prefix + name, [source if isinstance(source, bytes) else source.read_bytes()]
        )
        for name, source in attachments.items()
    }


def build_manifest(
    engine: Engine, step: int, scalars: dict[str, Any], written: Sequence[tuple[Packed, FileRecords]]
) -> Manifest:
    """The manifest of all ranks' shards. Rank 0 calls it.

    ``written``: for each rank, what it owns, and its shard's file record (empty where it owns nothing).
    """
    tensors = logical_tensors(engine.model_config)
    parameters = {name: tensor.weight for name, tensor in tensors.items() if not tensor.is_buffer}
    kinds = {WEIGHT: list(parameters)}
    for kind in engine.rule.states:
        kinds[kind] = [name for name, weight in parameters.items() if kind in engine.rule.states_of(weight)]
    kinds[BUFFER] = [name for name, tensor in tensors.items() if tensor.is_buffer]
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    manifest = Manifest(step=step, scalars=scalars, tensors=shapes, kinds=kinds)
    for _, files in written:
        manifest.shards += files
        manifest.files |= files
    manifest.cuts = merge([packed for packed, files in written if files], shapes)
    return manifest


def certified(manifest: Manifest) -> bytes:
    """The content of manifest.json. Raises IncompleteSave where reading it would refuse it, as on missing elements."""
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
