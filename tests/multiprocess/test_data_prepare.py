"""Preparation with real processes: the same bytes whatever the workers, the kills and the shares."""

import contextlib
import errno
import gzip
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data.config import DataConfig, SourceConfig
from data.dataset import open_dataset
from data.errors import DataError
from data.hub import open_hub
from data.manifest import read_source_manifest
from data.prepare import prepare
from data.prepared import Prepared, find_prepared, verify
from data.tokenfile import TokenFile
from data.tokenizer import load_fast, save_tokenizer, train_bpe
from data.workers import run_in_processes

VOCAB = 300
WORDS = ("the", "table", "is", "round", "and", "every", "seat", "at", "it", "equal", "layout", "trains", "model")


def make_documents(n: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"{i}: " + " ".join(draw.choices(WORDS, k=draw.randint(5, 60))) + "\n" for i in range(n)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    save_tokenizer(train_bpe(make_documents(50), VOCAB), folder)
    return str(folder)


def write_jsonl(path: Path, documents: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "n": i}) + "\n" for i, text in enumerate(documents)))
    return path


def config_of(path: Path | str, tokenizer: str | None, token_dir: Path, **changes) -> DataConfig:
    fields = {"heldout_fraction": 0.2, "shard_bytes": 4000, "workers": 1, "seq_len": 16} | changes
    source = {name: fields.pop(name) for name in ("exclude", "text_key", "weight", "subset") if name in fields}
    sources = (SourceConfig(path=str(path), **source),)
    return DataConfig(sources=sources, tokenizer=tokenizer, token_dir=str(token_dir), **fields)


def prepared(config: DataConfig, **options) -> Prepared:
    result = prepare(config, vocab_size=VOCAB, **options)
    assert result is not None
    return result


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def texts_of(result: Prepared, split: str) -> list[str]:
    """The documents of a split, decoded; checks that each ends with end of text."""
    assert result.tokenizer is not None
    fast = load_fast(result.tokenizer)
    texts = []
    for prefix in result.sources[0].prefixes(split):
        file = TokenFile(prefix)
        for ids in np.split(file.tokens, file.all_starts()[1:]):
            assert ids[-1] == fast.token_to_id("<|endoftext|>")
            texts.append(fast.decode(ids[:-1].tolist(), skip_special_tokens=False))
    return texts


def test_every_document_arrives_once(tmp_path: Path, tokenizer: str) -> None:
    documents = [*make_documents(200), "ends in <|endoftext|> written out", "naïve café ☕\n", "surrogate \ud800 alone"]
    config = config_of(write_jsonl(tmp_path / "a.jsonl", documents), tokenizer, tmp_path / "t")
    seen: list[tuple[int, int, int, int]] = []
    result = prepared(config, progress=lambda *numbers: seen.append(numbers))
    train, heldout = texts_of(result, "train"), texts_of(result, "heldout")
    expected = [*documents[:-1], "surrogate ? alone"]
    assert sorted(train + heldout) == sorted(expected)
    assert [text for text in expected if text in set(train)] == train  # in the order of the input
    assert 20 <= len(heldout) <= 60
    manifest = result.sources[0].manifest
    assert manifest is not None
    assert len(manifest.train) > 5
    size = (tmp_path / "a.jsonl").stat().st_size
    assert seen[-1] == (size, size, len(documents), sum(file.n_tokens for file in manifest.files()))
    assert seen == sorted(seen)
    largest = max(int(TokenFile(p).tokens.max()) for s in ("train", "heldout") for p in result.sources[0].prefixes(s))
    assert manifest.largest_id == largest
    assert verify(result) == []
    assert find_prepared(config, VOCAB) == result
    assert not list((tmp_path / "t").rglob("*partial*"))


def test_copies_of_a_document_stay_on_one_side(tmp_path: Path, tokenizer: str) -> None:
    documents = make_documents(60) * 3
    result = prepared(config_of(write_jsonl(tmp_path / "a.jsonl", documents), tokenizer, tmp_path / "t"))
    assert not set(texts_of(result, "train")) & set(texts_of(result, "heldout"))


