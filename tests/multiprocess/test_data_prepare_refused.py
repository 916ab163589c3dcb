"""What preparation refuses, or cannot do: one line, and nothing new but what a second try can go on from."""

import contextlib
import dataclasses
import errno
import gzip
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import data.prepare
from data.cleaning.config import CleaningConfig
from data.config import SourceConfig
from data.errors import DataError
from data.hub import open_hub
from data.prepare import prepare
from data.workers import run_in_processes
from prepare_runs import VOCAB, WRITERS, config_of, make_documents, save_tiny_tokenizer, write_jsonl, write_parquet


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny")


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
        write_parquet(tmp_path / file, ["x"])
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


def test_cleaned_texts_need_room_beside_the_tokens(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", make_documents(100))
    plain = config_of(text, tokenizer, tmp_path / "t")
    tokens = os.path.getsize(text) / data.prepare.BYTES_PER_TOKEN * 2
    fields = list(os.statvfs(tmp_path))
    fields[1], fields[4] = 1, int(tokens + 150 * VOCAB)  # free bytes: for the tokens and their tokenizer alone
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    data.prepare.check_room(plain, data.prepare.plan_sources(plain, VOCAB), VOCAB)
    cleaned = dataclasses.replace(plain, cleaning=CleaningConfig(exact=True))
    with pytest.raises(DataError, match="are estimated to take"):
        data.prepare.check_room(cleaned, data.prepare.plan_sources(plain, VOCAB), VOCAB)


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

    def full(self, ids, is_target):
        if self.n_documents == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.n_documents += 1

    monkeypatch.setattr(TokenFileWriter, "add", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_shard(task, lambda *_: None, lambda: False)
    assert sorted(p.name for p in task.folder.iterdir()) == ["inputs.json"]

    def in_this_process(tasks, *_):
        write_shard(tasks[0], lambda *_: None, lambda: False)

    monkeypatch.setattr("data.prepare.write_shards", in_this_process)
    with pytest.raises(DataError, match=r"data.token_dir=.* has no room left \(No space left on device\); free some"):
        prepare(config, vocab_size=VOCAB)


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


def test_a_source_that_is_mended_after_a_refusal_is_no_other_corpus(tmp_path: Path, tokenizer: str) -> None:
    """What the source before it has finished is kept all the same."""
    write_jsonl(tmp_path / "a.jsonl", make_documents(20))
    mended = write_jsonl(tmp_path / "b.jsonl", make_documents(10)).read_text()
    (tmp_path / "b.jsonl").write_text(mended + "nonsense")
    config = config_of(tmp_path / "a.jsonl", tokenizer, tmp_path / "t", shard_bytes=10**6)
    config = dataclasses.replace(config, sources=(*config.sources, SourceConfig(path=str(tmp_path / "b.jsonl"))))
    with pytest.raises(DataError, match=r"b\.jsonl: line 11 .* is not JSON"):
        prepare(config, vocab_size=VOCAB)
    assert sorted(path.name.split("-")[0] for path in (tmp_path / "t").iterdir()) == ["a", "tokenizer"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").glob("a-*/*.bin")}
    (tmp_path / "b.jsonl").write_text(mended)
    assert prepare(config, vocab_size=VOCAB) is not None
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "t").glob("a-*/*.bin")} != {}


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
