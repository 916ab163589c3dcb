"""Fuzz target: any bytes as a checkpoint's shard, header and data."""

import json
import time
from pathlib import Path

import torch

from parallel.checkpoint.boxes import whole
from parallel.checkpoint.local import LocalFolder
from parallel.checkpoint.safetensors_stream import NotSafetensors, encode_header, read_header
from parallel.checkpoint.scatter import ShardReader, Target
from parallel.checkpoint.schema import LONGEST_NAME, Piece

FILE = "shard.safetensors"
MOST_SECONDS = 5.0
READ_BYTES = 1 << 20  # tensors up to this size are read as well


def seeds() -> list[bytes]:
    """Small shards: as saving writes them, as safetensors' own writer does (with a scalar), and without tensors."""
    padded = encode_header({"weight/a/0.0": (2, 3), "exp_avg/a/0.0": (2, 3)}) + bytes(48)
    text = json.dumps({"b": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}).encode()
    text += b" " * (-len(text) % 8)
    scalar = len(text).to_bytes(8, "little") + text + bytes(4)
    return [padded, scalar, encode_header({})]


def check(data: bytes, folder: Path) -> bool:
    """Whether ``data`` is accepted as a shard. Exceptions other than NotSafetensors escape.

    Asserts that every tensor of an accepted header lies within the file and can be read.
    """
    (folder / FILE).write_bytes(data)
    opened, started = LocalFolder(folder), time.process_time()
    refusal = None
    try:
        with opened.open(FILE) as file:
            header = read_header(file, len(data))
    except NotSafetensors as error:
        refusal = str(error)
    assert time.process_time() - started < MOST_SECONDS
    if refusal is not None:
        assert "\n" not in refusal, f"not one line: {refusal}"
        return False
    reader = ShardReader(opened, torch.device("cpu"))
    for key, shape in header.shapes.items():
        n_bytes = 4 * torch.Size(shape).numel()
        assert header.offsets[key] + n_bytes <= len(data) and len(key) <= LONGEST_NAME
        if n_bytes <= READ_BYTES:
            target = Target(whole(shape), torch.empty(shape))
            piece = Piece("weight", "a", (0,) * len(shape), shape, FILE, key)
            assert reader.read(FILE, [(piece, target)], hashes=True) is not None
    return True
