"""What `roundtable import` refuses: a line for each problem, exit code 2, and nothing left behind."""

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from import_sources import LAST, copied, edit, refused, write_sources
from launcher.cli import main
from launcher.importing.folder import INDEX, MOST_PROBLEMS, ONE_FILE

FIRST = "model-00001-of-00005.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def here(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with copies of the two."""
    monkeypatch.chdir(copied(sources, tmp_path))
    return tmp_path


def rewrite(source: str, change: Callable[[dict[str, Tensor]], object], file: str = ONE_FILE) -> None:
    """Changes the tensors of one file."""
    path = Path(source) / file
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_the_folders_themselves_are_imported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "shards"):
        assert main(["import", name, f"runs/{name}"]) == 0
        assert main(["checkpoint", "verify", f"runs/{name}"]) == 0
    assert capsys.readouterr().err == ""


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a file's header, and nothing of what follows."""
    header, data = header_of(path)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def cut_short(n_bytes: int) -> Callable[[], None]:
    return lambda: os.truncate(f"shards/{LAST}", n_bytes)


def put(content: bytes) -> Callable[[], object]:
    return lambda: Path(f"shards/{LAST}").write_bytes(content)


def link_out(name: str) -> Callable[[], None]:
    """Moves a file out of its folder, and leaves a link to it."""

    def do() -> None:
        (Path("elsewhere")).mkdir()
        Path(f"shards/{name}").rename("elsewhere/file")
        Path(f"shards/{name}").symlink_to("../elsewhere/file")

    return do


def list_at(file: str) -> Callable[[], None]:
    return lambda: edit(f"shards/{INDEX}", lambda content: content["weight_map"].update({NORM: file}))


def append() -> None:
    path = Path(f"shards/{LAST}")
    path.write_bytes(path.read_bytes() + b"more")


def replace_by_pipe() -> None:
    Path(f"shards/{LAST}").unlink()
    os.mkfifo(f"shards/{LAST}")


def rename_in_header(header: dict[str, Any]) -> None:
    header["model.other"] = header.pop(next(name for name in header if name != "__metadata__"))


def shift(header: dict[str, Any]) -> None:
    entry = next(value for name, value in header.items() if name != "__metadata__")
    entry["data_offsets"] = [each + 4 for each in entry["data_offsets"]]


SHARDS: dict[str, tuple[Callable[[], object], str]] = {
    "truncated": (cut_short(20_000), f"shards/{LAST} ends too early: it has 20000 bytes, and its header and tensors "),
    "in the header": (cut_short(100), f"shards/{LAST} has a header of "),
    "empty": (cut_short(0), f"shards/{LAST} ends too early; download the model again"),
    "too long": (append, f"shards/{LAST} is too long: it has "),
    "text": (put(b"<html>not found</html>"), f"shards/{LAST} has a header of "),
    "huge header": (put(struct.pack("<Q", 2**62) + b"{}"), f"shards/{LAST} has a header of 4611686018427387904 bytes"),
    "no JSON": (put(struct.pack("<Q", 2) + b"{]"), f"shards/{LAST} has a header that is not safetensors': is no JSON"),
    "a list": (put(struct.pack("<Q", 2) + b"[]"), f"shards/{LAST} has a header that is not safetensors': is no object"),
    "overlap": (
        lambda: with_header(Path(f"shards/{LAST}"), shift),
        f"shards/{LAST} holds ",
    ),
    "missing": (lambda: Path(f"shards/{LAST}").unlink(), f"shards/{LAST} is missing; download the model again"),
    "a pipe": (replace_by_pipe, f"shards/{LAST} is a named pipe, not a file; "),
    "index cut": (
        lambda: os.truncate(f"shards/{INDEX}", 100),
        f"shards/{INDEX} is no index of safetensors files: is no",
    ),
    "index of numbers": (
        lambda: Path(f"shards/{INDEX}").write_text('{"weight_map": {"a": 1}}'),
        f"shards/{INDEX} is no index of safetensors files: weight_map.a=1: ",
    ),
    "index empty": (lambda: Path(f"shards/{INDEX}").write_text('{"weight_map": {}}'), f"shards/{INDEX} must list the"),
    "index without": (lambda: Path(f"shards/{INDEX}").write_text("{}"), f"shards/{INDEX} is no index of safetensors"),
    "absolute": (list_at("/etc/passwd"), f"shards/{INDEX}: /etc/passwd must be a file below shards; "),
    "above": (list_at("../one/model.safetensors"), f"shards/{INDEX}: ../one/model.safetensors must be a file below"),
    "link": (link_out(LAST), f"shards/{INDEX}: {LAST} is a link that leads out of the folder; copy the folder"),
    "config's link": (link_out("config.json"), "shards/config.json is a link that leads out of the folder; copy"),
    "tokenizer's link": (link_out("tokenizer.json"), "shards/tokenizer.json is a link that leads out of the folder;"),
    "both": (lambda: shutil.copy(f"shards/{LAST}", f"shards/{ONE_FILE}"), f"HF_DIR=shards holds both {ONE_FILE} and "),
}


