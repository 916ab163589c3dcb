"""A checkpoint that somebody has tampered with, every hash made right: refused by name, in a line, by all commands."""

import json
import os
import shutil
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
import torch

from launcher.cli import main
from parallel.checkpoint.local import LocalFolder
from parallel.checkpoint.manifest import DamagedCheckpoint, read_manifest
from parallel.checkpoint.read import open_checkpoint
from parallel.checkpoint.safetensors_stream import chunks_of, write_tensors
from parallel.checkpoint.verify import examine
from sealed import SHARDS, body_of, cut_up, record_of, reseal, reseal_text, write_run

FIRST, SECOND = SHARDS
READERS = ("eval", "export", "generate", "inspect")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("written") / "run")


@pytest.fixture
def directory(written, tmp_path) -> Path:
    """The checkpoint of a run of its own."""
    run = shutil.copytree(written.parents[1], tmp_path / "run")
    return run / "checkpoints" / written.name


def ask(capsys, command: str, directory: Path) -> tuple[int, str, list[str]]:
    """Exit code, standard output and the lines of standard error of one command on the checkpoint."""
    out = directory.parents[2] / "out"
    arguments = {"export": [out], "generate": ["--prompt", "a"], "inspect": ["--text", "a"]}.get(command, [])
    words = ["checkpoint", command] if command in ("show", "verify") else [command]
    code = main([*words, str(directory), *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def assert_refused(capsys, directory: Path, named: str, readers: Sequence[str] = ("export",)) -> None:
    """No command takes it; each says why in one line that holds ``named``, and nothing is created."""
    before = sorted(directory.parents[2].rglob("*"))
    code, output, errors = ask(capsys, "verify", directory)
    assert code == 1 and output.startswith(f"{directory}: DAMAGED\n") and named in output
    for command in readers:
        code, output, errors = ask(capsys, command, directory)
        assert (code, output, len(errors)) == (2, "", 1), (command, errors)
        assert named in errors[0] and len(errors[0]) < 4000
    assert sorted(directory.parents[2].rglob("*")) == before


def test_the_checkpoint_itself_is_taken(capsys, directory):
    for command in ("show", "verify", "export", "generate"):
        assert ask(capsys, command, directory)[0] == 0, command
    assert examine(directory).problems == examine(directory).unlisted == []


def piece(body, **changes):
    """The first piece, changed."""
    body["pieces"][0] |= changes


def swap_key(mapping, old, new):
    mapping[new] = mapping.pop(old)


MANIFESTS = {
    "files lacks a shard": (lambda b: b["files"].pop(SECOND), f"{SECOND} holds pieces, and is not listed"),
    "files lacks all": (lambda b: b["files"].clear(), "is not listed"),
    "files is missing": (lambda b: b.pop("files"), "files: field required"),
    "an unknown field": (lambda b: b.update(more=1), "more=1"),
    "an unknown scalar": (lambda b: b["scalars"].update(more=1), "scalars.more"),
    "a scalar is missing": (lambda b: b["scalars"].pop("consumed"), "scalars.consumed: field required"),
    "a step of text": (lambda b: b.update(step="1"), "step=1"),
    "a step that is true": (lambda b: b.update(step=True), "step=True"),
    "a step with a fraction": (lambda b: b.update(step=1.0), "step=1.0"),
    "a negative count": (lambda b: b["scalars"].update(consumed=-1), "scalars.consumed=-1"),
    "a count that is NaN": (lambda b: b["scalars"].update(tokens=float("nan")), "scalars.tokens=nan"),
    "a loss scale that is NaN": (lambda b: b["scalars"].update(loss_scaler={"a": float("nan")}), "loss_scaler.a"),
    "a huge count": (lambda b: b["scalars"].update(tokens=10**40), "scalars.tokens="),
    "a count of 5,000 digits": (lambda b: b["scalars"].update(tokens=10**4200), "scalars.tokens="),
    "pieces is an object": (lambda b: b.update(pieces={}), "pieces"),
    "a piece without a key": (lambda b: b["pieces"][0].pop("key"), "pieces.0.key: field required"),
    "a tensor of 10^13 elements": (lambda b: b["tensors"].update({"embed.weight": [10**7, 10**6]}), "are missing"),
    "a certified tensor of 10^13 elements": (
        lambda b: (b["tensors"].update({"embed.weight": [10**7, 10**6]}), piece(b, shape=[10**7, 10**6])),
        f"{FIRST} is listed with",
    ),
    "a tensor more": (lambda b: b["tensors"].update(more=[1]), "more: not one of weight and buffer"),
    "a tensor of nine dims": (lambda b: b["tensors"].update(more=[1] * 9), "tensors.more"),
    "a box of two ranks": (lambda b: piece(b, shape=[257]), "lies outside"),
    "a shape with a zero": (lambda b: b["tensors"].update(more=[0]), "tensors.more.0=0"),
    "two pieces of the same bytes": (lambda b: piece(b, key=b["pieces"][1]["key"]), "is another piece's as well"),
    "boxes that overlap": (lambda b: b["pieces"].append({**b["pieces"][0], "key": "again"}), "overlap"),
    "a kind of a tensor that is none": (lambda b: b["kinds"]["weight"].append("none"), "weight of none"),
    "a tensor twice in a kind": (lambda b: b["kinds"]["weight"].append("embed.weight"), "weight of embed.weight"),
    "a tensor of another name": (lambda b: swap_key(b["tensors"], "embed.weight", "x"), "weight of embed.weight"),
    "control characters": (lambda b: swap_key(b["tensors"], "embed.weight", "\x1b[2J[red]x"), "\\x1b[2J[red]x"),
    "half a character": (lambda b: swap_key(b["tensors"], "embed.weight", "\ud800"), "hex escape"),
    **{
        f"a file named {name!r}": (lambda b, name=name: (swap_key(b["files"], FIRST, name), piece(b, file=name)), rule)
        for name, rule in {
            "/etc/passwd": "below the checkpoint's folder",
            "../config.yaml": "below the checkpoint's folder",
            "a" * 300: "names of at most 255 bytes",
            "tokenizer/" + "é" * 128: "names of at most 255 bytes",
            "tokenizer/../../config.yaml": "below the checkpoint's folder",
            "a\0b": "printable",
            "": "at least 1 character",
            "./" + FIRST: "below the checkpoint's folder",
            "C:\\x": "below the checkpoint's folder",
            "manifest.json": "must not be a manifest",
            "x" * 600: "at most 500",
            "\u202e" + FIRST: "printable",
        }.items()
    },
    "spellings of one name": (
        lambda b: b["files"].update({FIRST.upper(): b["files"][FIRST]}),
        "that a file system may take for one",
    ),
    "a file below a file": (
        lambda b: b["files"].update({f"{FIRST}/x": b["files"][FIRST]}),
        "which is listed as a file",
    ),
    "a hash of 31 digits": (lambda b: b["files"][FIRST].update(xxh3_128="0" * 31), "xxh3_128"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_planted_resealed_manifests_are_refused_by_name(capsys, directory, case):
    change, named = MANIFESTS[case]
    reseal(directory, change)
    assert_refused(capsys, directory, named, READERS if case.startswith("files lacks") else ["export"])
    code, output, errors = ask(capsys, "show", directory)
    assert (code, output, len(errors)) == (1, "", 1) and named in errors[0]


def run(body, *changed, cut=0):
    """The first run of a cut, changed."""
    body["cuts"][cut]["runs"][0] = list(changed)


CUTS = {
    "a range of too few elements": (lambda b: run(b, 1, 100, 0, 1), "has 2056 elements, and its ranges 100"),
    "no range": (lambda b: b["cuts"][0].update(runs=[]), "has 2056 elements, and its ranges 0"),
    "2^61 ranges": (
        lambda b: (
            (b["tensors"].update({"embed.weight": [2**61]}), b["cuts"][0].update(start=[0], shape=[2**61]))
            and run(b, 2**61, 1, 0, 1)
        ),
        "a run of 2305843009213693952 ranges from shard 0 on, 1 apart, is not one of 2 shards",
    ),
    "a shard that there is not": (lambda b: run(b, 1, 2056, 2, 1), "from shard 2 on, 1 apart, is not one of 2 shards"),
    "shards below the first": (lambda b: run(b, 2, 1028, 0, -1), "from shard 0 on, -1 apart"),
    "shards far beyond the last": (lambda b: run(b, 2, 1028, 0, 2**62), "is not one of 2 shards"),
    "ranges that share a place": (lambda b: run(b, 2, 1028, 0, 0), "from shard 0 on, 0 apart"),
    "a negative shard": (lambda b: run(b, 1, 2056, -1, 1), "cuts.0.runs.0.2=-1"),
    "a run of three numbers": (lambda b: run(b, 1, 2056, 0), "cuts.0.runs.0.3: field required"),
    "a cut twice": (lambda b: b["cuts"].append(b["cuts"][0]), "weight of embed.weight: boxes"),
    "a kind twice": (lambda b: b["cuts"][0].update(kinds=["weight"] * 2), "weight of embed.weight: boxes"),
    "a cut less": (lambda b: b["cuts"].pop(0), "weight of embed.weight: 2056 of 2056 elements are missing"),
    "no kind": (lambda b: b["cuts"][0].update(kinds=[]), "cuts.0.kinds"),
    "a kind that reads as another's name": (lambda b: b["cuts"][0].update(kinds=["weight/a"]), "must hold no /"),
    "a box outside": (lambda b: b["cuts"][0].update(start=[1, 0]), "lies outside shape"),
    "a shard twice": (lambda b: b["shards"].append(FIRST), f"{FIRST} is among the shards 2 times"),
    "a shard without its hash": (lambda b: b["files"].pop(SECOND), f"{SECOND} holds pieces, and is not listed"),
    "a shard outside": (lambda b: b["shards"].__setitem__(0, "../" + FIRST), "below the checkpoint's folder"),
    "a shard that is too small": (lambda b: b["files"][FIRST].update(bytes=100), f"{FIRST} is listed with 100 bytes"),
    "a piece among the ranges": (
        lambda b: (
            b["pieces"].append(
                {
                    "kind": "weight",
                    "name": "embed.weight",
                    "start": [0, 0],
                    "shape": [257, 8],
                    "file": FIRST,
                    "key": "w",
                }
            ),
            b["cuts"].pop(0),
        ),
        f"{FIRST} holds pieces, and is among the shards of the cuts",
    ),
    "cuts in an earlier format": (lambda b: b.update(format=2), "format=2: has neither cuts nor shards"),
    "a later format": (lambda b: b.update(format=4), "format=4"),
}


@pytest.mark.parametrize("case", CUTS)
def test_planted_resealed_cuts_are_refused_by_name(capsys, directory, case):
    change, named = CUTS[case]
    reseal(directory, cut_up)
    reseal(directory, change)
    assert_refused(capsys, directory, named)


def test_more_ranges_than_a_job_makes_are_refused(directory, monkeypatch):
    reseal(directory, cut_up)
    monkeypatch.setattr("parallel.checkpoint.manifest.MOST_RANGES", 5)
    with pytest.raises(DamagedCheckpoint, match=r"the cuts have \d+ ranges, more than 5"):
        read_manifest(directory)


def test_cuts_are_taken_and_their_shards_compared(capsys, directory):
    """What a cut says is what lies in the shard, or verify tells and reading refuses."""
    reseal(directory, cut_up)
    for command in ("show", "verify", "export", "generate"):
        assert ask(capsys, command, directory)[0] == 0, command
    moved = next(number for number, cut in enumerate(body_of(directory)["cuts"]) if cut["runs"] == [[1, 8, 0, 1]])
    name = body_of(directory)["cuts"][moved]["name"]
    reseal(directory, lambda body: run(body, 1, 8, 1, 1, cut=moved))
    assert examine(directory).problems == [
        f"{directory / FIRST} holds weight/{name}/0, which the manifest does not name",
        f"{directory / SECOND} lacks weight of {name} at [0]",
    ]
    checkpoint = open_checkpoint(directory)
    with pytest.raises(DamagedCheckpoint, match=f"{SECOND} does not hold weight/{name}/0 as the manifest says"):
        checkpoint.read(name)


TEXTS = {
    "a key twice": (b'"step":1', b'"step":1,"step":1', "holds step twice"),
    "deep nesting": (b'"step":1', b'"step":' + b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
    "no UTF-8": (b'"step":1', b'"step":"\xff"', "is no JSON"),
    "many values": (b'"step":1', b'"step":[' + b"1," * 200_000 + b"1]", "more than 100,000 values"),
    "a large object": (
        b'"step":1',
        b'"step":{' + b",".join(b'"%d":1' % number for number in range(200_001)) + b"}",
        "object of 200,001 entries",
    ),
    "a large string": (b'"step":1', b'"step":"' + b"a" * (5 << 20) + b'"', "more than the 4194304 bytes"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_planted_resealed_texts_are_refused_by_name(directory, case, monkeypatch):
    old, new, named = TEXTS[case]
    monkeypatch.setattr("parallel.checkpoint.manifest.LARGEST_MANIFEST_BYTES", 4 << 20)
    if case == "many values":
        monkeypatch.setattr("parallel.checkpoint.schema.LARGEST_VALUES", 100_000)
    reseal_text(directory, old, new)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json ") as refused:
        read_manifest(directory)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def replace(path: Path, kind: str) -> None:
    """Puts something under the file's name that is no file of its own."""
    content = path.parent.parent / "elsewhere"
    path.rename(content) if kind != "a symbolic link to its folder" else None
    match kind:
        case "a symbolic link":
            path.symlink_to(content)
        case "a named pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a folder", "a device"])
@pytest.mark.parametrize("file", [SECOND, "manifest.json", "tokenizer/tokenizer.json", "config.yaml"])
def test_planted_links_pipes_and_folders_are_no_files(capsys, directory, file, kind):
    replace(directory / file, kind)
    assert_refused(capsys, directory, f"{directory / file} is a")


def test_planted_link_in_a_folders_place_is_refused(capsys, directory):
    (directory / "tokenizer").rename(directory.parent / "elsewhere")
    (directory / "tokenizer").symlink_to(directory.parent / "elsewhere")
    assert_refused(capsys, directory, "lies behind tokenizer, which is a symbolic link, not a folder")


def test_a_private_file_behind_a_link_is_not_exported(capsys, directory, tmp_path):
    """Listed with the right hash it is refused; not listed it is not read. A hard link is a file: its hash counts."""
    private, link = tmp_path / "private", directory / "tokenizer" / "extra.json"
    private.write_text("secret")
    link.symlink_to(private)
    reseal(directory, lambda body: body["files"].update({"tokenizer/extra.json": record_of(link)}))
    assert_refused(capsys, directory, "extra.json is a symbolic link")
    reseal(directory, lambda body: body["files"].pop("tokenizer/extra.json"))
    assert ask(capsys, "export", directory)[0] == 0
    assert "secret" not in "".join(path.read_text(errors="replace") for path in (tmp_path / "out").iterdir())
    shutil.rmtree(tmp_path / "out")
    link.unlink()
    link.hardlink_to(private)
    reseal(directory, lambda body: body["files"].update({"tokenizer/extra.json": {"bytes": 6, "xxh3_128": "0" * 32}}))
    assert_refused(capsys, directory, "extra.json does not match its hash")


def test_what_nobody_lists_is_not_read_and_verify_says_so(capsys, directory):
    (directory / "tokenizer" / "chat_template.jinja").write_text("not listed")
    (directory / "shard-00002.safetensors").write_bytes(b"not listed")
    code, output, _ = ask(capsys, "verify", directory)
    assert code == 0
    assert [line.split(" is not in")[0] for line in output.splitlines()[1:]] == [
        f"  note: {directory}/shard-00002.safetensors",
        f"  note: {directory}/tokenizer/chat_template.jinja",
    ]
    tokenizer = open_checkpoint(directory).tokenizer
    assert tokenizer is not None and not (tokenizer / "chat_template.jinja").exists()


def test_a_checkpoint_that_is_not_of_its_configs_model_is_refused(capsys, directory):
    config = directory.parents[1] / "config.yaml"
    config.write_text(config.read_text().replace("d_ff: 8", "d_ff: 16"))
    for command in READERS:
        code, _, (line,) = ask(capsys, command, directory)
        assert code == 2 and line.startswith(f"{config} must be the config that the checkpoint was trained with, and ")
        assert "has 8 x 8 layers.0." in line and "model has 16 x 8" in line


@pytest.mark.parametrize("header", [2**63, 100 << 20, 0])
def test_planted_lengths_of_a_shards_header(capsys, directory, header):
    with (directory / SECOND).open("r+b") as shard:
        shard.write(header.to_bytes(8, "little"))
    reseal(directory, lambda body: body["files"].update({SECOND: record_of(directory / SECOND)}))
    assert_refused_by_table(directory)


@pytest.mark.parametrize("rule", ["lacks weight of", "as [8, 8, 1], the manifest says [8, 8]", "does not name"])
def test_planted_table_of_a_shard_that_is_not_the_manifests(directory, rule):
    """Every hash and size is right, and each tensor by itself."""
    pieces = [piece for piece in read_manifest(directory).pieces if piece.file == SECOND]
    shapes = {piece.key: piece.shape for piece in pieces}
    changed = next(key for key, shape in shapes.items() if shape == (8, 8))
    match rule.split()[0]:
        case "lacks":
            del shapes[changed]
        case "as":
            shapes[changed] = (8, 8, 1)
        case _:
            shapes["weight/unknown/0"] = (8,)
    zeros = torch.zeros(sum(prod(shape) for shape in shapes.values()))
    record = write_tensors(LocalFolder(directory), SECOND, shapes, chunks_of(zeros))
    reseal(directory, lambda body: body["files"].update({SECOND: record}))
    (problem,) = examine(directory).problems
    assert str(directory / SECOND) in problem and rule in problem


def test_a_shard_that_ends_within_its_last_tensor_is_refused(directory):
    """Its size and hash are those that the manifest says."""
    (directory / SECOND).write_bytes((directory / SECOND).read_bytes()[:-4])
    reseal(directory, lambda body: body["files"].update({SECOND: record_of(directory / SECOND)}))
    assert_refused_by_table(directory)


def assert_refused_by_table(directory: Path) -> None:
    (problem,) = examine(directory).problems
    assert str(directory / SECOND) in problem
    checkpoint = open_checkpoint(directory)
    name = next(piece.name for piece in checkpoint.manifest.pieces if piece.file == SECOND)
    with pytest.raises(DamagedCheckpoint, match=SECOND):
        checkpoint.read(name)


@pytest.mark.parametrize("change", ["written to", "replaced", "deleted"])
def test_planted_change_between_check_and_reading_is_refused(directory, change):
    """Nothing is read of a file other than the one whose hash was compared."""
    checkpoint = open_checkpoint(directory)
    shard, name = directory / SECOND, next(p["name"] for p in body_of(directory)["pieces"] if p["file"] == SECOND)
    match change:
        case "written to":
            shard.write_bytes(shard.read_bytes())
        case "replaced":
            shutil.copy2(shard, shard.with_name("copy"))
            shard.with_name("copy").replace(shard)
        case _:
            shutil.rmtree(directory)
    with pytest.raises(DamagedCheckpoint, match=r"was replaced while|is missing"):
        checkpoint.read(name)


def test_a_folder_that_is_a_link_is_what_the_user_named(capsys, directory, tmp_path):
    (tmp_path / "latest").symlink_to(directory)
    for command in ("show", "verify"):
        assert main(["checkpoint", command, str(tmp_path / "latest")]) == 0
    capsys.readouterr()


TOKENIZERS = {
    "nested 100,000 deep": ("tokenizer.json", b"[" * 100_000 + b"]" * 100_000, "is not JSON that can be used"),
    "an object nested as deep": ("tokenizer.json", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is not JSON"),
    "nested within what Python reads": ("tokenizer.json", b'{"a":' * 900 + b"1" + b"}" * 900, "cannot be"),
    "nothing in it": ("tokenizer.json", b"{}", "cannot be"),
    "a list": ("tokenizer.json", b"[]", "must hold a JSON object but holds list"),
    "empty": ("tokenizer.json", b"", "is not JSON that can be used"),
    "no JSON": ("tokenizer.json", b"\x00\xff", "is not JSON that can be used"),
    "a number of 5,000 digits": ("tokenizer.json", b'{"a": ' + b"9" * 5000 + b"}", "is not JSON that can be used"),
    "code": ("tokenizer_config.json", b'{"auto_map": {"AutoTokenizer": ["x.Y", null]}}', "names code to run"),
    "code as text": ("tokenizer_config.json", b'{"auto_map": "x.Y"}', "names code to run"),
    "code of the model": ("config.json", b'{"auto_map": {"AutoTokenizer": "x--y.Z"}}', "names code to run"),
    "a config that is deep": ("tokenizer_config.json", b"[" * 100_000, "is not JSON that can be used"),
    "a config that is a number": ("tokenizer_config.json", b"1", "must hold a JSON object but holds int"),
}


def put_in(directory: Path, name: str, content: bytes) -> None:
    """Puts a file into the checkpoint's tokenizer, and lists it."""
    file = directory / "tokenizer" / name
    file.write_bytes(content)
    reseal(directory, lambda body: body["files"].update({f"tokenizer/{name}": record_of(file)}))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"[" * 100_000, "maximum recursion depth"),
        (b"{}", "missing"),
        (b'{"eos_id": "0", "n_ids": 257, "fingerprint": ""}', "eos_id='0' must be a token's id"),
        (b'{"eos_id": 257, "n_ids": 257, "fingerprint": ""}', "eos_id=257 must be a token's id, below n_ids=257"),
        (b'{"eos_id": 300, "n_ids": 301, "fingerprint": ""}', "has 301 ids, but model.vocab_size=257 is smaller"),
    ],
)
def test_what_is_recorded_of_a_tokenizer_is_checked_before_text_is_read(capsys, directory, tmp_path, content, named):
    put_in(directory, "roundtable.json", content)
    (tmp_path / "text.txt").write_text("some text\n")
    assert main(["eval", str(directory), "--text", str(tmp_path / "text.txt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"CHECKPOINT={directory}: its tokenizer") and named in line


def test_a_tokenizer_with_ids_that_its_model_does_not_know_is_refused(capsys, directory):
    tokenizer = json.loads((directory / "tokenizer/tokenizer.json").read_bytes())
    token = {"id": 257, "content": "<more>", "special": False, "normalized": False}
    tokenizer["added_tokens"].append(token | {"single_word": False, "lstrip": False, "rstrip": False})
    put_in(directory, "tokenizer.json", json.dumps(tokenizer).encode())
    code, output, (line,) = ask(capsys, "generate", directory)
    assert (code, output) == (2, "")
    assert line.startswith(f"CHECKPOINT={directory}: its tokenizer has 258 ids, but model.vocab_size=257 is smaller")


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_is_a_trap_is_refused_by_all_that_load_it(capsys, directory, tmp_path, case):
    name, content, named = TOKENIZERS[case]
    put_in(directory, name, content)
    (tmp_path / "text.txt").write_text("some text\n")
    before = sorted(tmp_path.rglob("*"))
    evaluated, inspected = ["eval", "--text", str(tmp_path / "text.txt")], ["inspect", "--text", "a"]
    for command in (["export", "out"], ["generate", "--prompt", "a"], evaluated, inspected):
        arguments = [str(tmp_path / "out") if word == "out" else word for word in command[1:]]
        code = main([command[0], str(directory), *arguments])
        captured = capsys.readouterr()
        errors = captured.err.splitlines()
        assert (code, captured.out, len(errors)) == (2, "", 1), (command, code, captured.err[-2000:])
        assert errors[0].startswith(f"CHECKPOINT={directory}: its tokenizer") and named in errors[0], errors
        assert len(errors[0]) < 1000 and "/tmp" not in errors[0].replace(str(directory), "")
        assert sorted(tmp_path.rglob("*")) == before
