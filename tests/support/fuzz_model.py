"""Fuzz target: the files of a model folder that `roundtable import` reads: config.json, the index, and safetensors."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

from launcher.commands.export import write_export
from launcher.errors import UserError
from launcher.importing.config import read_model, read_seq_len
from launcher.importing.folder import CONFIG_JSON, INDEX, open_model, read_config_json
from launcher.importing.weights import match_weights
from modeling.config import FAMILIES, ModelConfig
from small_models import build, tensors_of

FIRST = "model-00001-of-00002.safetensors"
CONFIG = ModelConfig(vocab_size=8, d_model=4, n_layers=1, n_heads=1, n_kv_heads=1, d_ff=4, init_std=0.5)


@cache
def whole() -> Path:
    """A folder with an exported model whose weights are in two files."""
    out = Path(tempfile.mkdtemp()) / "model"
    write_export(tensors_of(build(CONFIG, 1)).items(), CONFIG, 8, None, out, shard_bytes=400)
    assert (out / FIRST).exists()
    for family in FAMILIES:
        read_seq_len(out, {"model_type": family})  # imports transformers, which takes longer than a case may
    return out


def seeds() -> list[bytes]:
    """The bytes of the config, of the index and of one file of weights."""
    return [(whole() / name).read_bytes() for name in (CONFIG_JSON, INDEX, FIRST)]


def place_of(data: bytes) -> str:
    """The name of the file that the input replaces: the kind of file that it resembles most."""
    if b"data_offsets" in data or not data[:1].isascii() or data[:1] not in (b"{", b"["):
        return FIRST
    return INDEX if b"weight_map" in data else CONFIG_JSON


def check(data: bytes, folder: Path) -> bool:
    """Whether a model folder with ``data`` in place of one file is accepted. Only a UserError counts as a refusal."""
    path = folder / "model"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole(), path)
    (path / place_of(data)).write_bytes(data)
    problems: list[str] = []
    try:
        model, seq_len = read_model(path, read_config_json(path))
        weights = match_weights(model, open_model(path))
        elements = sum(block.numel() for name in weights.parts for block in weights.blocks(name))
    except UserError as error:
        problems = error.problems or ["nothing"]
    if problems:
        assert problems != ["nothing"] and all("\n" not in line for line in problems)
        return False
    assert elements == weights.elements and seq_len >= 1
    return True
