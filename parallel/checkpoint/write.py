"""What a checkpoint is made of: what each rank owns, and the manifest that puts it together."""

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
    """What this rank owns of logical tensors, and the fp32 tensors of its boxes by key, in order and not copied."""
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
    """Writes and syncs a shard of tensors, ``chunks`` their bytes in the order of ``shapes``. No tensors, no file."""
    if not shapes:
        return {}
    return {file: write_tensors(folder, file, shapes, chunks)}


def write_attachments(folder: Folder, prefix: str, attachments: Mapping[str, Path | bytes]) -> FileRecords:
    """Copies small files (the tokenizer, the run's config), or their content, into the checkpoint, hashed as shards."""
    return {
        prefix + name: write_hashed(
            folder, prefix + name, [source if isinstance(source, bytes) else source.read_bytes()]
        )
        for name, source in attachments.items()
    }


def build_manifest(
    engine: Engine, step: int, scalars: dict[str, Any], written: Sequence[tuple[Packed, FileRecords]]
) -> Manifest:
    """The manifest of all ranks' shards: of each, what the rank owns and the shard's record (none, where nothing)."""
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
