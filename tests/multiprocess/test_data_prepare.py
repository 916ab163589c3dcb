"""Preparation with real processes: the same bytes whatever the workers, the kills and the shares."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from data.config import SourceConfig
from data.dataset import open_dataset
from data.errors import DataError
from data.hub import corpus_files
from data.manifest import read_source_manifest, write_json
from data.prepare import prepare
from data.prepared import check_inputs, find_prepared, inputs_tree, verify
from data.sources import InputFile
from data.tokenfile import TokenFile
from prepare_runs import (
    VOCAB,
    WRITERS,
    config_of,
    contents,
    make_documents,
    prepared,
    save_tiny_tokenizer,
    texts_of,
    write_jsonl,
    write_parquet,
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tiny")


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
    assert verify(config, result) == []
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


@pytest.mark.parametrize(("n_kills", "workers"), [(1, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_killed_and_started_again(tmp_path: Path, tokenizer: str, n_kills: int, workers: int) -> None:
    """SIGKILL the parent of two workers in the middle: they end too, and the bytes come out the same.

    ``workers`` make what is compared, and do what is left in the end.
    """
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(6000))
    whole = config_of(path, tokenizer, tmp_path / "whole", shard_bytes=50_000, workers=workers)
    prepared(whole)
    config = replace(whole, token_dir=str(tmp_path / "killed"), workers=2)
    script = tmp_path / "script.py"
    script.write_text(PREPARE_SCRIPT)
    kept: list[int] = []
    for _ in range(n_kills):
        kept.append(_kill_midway([sys.executable, str(script), json.dumps(asdict(config))]))
        folder = next(p for p in Path(config.token_dir).iterdir() if p.name.startswith("a-jsonl"))
        assert read_source_manifest(folder) is None
        assert find_prepared(config, VOCAB) is None
    seen: list[int] = []
    prepared(replace(config, workers=workers), progress=lambda done, *_: seen.append(done))
    kept.append(seen[0])
    assert kept == sorted(kept)  # finished shards are kept: each start reports them at once
    assert kept[-1] > 0
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


@pytest.mark.parametrize("delay", [0, 0.2])
def test_an_interrupt_while_workers_begin_needs_no_words(tmp_path: Path, tokenizer: str, delay: float) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(6000))
    data = asdict(config_of(path, tokenizer, tmp_path / "tokens", shard_bytes=20_000, workers=2))
    (tmp_path / "config.yaml").write_text(json.dumps({"name": "x", "model": {"vocab_size": VOCAB}, "data": data}))
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", "prepare", str(tmp_path / "config.yaml")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not _workers_of(process):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said = process.communicate(timeout=60)[1].splitlines()
    assert [line for line in said if not line.startswith("preparing: ")] == []  # which a busy machine may come to
    assert process.returncode == 130


def _workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that it has spawned."""
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a program that it asked something, and that has ended
            found += [child] if "spawn_main" in " ".join(child.cmdline()) else []
    return found


