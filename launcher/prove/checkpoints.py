"""Checkpoints of the plain process, written and read by it alone, in the format that every layout writes and reads."""

from pathlib import Path
from typing import Any

from torch import Tensor

from launcher.prove.plain import PlainState
from launcher.safetensors_file import save_tensors
from parallel.checkpoint.manifest import BUFFER, Manifest, hash_file, write_manifest
from parallel.checkpoint.read import open_checkpoint
from parallel.checkpoint.schema import Piece

SHARD = "shard-00000.safetensors"


def write_plain_checkpoint(directory: Path, step: int, state: PlainState, scalars: dict[str, Any]) -> None:
    """Writes ``state`` into the new folder ``directory``: a checkpoint of one shard, each logical tensor one piece."""
    directory.mkdir(parents=True)
    kinds: dict[str, dict[str, Tensor]] = {"weight": state.weights, **state.states, BUFFER: state.buffers}
    tensors = {f"{kind}/{name}": value.contiguous() for kind, values in kinds.items() for name, value in values.items()}
    save_tensors(tensors, directory / SHARD)
    pieces = [
        Piece(kind, name, (0,) * value.ndim, tuple(value.shape), SHARD, f"{kind}/{name}")
        for kind, values in kinds.items()
        for name, value in values.items()
    ]
    manifest = Manifest(
        step=step,
        scalars={**scalars, "updates": state.updates},
        tensors={name: list(value.shape) for name, value in (state.weights | state.buffers).items()},
        kinds={kind: list(values) for kind, values in kinds.items()},
        pieces=pieces,
        files={SHARD: {"bytes": (directory / SHARD).stat().st_size, "xxh3_128": hash_file(directory / SHARD)}},
    )
    write_manifest(manifest, directory)


def read_plain_checkpoint(directory: Path) -> PlainState:
    """The whole state in a checkpoint of any layout. Raises DamagedCheckpoint where hashes or coverage are wrong."""
    checkpoint = open_checkpoint(directory)
    kinds = {
        kind: {name: checkpoint.read(name, kind) for name in names} for kind, names in checkpoint.manifest.kinds.items()
    }
    weights, buffers = kinds.pop("weight"), kinds.pop(BUFFER)
    return PlainState(weights, kinds, buffers, int(checkpoint.manifest.scalars["updates"]))