@pytest.mark.parametrize("case", SHARDS)
def test_a_shard_or_an_index_that_is_wrong(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, start = SHARDS[case]
    damage()
    (line,) = refused(capsys, "shards")
    assert line.startswith(start)


def test_an_index_that_lists_what_its_shard_lacks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the other way round: each side has its line."""
    listed = json.loads(Path(f"shards/{INDEX}").read_text())["weight_map"]
    other = next(name for name, file in listed.items() if file == FIRST)
    edit(f"shards/{INDEX}", lambda content: content["weight_map"].update({other: LAST}))
    unlisted, missing = refused(capsys, "shards")
    assert unlisted == f"shards/{FIRST} holds {other}, which {INDEX} does not list there; download the model again"
    assert (
        missing == f"shards/{LAST} must hold {other}, which {INDEX} lists there, and lacks it; download the model again"
    )


def test_a_link_within_the_folder_is_followed(here: Path) -> None:
    Path("shards/blob").mkdir()
    Path(f"shards/{LAST}").rename("shards/blob/1")
    Path(f"shards/{LAST}").symlink_to("blob/1")
    assert main(["import", "shards", "out"]) == 0


def swap_dtype(dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)})


def poke(value: float) -> Callable[[dict[str, Tensor]], None]:
    def do(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"][-1, -1] = value

    return do


TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "shape": (
        lambda tensors: tensors.update({NORM: torch.ones(33)}),
        f"one/{ONE_FILE}: {NORM} must be [32] by config.json, and is [33]; ",
    ),
    "transposed": (
        lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].T.contiguous()}),
        f"one/{ONE_FILE}: lm_head.weight must be [257, 32] by config.json, and is [32, 257]; ",
    ),
    "an expert's shape": (
        lambda tensors: tensors.update({"model.layers.1.mlp.experts.3.up_proj.weight": torch.ones(24, 31)}),
        f"one/{ONE_FILE}: model.layers.1.mlp.experts.3.up_proj.weight must be [24, 32] by config.json, and is [24, 31]",
    ),
    "int8": (swap_dtype(torch.int8), f"one/{ONE_FILE}: {NORM} must be F32, BF16, F16, and is I8; convert the model"),
    "int64": (swap_dtype(torch.int64), f"one/{ONE_FILE}: {NORM} must be F32, BF16, F16, and is I64; convert"),
    "fp8": (swap_dtype(torch.float8_e4m3fn), f"one/{ONE_FILE}: {NORM} must be F32, BF16, F16, and is F8_E4M3; "),
    "fp64": (swap_dtype(torch.float64), f"one/{ONE_FILE}: {NORM} must be F32, BF16, F16, and is F64; convert"),
    "missing": (lambda tensors: tensors.pop(NORM), f"HF_DIR=one must hold {NORM} [32], and no file does; download"),
    "missing expert": (
        lambda tensors: tensors.pop("model.layers.1.mlp.experts.5.up_proj.weight"),
        "HF_DIR=one must hold model.layers.1.mlp.experts.5.up_proj.weight [24, 32], and no file does; download",
    ),
    "unexpected": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(32)}),
        f"one/{ONE_FILE}: model.layers.0.self_attn.o_proj.bias is no tensor of this model, and would not be read; ",
    ),
    "an expert too many": (
        lambda tensors: tensors.update({"model.layers.1.mlp.experts.6.up_proj.weight": torch.ones(24, 32)}),
        f"one/{ONE_FILE}: model.layers.1.mlp.experts.6.up_proj.weight is no tensor of this model, and would not be",
    ),
    "further tokens": (
        lambda tensors: tensors.update({f"model.layers.2.{name}": torch.ones(3) for name in "abc"}),
        "HF_DIR=one holds model.layers.2 (3 tensors), and num_hidden_layers=2; a module that predicts further tokens",
    ),
    "nan": (
        poke(float("nan")),
        f"one/{ONE_FILE}: model.embed_tokens.weight must hold finite numbers, and holds NaN or",
    ),
    "infinity": (poke(float("inf")), f"one/{ONE_FILE}: model.embed_tokens.weight must hold finite numbers, and holds"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_is_wrong(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, start = TENSORS[case]
    rewrite("one", change)
    (line,) = refused(capsys, "one")
    assert line.startswith(start)


def test_a_tied_head_that_is_not_the_embedding(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit("one/config.json", lambda content: content.update(tie_word_embeddings=True))
    (line,) = refused(capsys, "one")
    assert line.startswith(
        f"one/{ONE_FILE}: lm_head.weight must be equal to model.embed_tokens.weight, since config.json"
    )
    rewrite("one", lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert main(["import", "one", "out"]) == 0


def test_of_very_many_problems_the_first_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit("one/config.json", lambda content: content.update(num_hidden_layers=9000, n_routed_experts=60_000))
    lines = refused(capsys, "one")
    assert len(lines) == MOST_PROBLEMS + 1
    assert "experts.6.gate_proj.weight" in lines[0] and lines[-1] == "and more such problems"


def as_pickles() -> None:
    Path("one/model.safetensors").rename("one/pytorch_model.bin")


def break_tokenizer() -> None:
    edit("one/tokenizer_config.json", lambda content: content.update(auto_map={"AutoTokenizer": ["x.T", None]}))


def without_eos() -> None:
    edit("one/tokenizer_config.json", lambda content: content.pop("eos_token"))


def shrink_vocabulary() -> None:
    edit("one/config.json", lambda content: content.update(vocab_size=200))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    rewrite("one", lambda tensors: tensors.update({name: tensors[name][:200].contiguous() for name in names}))


FOLDERS: dict[str, tuple[Callable[[], object], list[str], str]] = {
    "absent": (lambda: None, ["nothing", "out"], "HF_DIR=nothing is not a folder; give one with config.json"),
    "a file": (lambda: None, ["one/config.json", "out"], "HF_DIR=one/config.json is not a folder; "),
    "a hub's name": (lambda: None, ["hf://x/y", "out"], "HF_DIR=hf://x/y is not a folder; "),
    "no config": (
        lambda: Path("one/config.json").unlink(),
        ["one", "out"],
        "HF_DIR=one must hold config.json, and has",
    ),
    "pickles": (
        as_pickles,
        ["one", "out"],
        "HF_DIR=one holds pickled weights (pytorch_model.bin), which run code when",
    ),
    "no weights": (
        lambda: Path(f"one/{ONE_FILE}").unlink(),
        ["one", "out"],
        "HF_DIR=one must hold model.safetensors or",
    ),
    "tokenizer's code": (
        break_tokenizer,
        ["one", "out"],
        "HF_DIR=one: its tokenizer: one/tokenizer_config.json names code",
    ),
    "no end of text": (without_eos, ["one", "out"], "HF_DIR=one: its tokenizer has no eos_token, which ends each"),
    "small vocabulary": (
        shrink_vocabulary,
        ["one", "out"],
        "HF_DIR=one: its tokenizer has 257 ids, but vocab_size=200 in config.json is smaller; ",
    ),
    "occupied": (lambda: None, ["one", "shards"], "OUT=shards exists and is not an empty folder, and nothing is over"),
    "itself": (lambda: None, ["one", "one"], "OUT=one exists and is not an empty folder, and nothing is"),
    "within": (lambda: None, ["one", "one/run"], "OUT=one/run must not be in HF_DIR=one, which is only read; "),
    "below a file": (lambda: None, ["one", "one/../shards/config.json/x"], "OUT=one/../shards/config.json/x must be a"),
    "a URL": (lambda: None, ["one", "s3://bucket/x"], "OUT=s3://bucket/x must be a folder on a file system; give"),
    "above a new one": (lambda: None, ["one", "new/.."], "OUT=new/.. must end in the name of a new folder; give"),
    "a variable": (lambda: None, ["one", "$RUNS/x"], "OUT=$RUNS/x must be written out, since variables are not"),
    "unprintable": (lambda: None, ["one", "a\x1b[2Jb"], "OUT=a\\x1b[2Jb must be a path; give another path"),
    "a NUL": (lambda: None, ["one", "a\0b"], "OUT=a\\x00b must be a path; give another path"),
    "long": (lambda: None, ["one", "x" * 300], f"OUT={'x' * 300} must have names of at most 255 bytes"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_cannot_be(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, words, start = FOLDERS[case]
    prepare()
    (line,) = refused(capsys, *words)
    assert line.startswith(start)


def test_a_folder_that_may_not_be_written_to(here: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("data.places.os.access", lambda _, mode: mode != os.W_OK)
    (line,) = refused(capsys, "one")
    assert line.startswith("OUT=out must be a folder that can be written to, but ")


def test_a_full_disk(here: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    usage = shutil.disk_usage(here)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    (line,) = refused(capsys, "one", "new/out")
    assert line.startswith("OUT=new/out needs 192.9 KiB, but the disk has 1000 bytes free; give a path on another disk")


def test_a_disk_that_fills_up_is_the_folders(here: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the one of TMPDIR, where the tokenizer's files are made."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("launcher.importing.run.write_attachments", full)
    assert main(["import", "one", "out"]) == 1
    told = f"{here / 'out'}: No space left on device; free some space, or choose another disk\n"
    assert capsys.readouterr().err == told and not Path("out").exists()


def test_planted_interruption_leaves_nothing(here: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.importing.run.write_attachments", interrupted)
    before = sorted(here.iterdir())
    assert main(["import", "one", "out"]) == 130
    assert sorted(here.iterdir()) == before


def test_an_empty_folder_is_filled_and_a_stray_file_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    shutil.copy(f"shards/{LAST}", "shards/extra.safetensors")
    assert main(["import", "shards", "out"]) == 0
    assert capsys.readouterr().err == "shards/extra.safetensors is not one of the model's files and is not read\n"
    assert {path.name for path in here.iterdir()} == {"one", "shards", "out"}
