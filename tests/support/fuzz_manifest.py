"""Fuzz target: any bytes as a checkpoint manifest's JSON, sealed with the right hash so that they reach the parser."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import xxhash

from parallel.checkpoint.manifest import DamagedCheckpoint, check_sizes, encode_manifest, read_manifest
from parallel.checkpoint.store import MANIFEST
from parallel.checkpoint.verify import bytes_of, tensor_bytes

MOST_SECONDS = 5.0

SMALL: dict[str, Any] = {
    "format": 2,
    "step": 3,
    "scalars": {
        "consumed": 8,
        "skipped": [[2, 4]],
        "tokens": 100,
        "heldout": [3, 2.5],
        "losses": [3.0, float("nan")],
        "dealing": 2,
        "updates": 3,
        "loss_scaler": {"cur_scale": 65536.0, "cur_iter": 2},
        "written_by": {"ranks": 2, "pp": 1, "dp": 1, "cp": 1, "tp": 2, "ep": 1, "zero": 1, "precision": "fp16"},
    },
    "tensors": {"a": [4, 2], "b": [3]},
    "kinds": {"weight": ["a"], "exp_avg": ["a"], "buffer": ["b"]},
    "pieces": [
        {"kind": "weight", "name": "a", "start": [0, 0], "shape": [2, 2], "file": "s0", "key": "w0"},
        {"kind": "weight", "name": "a", "start": [2, 0], "shape": [2, 2], "file": "s1", "key": "w1"},
        {"kind": "exp_avg", "name": "a", "start": [0, 0], "shape": [4, 2], "file": "s0", "key": "m"},
        {"kind": "buffer", "name": "b", "start": [0], "shape": [3], "file": "s1", "key": "b"},
    ],
    "files": {
        "s0": {"bytes": 4144, "xxh3_128": "0" * 32},
        "s1": {"bytes": 4124, "xxh3_128": "1" * 32},
        "tokenizer/tokenizer.json": {"bytes": 10, "xxh3_128": "f" * 32},
    },
}


CUTS: dict[str, Any] = {
    "pieces": [],
    "shards": ["s0", "s1"],
    "cuts": [
        {"kinds": ["weight", "exp_avg"], "name": "a", "start": [0, 0], "shape": [4, 2], "runs": [[2, 4, 0, 1]]},
        {"kinds": ["buffer"], "name": "b", "start": [0], "shape": [3], "runs": [[1, 2, 1, 1], [1, 1, 0, 1]]},
    ],
}


def seeds() -> list[bytes]:
    """Small manifests without their hashes: one with every field, one with cuts, one with a scalar, an empty one."""
    scalar, empty = copy.deepcopy(SMALL), copy.deepcopy(SMALL)
    scalar |= {"tensors": {"a": []}, "kinds": {"weight": ["a"]}}
    scalar["pieces"] = [{"kind": "weight", "name": "a", "start": [], "shape": [], "file": "s0", "key": "w"}]
    empty |= {"tensors": {}, "kinds": {}, "pieces": [], "files": {}}
    bodies = (SMALL, SMALL | CUTS | {"format": 3}, scalar, empty)
    return [json.dumps(body, separators=(",", ":")).encode() for body in bodies]


def check(data: bytes, folder: Path) -> bool:
    """Whether ``data`` is accepted as a checkpoint's manifest. Exceptions other than DamagedCheckpoint escape.

    Asserts that an accepted manifest can be used as commands use it, and is the same after writing and reading it.
    """
    content = data[:-1] + b',"xxh3_128":"' + xxhash.xxh3_128_hexdigest(data).encode() + b'"}'
    (folder / MANIFEST).write_bytes(content)
    started = time.process_time()
    refusal = None
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpoint as error:
        refusal = str(error)
    assert time.process_time() - started < MOST_SECONDS
    if refusal is not None:
        assert MANIFEST in refusal and "\n" not in refusal, f"not one line that names the file: {refusal}"
        return False
    assert bytes_of(manifest) >= sum(tensor_bytes(manifest, kind) for kind in manifest.kinds)
    assert all((folder / file).is_relative_to(folder) and ".." not in file.split("/") for file in manifest.files)
    assert all(piece.file in manifest.files for piece in manifest.every_piece())
    check_sizes(manifest, folder, manifest.files)
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    assert repr(read_manifest(folder)) == repr(manifest)  # by repr, since a NaN does not equal itself
    return True