@pytest.mark.parametrize("is_stuck", [False, True])
def test_asked_to_end(tmp_path: Path, tokenizer: str, is_stuck: bool) -> None:
    """SIGTERM: nothing half written stays, nothing is said of semaphores, and the exit code is what a shell expects.

    A worker that is stuck is not waited for without end.
    """
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(6000))
    data = asdict(config_of(path, tokenizer, tmp_path / "tokens", shard_bytes=20_000, workers=2))
    (tmp_path / "config.yaml").write_text(json.dumps({"name": "x", "model": {"vocab_size": VOCAB}, "data": data}))
    command = [sys.executable, "-m", "launcher", "prepare", str(tmp_path / "config.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("tokens/a-jsonl*/shard-*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    if is_stuck:
        for worker in _workers_of(process):
            worker.suspend()
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert "resource_tracker" not in said and "Traceback" not in said
    assert not list(tmp_path.glob("tokens/*/manifest.json"))
    assert is_stuck or not list(tmp_path.rglob("*partial*"))


ASKED_AT_A_LOCK = """\
import signal, sys, time
from concurrent.futures import _base
from data.workers import run_in_processes

def raise_exit(signum, _):
    raise SystemExit(128 + signum)

def enter(futures):
    for future in futures.futures:
        future._condition.acquire()
    if time.monotonic() > begun + 2:  # its workers are there
        signal.raise_signal(int(sys.argv[1]))

if __name__ == "__main__":
    assert "__enter__" in vars(_base._AcquireFutures)
    _base._AcquireFutures.__enter__, begun = enter, time.monotonic()
    signal.signal(int(sys.argv[1]), raise_exit)
    run_in_processes(time.sleep, [(0.1,)] * 500, 2, print)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_asked_to_end_while_the_locks_of_results_are_taken(tmp_path: Path, signum: int) -> None:
    """What a handler raised there left them taken, and the pool's own thread waited for them for ever."""
    (tmp_path / "work.py").write_text(ASKED_AT_A_LOCK)
    command = [sys.executable, str(tmp_path / "work.py"), str(int(signum))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (128 + signum, "")


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


def test_leftovers_of_a_killed_packing_go(tmp_path: Path, tokenizer: str) -> None:
    """The source itself is finished then, and not begun again."""
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(100))
    config = config_of(path, tokenizer, tmp_path / "t", packing="best_fit")
    folder = prepared(config).sources[0].path
    before = contents(tmp_path / "t")
    packing = next(folder.glob("train-*.pack"))
    packing.rename(f"{packing}.partial-{os.uname().nodename}-999999999")
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
    assert len(verify(config, result)) == 1
    assert str(path) in verify(config, result)[0]
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
        remedy = "put them back if a run began with its tokens; else remove .* and prepare again"
        with pytest.raises(DataError, match=rf"data.sources\[0\].path=.*a.jsonl.* differ.*; {remedy}"):
            call(config, VOCAB)
    path.unlink()
    assert find_prepared(config, VOCAB) == result
    assert prepared(config) == result


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_changed_dataset_that_is_streamed_is_refused(tmp_path: Path, tokenizer: str, is_finished: bool) -> None:
    folder = tmp_path / "d"
    WRITERS["hf"](folder, make_documents(40))
    config = config_of(f"hf://{folder}", tokenizer, tmp_path / "t")
    result = prepared(config)
    path = result.sources[0].path
    if not is_finished:
        (path / "manifest.json").unlink()
        (path / "shard-00001.json").unlink()
    write_parquet(folder / "zero.parquet", make_documents(5, seed=9))
    calls = [lambda c, v: prepare(c, vocab_size=v), *([find_prepared] if is_finished else [])]
    for call in calls:
        remedy = "put them back if a run began with its tokens; else remove" if is_finished else "remove"
        with pytest.raises(
            DataError, match=rf"\[0\].path='hf://.*': 1 files differ, such as .*d/zero.parquet from .* from; {remedy} "
        ):
            call(config, VOCAB)
    (folder / "zero.parquet").unlink()
    assert prepared(config) == result
    (path / "inputs.json").write_text("[]\n")  # as it was while the files were not known
    write_parquet(folder / "zero.parquet", make_documents(5, seed=9))
    assert find_prepared(config, VOCAB) == result
    shutil.rmtree(folder)
    assert find_prepared(config, VOCAB) == result


def test_files_on_the_hub_are_known_by_their_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"train": ["hf://datasets/org/name@0a1b/a.parquet"], "test": ["hf://datasets/org/name@0a1b/b.parquet"]}
    builder = SimpleNamespace(config=SimpleNamespace(data_files=files))
    monkeypatch.setattr("data.hub._open", lambda source, key: (builder, None))
    source = SourceConfig(path="hf://org/name")
    (begun,) = corpus_files(source, "data.sources[0]")
    assert begun == InputFile("hf://datasets/org/name@0a1b/a.parquet", 0)
    write_json(tmp_path / "inputs.json", inputs_tree([begun]))
    check_inputs(tmp_path, source, "data.sources[0]")
    files["train"] = ["hf://datasets/org/name@2c3d/a.parquet"]
    with pytest.raises(DataError, match=r"hf://org/name': 2 files differ, such as hf://datasets/org/name@0a1b/a.parq"):
        check_inputs(tmp_path, source, "data.sources[0]")
    (tmp_path / "manifest.json").touch()  # finished: its tokens are enough
    check_inputs(tmp_path, source, "data.sources[0]")


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