def test_workers_do_not_change_a_byte(tmp_path: Path, tokenizer: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(300))
    for workers in (1, 2, 3):
        prepared(config_of(path, tokenizer, tmp_path / f"t{workers}", workers=workers))
    assert contents(tmp_path / "t1") == contents(tmp_path / "t2") == contents(tmp_path / "t3")


def test_shares_together_do_the_whole(tmp_path: Path, tokenizer: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(300))
    config = config_of(path, tokenizer, tmp_path / "shared")
    assert [prepare(config, vocab_size=VOCAB, task=(k, 3)) for k in (2, 0)] == [None, None]
    assert find_prepared(config, VOCAB) is None
    assert prepare(config, vocab_size=VOCAB, task=(1, 3)) is not None
    prepared(config_of(path, tokenizer, tmp_path / "whole"))
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")


PREPARE_SCRIPT = """
import json, sys
from data.config import DataConfig, SourceConfig
from data.prepare import prepare
if __name__ == "__main__":
    tree = json.loads(sys.argv[1])
    sources = tuple(SourceConfig(**{**s, "exclude": tuple(s["exclude"])}) for s in tree.pop("sources"))
    def progress(*numbers):
        print(*numbers, flush=True)
    prepare(DataConfig(sources=sources, **tree), vocab_size=300, progress=progress)
"""


