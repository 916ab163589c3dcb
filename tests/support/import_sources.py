"""Folders of `transformers` models to damage and import, and what `roundtable import` says of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import save_byte_tokenizer
from launcher.cli import main
from launcher.commands.export import SHARD_BYTES, write_export
from small_models import build, example_config, tensors_of

LAST = "model-00005-of-00005.safetensors"  # of the five files


def write_sources(folder: Path) -> Path:
    """Writes two models of transformers into ``folder``, which it returns: ``one`` in one file, ``shards`` in five."""
    save_byte_tokenizer(folder / "tokenizer")
    config = example_config("glm4_moe", vocab_size=257)
    tensors = tensors_of(build(config, 3))
    for name, shard_bytes in (("one", SHARD_BYTES), ("shards", 48_000)):
        write_export(tensors.items(), config, 64, folder / "tokenizer", folder / name, shard_bytes=shard_bytes)
    assert (folder / "shards" / LAST).exists()
    return folder


def copied(sources: Path, folder: Path) -> Path:
    """Copies both models of ``write_sources`` into ``folder``, which it returns."""
    for name in ("one", "shards"):
        shutil.copytree(sources / name, folder / name)
    return folder


def refused(capsys: pytest.CaptureFixture[str], source: str, out: str = "out") -> list[str]:
    """The lines that the command says; exit code 2, and the folders as they were."""
    before = sorted(Path().rglob("*"))
    assert main(["import", source, out]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert sorted(Path().rglob("*")) == before
    lines = told.err.splitlines()
    assert all(line.isprintable() and len(line) < 1000 for line in lines)
    return lines


def edit(path: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file."""
    content = json.loads(Path(path).read_text())
    change(content)
    Path(path).write_text(json.dumps(content))
