"""Writes a run directory with weights but no training state: config.yaml and a checkpoint of step 0."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.importing.tokenizer import tokenizer_attachments
from launcher.new_folder import new_folder
from launcher.scratch import scratch_folder
from launcher.training.run_dir import record_folder
from launcher.training.run_parts import CHECKPOINTS, CONFIG, STARTED_IN
from launcher.training.state import tokenizer_files
from modeling.logical import LogicalTensor, logical_tensors
from parallel.checkpoint.cuts import key_of
from parallel.checkpoint.local import LocalStore
from parallel.checkpoint.manifest import BUFFER, ELEMENT_BYTES, WEIGHT, Manifest
from parallel.checkpoint.safetensors_stream import bytes_of
from parallel.checkpoint.schema import Piece
from parallel.checkpoint.store import step_name
from parallel.checkpoint.write import certified, write_attachments, write_shard

STEP = 0
SHARD_BYTES = 16 << 30  # the most bytes of one shard (a larger tensor gets a file of its own)
MOST_IN_SHARD = 10_000  # the most tensors of one shard, whose header is read into memory
SCALARS = {"consumed": 0, "skipped": [], "tokens": 0, "updates": 0, "loss_scaler": {}}
ATTEMPT = "import"


class Blocks(Protocol):
    """A source of weights that are read in small blocks."""

    def blocks(self, name: str, on_bytes: Callable[[int], None] = ...) -> Iterator[Tensor]:
        """The elements of one logical tensor in order, in flat fp32 blocks; ``on_bytes`` gets the bytes of each."""
        ...


def write_run(
    out: Path,
    config: RunConfig,
    weights: Blocks,
    tokenizer: Any,
    kept: Mapping[str, Path | bytes],
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    started_in: Path | None = None,
) -> None:
    """Writes the run directory ``out``, whole or not at all. ``on_bytes`` gets the bytes of each read of weights.

    ``kept`` maps names of small files of the checkpoint, which an export reads, to their paths or contents.
    ``started_in`` is the folder from which the config's relative paths count; None means the working folder. Raises
    UserError where the source of weights turns out to be unusable while it is read.
    """
    with new_folder(out) as partial:
        text = dump_config(config)
        (partial / CONFIG).write_text(text)
        load_config(partial / CONFIG)
        (partial / STARTED_IN).write_bytes(record_folder(started_in or Path.cwd()))
        write_checkpoint(partial / CHECKPOINTS, config, text.encode(), weights, tokenizer, kept, on_bytes)


def write_checkpoint(
    checkpoints: Path,
    config: RunConfig,
    text: bytes,
    weights: Blocks,
    tokenizer: Any,
    kept: Mapping[str, Path | bytes],
    on_bytes: Callable[[int], None],
) -> None:
    """Writes the checkpoint of step 0: weights, buffers, the tokenizer, the config and the kept files."""
    store = LocalStore(checkpoints)
    folder, _ = store.begin(step_name(STEP), ATTEMPT)
    tensors = logical_tensors(config.model)
    manifest = empty_manifest(tensors)
    for number, names in enumerate(in_shards(tensors)):
        file = f"shard-{number:05d}.safetensors"
        pieces = [whole_piece(name, tensors[name], file) for name in names]
        chunks = (bytes_of(block) for name in names for block in weights.blocks(name, on_bytes))
        manifest.pieces += pieces
        manifest.files |= write_shard(folder, file, {piece.key: piece.shape for piece in pieces}, chunks)
    with scratch_folder() as beside:
        paths = tokenizer_files(tokenizer_attachments(tokenizer, beside))
        files = {name: path.read_bytes() for name, path in paths.items()}  # not written here: a full disk is OUT's then
    manifest.files |= write_attachments(folder, "", {CONFIG: text, **kept, **files})
    store.commit(step_name(STEP), ATTEMPT, certified(manifest))


def empty_manifest(tensors: Mapping[str, LogicalTensor]) -> Manifest:
    """The manifest of a checkpoint of step 0 with these tensors, which lists no pieces and files yet."""
    kinds = {
        WEIGHT: [name for name, tensor in tensors.items() if not tensor.is_buffer],
        BUFFER: [name for name, tensor in tensors.items() if tensor.is_buffer],
    }
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return Manifest(step=STEP, scalars=dict(SCALARS), tensors=shapes, kinds=kinds)


def whole_piece(name: str, tensor: LogicalTensor, file: str) -> Piece:
    """The piece that is a whole logical tensor in ``file``, with the key that saving would give it."""
    kind, start = BUFFER if tensor.is_buffer else WEIGHT, (0,) * len(tensor.shape)
    return Piece(kind, name, start, tensor.shape, file, key_of(kind, name, start))


def in_shards(tensors: Mapping[str, LogicalTensor]) -> Iterator[list[str]]:
    """The tensors' names in groups, one for each shard."""
    names: list[str] = []
    held = 0
    for name, tensor in tensors.items():
        size = ELEMENT_BYTES * prod(tensor.shape)
        if names and (held + size > SHARD_BYTES or len(names) == MOST_IN_SHARD):
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names