def test_killed_and_started_again(tmp_path: Path, tokenizer: str) -> None:
    """SIGKILL the parent in the middle, three times: its workers end too, and the bytes come out the same."""
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(6000))
    whole = config_of(path, tokenizer, tmp_path / "whole", shard_bytes=50_000, workers=2)
    prepared(whole)
    config = replace(whole, token_dir=str(tmp_path / "killed"))
    script = tmp_path / "script.py"
    script.write_text(PREPARE_SCRIPT)
    kept = []
    for _ in range(3):
        kept.append(_kill_midway([sys.executable, str(script), json.dumps(asdict(config))]))
        folder = next(p for p in Path(config.token_dir).iterdir() if p.name.startswith("a-jsonl"))
        assert read_source_manifest(folder) is None
        assert find_prepared(config, VOCAB) is None
    assert kept == sorted(kept)  # finished shards are kept: each start reports them at once
    assert kept[-1] > 0
    prepared(config)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def _kill_midway(command: list[str]) -> int:
    """Starts, kills once new work is reported, waits for its processes to end; the bytes reported as done at first."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    first = int(process.stdout.readline().split()[0])
    for _ in range(3):
        assert process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _group_lives(process.pid):
        time.sleep(0.05)
    assert not _group_lives(process.pid), "workers outlived their parent"
    process.stdout.close()
    return first


def _group_lives(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def test_leftovers_of_a_killed_process_are_not_mistaken(tmp_path: Path, tokenizer: str) -> None:
    """A token file without its record, a torn record, an abandoned partial file: all are written again or deleted."""
    config = config_of(write_jsonl(tmp_path / "a.jsonl", make_documents(100)), tokenizer, tmp_path / "t")
    folder = prepared(config).sources[0].path
    before = contents(tmp_path / "t")
    (folder / "manifest.json").unlink()
    (folder / "shard-00001.json").write_text('{"number": 1, ')
    (folder / "shard-00002.json").unlink()
    (folder / "train-00002.bin").write_bytes(b"torn")
    (folder / "train-00003.idx").write_bytes(b"torn")
    (folder / f"train-00004.bin.partial-{os.uname().nodename}-999999999").write_bytes(b"torn")
    prepared(config)
    assert contents(tmp_path / "t") == before


@pytest.mark.parametrize(
    ("fraction", "n", "expected"), [(1e-9, 40, (39, 1)), (0.999999, 40, (1, 39)), (0.5, 1, (1, 0))]
)
def test_no_split_is_empty(tmp_path: Path, tokenizer: str, fraction: float, n: int, expected: tuple[int, int]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(n))
    folders = []
    for workers in (1, 2):
        config = config_of(path, tokenizer, tmp_path / f"t{workers}", heldout_fraction=fraction, workers=workers)
        result = prepared(config)
        assert (len(texts_of(result, "train")), len(texts_of(result, "heldout"))) == expected
        assert prepared(config) == result
        folders.append(contents(tmp_path / f"t{workers}"))
    assert folders[0] == folders[1]


def test_identical_documents_still_fill_both_splits(tmp_path: Path, tokenizer: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["the same"] * 5)
    result = prepared(config_of(path, tokenizer, tmp_path / "t", heldout_fraction=0.5))
    assert {len(texts_of(result, "train")), len(texts_of(result, "heldout"))} == {1, 4}


def test_no_heldout_when_none_is_asked_for(tmp_path: Path, tokenizer: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    result = prepared(config_of(path, tokenizer, tmp_path / "t", heldout_fraction=0.0))
    assert texts_of(result, "train") == make_documents(30)
    assert result.sources[0].prefixes("heldout") == []


def _write_parquet(path: Path, documents: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), path, row_group_size=7)


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": lambda p, d: p.write_bytes(gzip.compress(write_jsonl(p, d).read_bytes())),
    "a.jsonl.zst": lambda p, d: p.write_bytes(zstandard.compress(write_jsonl(p, d).read_bytes())),
    "a.parquet": _write_parquet,
    "hf": lambda p, d: (
        p.mkdir(),
        _write_parquet(p / "one.parquet", d[:30]),
        _write_parquet(p / "two.parquet", d[30:]),
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_source_gives_the_same_documents(tmp_path: Path, tokenizer: str, name: str) -> None:
    documents = make_documents(60)
    WRITERS[name](tmp_path / name, documents)
    path = f"hf://{tmp_path / name}" if name == "hf" else tmp_path / name
    config = config_of(path, tokenizer, tmp_path / "t", heldout_fraction=0.0, shard_bytes=1000)
    result = prepared(config)
    assert texts_of(result, "train") == documents
    assert find_prepared(config, VOCAB) == result


def test_text_files_folders_and_excludes(tmp_path: Path, tokenizer: str) -> None:
    for name, text in {
        "a.txt": "first",
        "b/c.py": "second",
        "b/d.txt": "",
        "b/skip/e.txt": "third",
        ".h": "no",
    }.items():
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_text(text)
    config = config_of(tmp_path / "corpus", tokenizer, tmp_path / "t", heldout_fraction=0.0, exclude=("**/skip/**",))
    assert texts_of(prepared(config), "train") == ["first", "second"]


def test_a_text_file_larger_than_a_shard_is_cut_at_lines(tmp_path: Path, tokenizer: str) -> None:
    text = "".join(make_documents(100))
    (tmp_path / "a.txt").write_text(text)
    parts = texts_of(prepared(config_of(tmp_path / "a.txt", tokenizer, tmp_path / "t", heldout_fraction=0.0)), "train")
    assert "".join(parts) == text
    assert len(parts) > 3
    assert all(part.endswith("\n") for part in parts)


def test_long_documents_are_tokenized_in_pieces(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = make_documents(40)
    path = write_jsonl(tmp_path / "a.jsonl", ["".join(documents), "x" * 5000])
    config = config_of(path, tokenizer, tmp_path / "t", heldout_fraction=0.0, shard_bytes=10**6)
    assert texts_of(prepared(config), "train") == ["".join(documents), "x" * 5000]
    from data import shardwriter

    monkeypatch.setattr(shardwriter, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(shardwriter, "BATCH_CHARACTERS", 150)
    pieces = list(shardwriter._pieces("ab\n" * 200))
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece for piece, _ in pieces) == "ab\n" * 200


def test_another_setting_is_another_folder(tmp_path: Path, tokenizer: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    config = config_of(path, tokenizer, tmp_path / "t")
    changes = [{}, {"heldout_fraction": 0.3}, {"shard_bytes": 2000}, {"seq_len": 99, "workers": 2}]
    folders = [prepared(replace(config, **change)).sources[0].path for change in changes]
    assert len(set(folders[:3])) == 3
    assert folders[3] == folders[0]  # nothing that fixes the tokens


def test_changed_token_files_are_refused(tmp_path: Path, tokenizer: str) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", make_documents(100)), tokenizer, tmp_path / "t")
    result = prepared(config)
    path = result.sources[0].path / "train-00001.bin"
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert len(verify(result)) == 1
    assert str(path) in verify(result)[0]
    open_dataset(config, seed=0, vocab_size=VOCAB, split="train")  # sizes only: opening must stay cheap
    path.write_bytes(data + b"\x00\x00")
    with pytest.raises(DataError, match=r"train-00001.bin has \d+ bytes but the manifest records \d+ bytes; remove"):
        open_dataset(config, seed=0, vocab_size=VOCAB, split="train")
    path.unlink()
    with pytest.raises(DataError, match=r"train-00001.bin is missing"):
        open_dataset(config, seed=0, vocab_size=VOCAB, split="train")


def test_a_changed_corpus_is_refused_and_a_vanished_one_is_not_missed(tmp_path: Path, tokenizer: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(30))
    config = config_of(path, tokenizer, tmp_path / "t")
    result = prepared(config)
    data = path.read_bytes()
    path.write_bytes(data + b'{"text": "more"}\n')
    for call in (find_prepared, lambda c, v: prepare(c, vocab_size=v)):
        with pytest.raises(
            DataError, match=r"data.sources\[0\].path=.*a.jsonl.* differ.*; remove .* and prepare again"
        ):
            call(config, VOCAB)
    path.unlink()
    assert find_prepared(config, VOCAB) == result
    assert prepared(config) == result


def test_datasets_smaller_vocabulary_is_refused_at_opening(tmp_path: Path, tokenizer: str) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", make_documents(30)), tokenizer, tmp_path / "t")
    prepared(config)
    with pytest.raises(DataError, match=r"model.vocab_size=100 is smaller than the largest token id, \d+, in "):
        open_dataset(config, seed=0, vocab_size=100, split="train")


def test_heldout_split_is_read_in_plain_order(tmp_path: Path, tokenizer: str) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", make_documents(100)), tokenizer, tmp_path / "t")
    result = prepared(config)
    dataset = open_dataset(config, seed=5, vocab_size=VOCAB, split="heldout")
    first = TokenFile(result.sources[0].prefixes("heldout")[0])
    np.testing.assert_array_equal(dataset.read(np.arange(1)).tokens_BS[0], first.tokens[:16])
    assert dataset.n_samples > 10


REFUSALS = {
    "empty file": ("a.txt", b"", {}, r"data.sources\[0\].path='.*a.txt' holds no text"),
    "blank jsonl": ("a.jsonl", b"\n\n", {}, "holds no text"),
    "empty documents": ("a.jsonl", b'{"text": ""}\n{"text": null}\n', {}, "holds no text"),
    "unknown key": ("a.jsonl", b'{"body": "x", "id": 1}\n', {}, r"text_key='text' is not in a record of .* body, id"),
    "unknown column": ("a.parquet", None, {"text_key": "body"}, r"text_key='body' is not in .* which holds text"),
    "not text": ("a.jsonl", b'{"text": 3}\n', {}, "must hold text but holds int"),
    "not JSON": (
        "a.jsonl",
        b'{"text": "x"}\nnonsense\n',
        {"shard_bytes": 10**6},
        r"a\.jsonl: line 2 \(from byte 14 on\) is not JSON",
    ),
    "a list": ("a.jsonl", b"[1]\n", {}, "holds no named fields"),
    "torn gzip": ("a.jsonl.gz", gzip.compress(os.urandom(999).hex().encode())[:500], {}, "cannot be read"),
    "not zstd": ("a.jsonl.zst", b"nonsense", {}, "cannot be read"),
    "a picture": ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", {}, r"a\.png is not text: .* exclude: \['\*\*/\*\.png'\]"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), {}, "is not text: it holds NUL bytes; convert it to UTF-8"),
    "Latin-1": ("a.txt", "café".encode("latin-1"), {}, "is not UTF-8: byte 3 is 0xe9 .*; convert it to UTF-8"),
    "not parquet": ("b.parquet", b"nonsense", {}, "is not a parquet file"),
    "all excluded": ("a.txt", b"x", {"exclude": ("**/*.txt",)}, "exclude leaves out"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_corpora_leave_nothing(tmp_path: Path, tokenizer: str, name: str) -> None:
    file, data, changes, expected = REFUSALS[name]
    if data is None:
        _write_parquet(tmp_path / file, ["x"])
    else:
        (tmp_path / file).write_bytes(data)
    for trained in (tokenizer, None):
        config = config_of(tmp_path / file, trained, tmp_path / "t", **changes)
        with pytest.raises(DataError, match=expected) as caught:
            prepare(config, vocab_size=VOCAB)
        assert len(str(caught.value).splitlines()) == 1
        assert not (tmp_path / "t").exists()


def test_one_picture_among_texts_is_found_before_anything_is_created(tmp_path: Path, tokenizer: str) -> None:
    for number in range(20):
        (tmp_path / f"in/{number}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"in/{number}.txt").write_text("text")
    for name in ("in/picture.png", "in/other"):
        (tmp_path / name).write_bytes(b"\0")
    config = config_of(tmp_path / "in", tokenizer, tmp_path / "t")
    with pytest.raises(
        DataError, match=r"in/other \(one of 2 such files of data\.sources\[0\]\) is not .*'\*\*/other'\]"
    ):
        prepare(config, vocab_size=VOCAB)
    assert not (tmp_path / "t").exists()
    excluding = config_of(tmp_path / "in", tokenizer, tmp_path / "t", exclude=("**/*.png", "**/other"))
    assert prepare(excluding, vocab_size=VOCAB) is not None


def test_a_worker_that_is_killed_is_reported() -> None:
    with pytest.raises(DataError, match=r"data\.workers=1 had a process killed"):
        run_in_processes(_kill_self, [()], 1, lambda *_: None)


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_room_is_refused_before_anything_is_created(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", make_documents(100)), tokenizer, tmp_path / "t")
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 1  # free blocks for users
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    with pytest.raises(
        DataError, match=r"data.token_dir=.* MB are free on its disk but .* are estimated to take .* MB; free"
    ):
        prepare(config, vocab_size=VOCAB)
    assert not (tmp_path / "t").exists()


def test_a_disk_that_fills_up_leaves_no_part_of_a_file(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from data.prepare import _begin_source, plan_sources
    from data.shardwriter import write_shard
    from data.tokenizer_setup import set_up_tokenizer
    from data.tokenwriter import TokenFileWriter

    config = config_of(write_jsonl(tmp_path / "a.jsonl", make_documents(100)), tokenizer, tmp_path / "t")
    plan = plan_sources(config, VOCAB)[0]
    task = _begin_source(config, plan, set_up_tokenizer(config, VOCAB, []))[0]

    def full(self, ids):
        if self.n_documents == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.n_documents += 1

    monkeypatch.setattr(TokenFileWriter, "add", full)
    with pytest.raises(DataError, match=r"data.token_dir=.* has no room left \(No space left on device\); free some"):
        write_shard(task, lambda *_: None, lambda: False)
    assert sorted(p.name for p in task.folder.iterdir()) == ["inputs.json"]


def test_one_broken_shard_stops_the_others_cleanly(tmp_path: Path, tokenizer: str) -> None:
    """What the others were writing is deleted before the refusal; what they had finished is kept and used."""
    lines = write_jsonl(tmp_path / "a.jsonl", make_documents(3000)).read_text().splitlines()
    broken = [*lines[:1500], "nonsense", *lines[1500:]]
    (tmp_path / "a.jsonl").write_text("\n".join(broken))
    config = config_of(tmp_path / "a.jsonl", tokenizer, tmp_path / "t", shard_bytes=40_000, workers=2)
    with pytest.raises(DataError, match="is not JSON"):
        prepare(config, vocab_size=VOCAB)
    names = [path.name for path in (tmp_path / "t").rglob("*")]
    assert not [name for name in names if "partial" in name]
    assert "manifest.json" not in names
    files = {name.partition(".")[0].rpartition("-")[2] for name in names if name.endswith(".idx")}
    assert files == {name.partition(".")[0].rpartition("-")[2] for name in names if name.startswith("shard-")}


def test_hugging_face_mistakes(tmp_path: Path, tokenizer: str) -> None:
    folder = tmp_path / "d"
    WRITERS["hf"](folder, make_documents(40))
    cases = {f"hf://{tmp_path / 'none'}": {}, f"hf://{folder}": {"subset": "missing"}}
    for path, changes in cases.items():
        config = config_of(path, tokenizer, tmp_path / "t", **changes)
        with pytest.raises(DataError, match=r"data.sources\[0\].path=.*cannot be opened by datasets") as caught:
            prepare(config, vocab_size=VOCAB)
        assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "t").exists()


EVIL = """
open({marker!r}, "w").write("run")
from transformers import PreTrainedTokenizerFast as Evil
"""


def run_on_a_terminal(command: list[str], typed: bytes, **options) -> tuple[int, str]:
    """(exit code, all that is shown) of a command whose standard streams are one terminal, on which this is typed."""
    ours, theirs = pty.openpty()
    os.write(ours, typed)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **options)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the last process that had the terminal has ended
        while data := os.read(ours, 1 << 16):
            shown += data
    os.close(ours)
    return process.wait(timeout=60), shown.decode().removeprefix(typed.decode().replace("\n", "\r\n"))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_a_tokenizers_own_code_is_never_run_nor_asked_about(tmp_path: Path, tokenizer: str, file: str) -> None:
    """On a terminal, transformers would ask whether to run it, and the answer that is typed would be yes."""
    folder, marker = tmp_path / "evil", tmp_path / "marker"
    shutil.copytree(tokenizer, folder)
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    settings = folder / file
    tree = json.loads(settings.read_text()) if settings.exists() else {"model_type": "evil"}
    tree.pop("tokenizer_class", None)
    settings.write_text(json.dumps(tree | {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}))
    (tmp_path / "a.txt").write_text("text")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"name: x\nmodel: {{vocab_size: 512}}\ndata: {{tokenizer: {folder}, token_dir: {tmp_path}/t, "
        f"sources: [{{path: {tmp_path}/a.txt}}]}}\n"
    )
    code, shown = run_on_a_terminal([sys.executable, "-m", "launcher", "prepare", str(config)], b"y\ny\n")
    assert code == 2
    assert f"data.tokenizer='{folder}': {settings} names code to run under auto_map ([None, 'evil.Evil'])" in shown
    assert "[y/N]" not in shown
    assert "Traceback" not in shown
    assert not marker.exists()
    assert not (tmp_path / "t").exists()


def test_a_dataset_folder_runs_nothing_and_reads_nothing_outside_itself(tmp_path: Path) -> None:
    folder, secret = tmp_path / "d", tmp_path / "secret.txt"
    folder.mkdir()
    secret.write_text("private")
    (folder / "a.txt").write_text("text")
    source = SourceConfig(path=f"hf://{folder}")
    assert open_hub(source, "k").num_shards == 1
    for named in (str(secret), "../secret.txt", "http://127.0.0.1:9/x.txt"):
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {named}\n---\n")
        with pytest.raises(DataError, match=r"names .* outside it, as data|cannot be opened by datasets"):
            open_hub(source, "k")
    (folder / "README.md").unlink()
    (folder / "d.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(DataError, match=r"scripts are no longer supported, but found d\.py"):
        open_hub(source, "k")
    assert not (tmp_path / "ran").exists()
    (folder / "d.py").unlink()
    os.mkfifo(folder / "b.txt")
    with pytest.raises(DataError, match=r"k: .*b\.txt is a pipe, not a file"):
        open_hub(source, "k")
