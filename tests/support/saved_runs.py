"""Writes a run directory with a checkpoint, without training."""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from byte_tokenizer import save_byte_tokenizer
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from modeling.decoder import Decoder
from parallel.checkpoint.manifest import BUFFER, Manifest, hash_file, write_manifest
from parallel.checkpoint.schema import Piece
from small_models import tensors_of

SCALARS = {"consumed": 0, "skipped": [], "tokens": 0, "updates": 0, "loss_scaler": {}}


def save_run(
    run: Path,
    config: RunConfig,
    model: Decoder,
    step: int,
    save_tokenizer: Callable[[Path], object] = save_byte_tokenizer,
) -> Path:
    """Writes a run directory with one checkpoint, as a single rank would; returns the checkpoint's folder.

    ``save_tokenizer`` writes the tokenizer's files into the folder that it is given.
    """
    directory = run / "checkpoints" / f"step-{step:08d}"
    (directory / "tokenizer").mkdir(parents=True)
    save_tokenizer(directory / "tokenizer")
    kinds = {
        "weight": [name for name, _ in model.named_parameters()],
        BUFFER: [name for name, _ in model.named_buffers()],
    }
    tensors = tensors_of(model)
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, directory / "shard.safetensors")
    manifest = Manifest(
        step=step, scalars=SCALARS, tensors={name: list(t.shape) for name, t in tensors.items()}, kinds=kinds
    )
    for kind, names in kinds.items():
        for name in names:
            shape = tuple(tensors[name].shape)
            manifest.pieces.append(Piece(kind, name, (0,) * len(shape), shape, "shard.safetensors", name))
    for file in ["shard.safetensors", *(f"tokenizer/{path.name}" for path in (directory / "tokenizer").iterdir())]:
        manifest.files[file] = {"bytes": (directory / file).stat().st_size, "xxh3_128": hash_file(directory / file)}
    write_manifest(manifest, directory)
    (run / "config.yaml").write_text(dump_config(config))
    return directory
