"""A small run with a checkpoint, and changes to its manifest after which every hash is right again."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from byte_tokenizer import save_byte_tokenizer
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from modeling.config import ModelConfig
from modeling.logical import logical_shapes
from parallel.checkpoint.boxes import Box
from parallel.checkpoint.cuts import key_of
from parallel.checkpoint.local import LocalFolder
from parallel.checkpoint.manifest import SEAL_BYTES, WEIGHT, Manifest, hash_file, seal, write_manifest
from parallel.checkpoint.safetensors_stream import chunks_of, write_tensors
from parallel.checkpoint.schema import Piece

MODEL = ModelConfig(
    family="llama", vocab_size=257, d_model=8, n_layers=1, n_heads=2, n_kv_heads=2, d_head=4, d_ff=8, moe=None
)
SCALARS = {"consumed": 8, "skipped": [], "tokens": 100, "updates": 1, "loss_scaler": {}}
SHARDS = ("shard-00000.safetensors", "shard-00001.safetensors")


def write_run(run: Path, step: int = 1) -> Path:
    """Writes a run directory with one checkpoint of two shards, the config and a tokenizer; returns its folder."""
    directory = run / "checkpoints" / f"step-{step:08d}"
    (directory / "tokenizer").mkdir(parents=True)
    save_byte_tokenizer(directory / "tokenizer")
    (run / "config.yaml").write_text(dump_config(RunConfig(model=MODEL)))
    (directory / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    shapes = {name: list(shape) for name, shape in logical_shapes(MODEL).items()}
    manifest = Manifest(step=step, scalars=SCALARS, tensors=shapes, kinds={WEIGHT: list(shapes)})
    for number, shard in enumerate(SHARDS):
        pieces = [piece_of(name, shape, shard) for name, shape in list(shapes.items())[number::2]]
        manifest.pieces += pieces
        manifest.files[shard] = write_shard(directory, shard, pieces)
    small = [path for path in directory.rglob("*") if path.is_file() and path.name not in SHARDS]
    manifest.files |= {path.relative_to(directory).as_posix(): record_of(path) for path in small}
    write_manifest(manifest, directory)
    return directory


def piece_of(name: str, shape: list[int], shard: str) -> Piece:
    """The piece that holds the whole tensor."""
    start = (0,) * len(shape)
    return Piece(WEIGHT, name, start, tuple(shape), shard, key_of(WEIGHT, name, start))


def write_shard(directory: Path, shard: str, pieces: list[Piece]) -> dict[str, Any]:
    """Writes a shard of zeros; returns its entry in the manifest."""
    zeros = torch.zeros(sum(Box(piece.start, piece.shape).numel for piece in pieces))
    shapes = {piece.key: piece.shape for piece in pieces}
    return write_tensors(LocalFolder(directory), shard, shapes, chunks_of(zeros))


def cut_up(body: dict[str, Any]) -> None:
    """Replaces each piece in the manifest by an equivalent cut with one range."""
    body["shards"] = list(SHARDS)
    for piece in body.pop("pieces"):
        held = {"name": piece["name"], "start": piece["start"], "shape": piece["shape"]}
        runs = [[1, prod(piece["shape"]), SHARDS.index(piece["file"]), 1]]
        body["cuts"].append({"kinds": [piece["kind"]], **held, "runs": runs})
    body["pieces"] = []


def record_of(path: Path) -> dict[str, Any]:
    """The manifest's entry of a file: size and hash, of a link those of its target."""
    return {"bytes": path.stat().st_size, "xxh3_128": hash_file(path.resolve())}


def body_of(directory: Path) -> dict[str, Any]:
    """The manifest's JSON without its hash."""
    return json.loads((directory / "manifest.json").read_bytes()[:-SEAL_BYTES] + b"}")


def reseal(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest's JSON in place, and gives it the right hash."""
    body = body_of(directory)
    change(body)
    (directory / "manifest.json").write_bytes(seal(body))


def reseal_text(directory: Path, old: bytes, new: bytes) -> None:
    """Replaces a part of the manifest's text, also by text that no JSON library writes, and gives it the right hash."""
    content = (directory / "manifest.json").read_bytes()[:-SEAL_BYTES] + b"}"
    assert old in content
    (directory / "manifest.json").write_bytes(sealed(content.replace(old, new, 1)))


def sealed(content: bytes) -> bytes:
    """Bytes that end with a brace, with their hash inserted as the last entry of the object."""
    return content[:-1] + b',"xxh3_128":"' + xxhash.xxh3_128_hexdigest(content).encode() + b'"}'
