"""Sources: which files a path means, how they are cut into slices, and the cheap rules."""

import json
import os
import socket
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.cleaning.config import CleaningConfig
from data.config import ChatConfig, DataConfig, SourceConfig, StageConfig
from data.documents import read_documents
from data.errors import DataError
from data.hub import count_hub_shards
from data.prepared import readable_stem
from data.rules import check_data
from data.shards import plan_shards
from data.sources import InputFile, expand_path, input_files
from data_reference import write_token_file


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.py", "site-packages/e.py", ".hidden/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(tree: Path, pattern: str, *exclude: str) -> list[str]:
    source = SourceConfig(path=f"{tree}/{pattern}" if pattern else str(tree), exclude=exclude)
    return [str(Path(file.path).relative_to(tree)) for file in input_files(source, "data.sources[0]")]


def test_files_folders_and_globs_are_sorted(tree: Path) -> None:
    assert names(tree, "a.txt") == ["a.txt"]
    assert names(tree, "*.txt") == ["a.txt", "b.txt"]
    assert names(tree, "**/*.txt") == ["a.txt", "b.txt", "sub/c.txt"]
    assert names(tree, "") == ["a.txt", "b.txt", "site-packages/e.py", "sub/c.txt", "sub/deep/d.py"]
    assert names(tree, "**/*.py", "**/site-packages/**") == ["sub/deep/d.py"]


def test_excludes_match_relative_paths_at_the_top(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    files = input_files(SourceConfig(path="**/*.py", exclude=("**/site-packages/**",)), "data.sources[0]")
    assert [file.path for file in files] == ["sub/deep/d.py"]


@pytest.mark.parametrize("path", [".", "./", "./sub", "sub/", "sub/../sub", "./**/*.py"])
@pytest.mark.parametrize("pattern", ["sub/deep/*", "./sub/deep/*", "sub//deep/*", "site-packages/../sub/deep/*"])
def test_excludes_match_whichever_way_a_path_is_written(
    tree: Path, monkeypatch: pytest.MonkeyPatch, path: str, pattern: str
) -> None:
    monkeypatch.chdir(tree)
    files = input_files(SourceConfig(path=path, exclude=(pattern,)), "data.sources[0]")
    assert files and not [file.path for file in files if file.path.endswith("d.py")]


def test_excludes_are_refused_where_datasets_chooses_the_files(tree: Path) -> None:
    source = SourceConfig(path=f"hf://{tree}", exclude=("**/b.txt",))
    line = (
        f"data.sources[0].exclude=['**/b.txt'] must be empty for path='hf://{tree}', since datasets chooses the files "
        "that it reads; leave it out, or give the folder with the files as path, without hf://"
    )
    (tree / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for read in (count_hub_shards, input_files):
        with pytest.raises(DataError) as refused:
            read(source, "data.sources[0]")
        assert refused.value.problems == [line]


def test_nothing_there_is_said(tree: Path) -> None:
    (tree / "half.bin").write_bytes(b"")
    (tree / "empty").mkdir()
    cases = {
        "none.txt": "does not exist",
        "*.md": "matches no file",
        "empty": "is a folder without files",
        "half": "needs both PREFIX.bin and PREFIX.idx but only",
    }
    for pattern, expected in cases.items():
        with pytest.raises(DataError, match=rf"data\.sources\[0\]\.path=.*{expected}.*; check the path"):
            names(tree, pattern)


def test_a_loop_of_links_adds_nothing(tree: Path) -> None:
    """Two loops in one folder give a file more names than any search could list."""
    (tree / "sub/loop").symlink_to(tree)
    (tree / "sub/other").symlink_to("..")
    (tree / "itself").symlink_to("itself")
    for pattern in ("", "**/*.txt", "**/*.*", "**"):
        with_loops = names(tree, pattern, "**/itself")
        assert with_loops == sorted(set(with_loops))
        assert [name for name in with_loops if "loop" in name or "other" in name] == []
    assert names(tree, "**/*.txt", "**/itself") == ["a.txt", "b.txt", "sub/c.txt"]
    with pytest.raises(DataError, match=r"itself cannot be read \(Too many levels of symbolic links\); remove it"):
        names(tree, "")


def test_a_file_with_several_names_counts_once(tree: Path) -> None:
    (tree / "A.txt").symlink_to("b.txt")
    (tree / "z.txt").hardlink_to(tree / "a.txt")
    (tree / "elsewhere").symlink_to("sub")
    assert names(tree, "**/*.txt") == ["a.txt", "b.txt", "sub/c.txt"]
    (tree / "outside").mkdir()
    (tree / "outside/far").symlink_to(tree / ".hidden")
    assert names(tree, "outside") == ["outside/far/f.py"]  # a link to what has no other name there is followed


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: os.mkfifo(path), "is a pipe, not a file"),
        (make_socket, "is a socket, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
        (lambda path: path.symlink_to("nowhere"), r"cannot be read \(No such file or directory\)"),
        (lambda path: path.mkdir(), "is a folder, not a file; end the glob with"),
        (lambda path: path.symlink_to("/"), "is a folder, not a file"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(
    tree: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], expected: str
) -> None:
    monkeypatch.chdir(tree)  # a socket's path must be short
    make(Path("x.txt"))
    with pytest.raises(DataError, match=rf"data\.sources\[0\]: .*x\.txt {expected}"):
        names(tree, "*.txt")
    assert names(tree, "*.txt", "**/x.txt") == ["a.txt", "b.txt"]
    if not (tree / "x.txt").is_dir():
        with pytest.raises(DataError, match=rf"x\.txt {expected}"):
            names(tree, "x.txt")


def test_what_may_not_be_read_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("b.txt"))
    with pytest.raises(
        DataError, match=r"b\.txt may not be read by this user; remove it, or leave it out with exclude"
    ):
        names(tree, "")
    real = os.scandir

    def scandir(path: str):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"sub/deep cannot be looked into \(Permission denied\)"):
        names(tree, "**/*.py")


def test_folders_deeper_than_python_recurses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    deep = "/".join("d" * 1500)
    subprocess.run(["mkdir", "-p", deep], check=True)  # Python's own makedirs and rmtree recurse
    Path(deep, "a.txt").write_text("text")
    found = names(Path("."), "**/*.txt")
    subprocess.run(["rm", "-r", "d"], check=True)
    assert found == [f"{deep}/a.txt"]


def test_the_standard_library_is_there() -> None:
    assert expand_path("${python_stdlib}/os.py") == sysconfig.get_path("stdlib") + "/os.py"
    assert Path(expand_path("${python_stdlib}/os.py")).is_file()


def test_kinds_follow_names() -> None:
    kinds = {"a.txt": "text", "a.jsonl": "jsonl", "A.JSONL.GZ": "jsonl.gz", "a.jsonl.zst": "jsonl.zst", "a.py": "text"}
    assert {name: InputFile(name, 0).kind for name in kinds} == kinds


def test_stems_are_readable() -> None:
    assert readable_stem("${python_stdlib}/**/*.py") == "python-stdlib"
    assert readable_stem("hf://org/My.Data") == "My-Data"
    assert readable_stem("/a/b/*.txt") == "b"
    assert readable_stem("**") == "text"


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30), max_size=20), st.integers(1, 200))
def test_slices_of_jsonl_hold_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], shard_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("t") / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))  # no newline at the end
    source = SourceConfig(path=str(path))
    files = input_files(source, "k")
    shards = plan_shards(source, files, shard_bytes, "k")
    read = [[text for text, _ in read_documents(source, shard, "k") if text] for shard in shards]
    assert [text for shard in read for text in shard] == documents
    assert sum(piece.n_bytes for shard in shards for piece in shard) == files[0].n_bytes
    done = sum(n_bytes for shard in shards for _, n_bytes in read_documents(source, shard, "k"))
    assert done == files[0].n_bytes


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 40))
def test_text_files_fill_shards_whole(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shard_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("t")
    for i, size in enumerate(sizes):
        (folder / f"{i:03}.txt").write_text("".join(f"{j % 10}\n" for j in range(size // 2)))
    source = SourceConfig(path=str(folder))
    files = input_files(source, "k")
    shards = plan_shards(source, files, shard_bytes, "k")
    texts = [text for shard in shards for text, _ in read_documents(source, shard, "k")]
    assert "".join(texts) == "".join(Path(file.path).read_text() for file in files)
    small = [Path(file.path).read_text() for file in files if 0 < file.n_bytes <= shard_bytes]
    assert set(small) <= set(texts)


GOOD = DataConfig(seq_len=8, sources=(SourceConfig(path="a.txt"),), token_dir="t")
LONG = "a" * 256
BROKEN = {
    "data.sources=[] must name at least one source": {"sources": ()},
    "data.token_dir='' must not be empty": {"token_dir": ""},
    "data.tokenizer='' must not be empty": {"tokenizer": ""},
    "data.heldout_path='' must not be empty": {"heldout_path": ""},
    "data.without='' must not be empty": {"without": ""},
    "data.cache_dir='' must not be empty": {"cache_dir": ""},
    "data.token_dir='a.txt' must be a folder that can be written to": {"token_dir": "a.txt"},
    "data.sources[0].path='' must not be empty": {"sources": (SourceConfig(path=""),)},
    "data.sources[0].path='none.txt' does not exist": {"sources": (SourceConfig(path="none.txt"),)},
    "data.heldout_path='none' must be the PREFIX": {"heldout_path": "none"},
    "data.sources[0].path='hf://' must name a dataset": {"sources": (SourceConfig(path="hf://"),)},
    "data.sources[0].path='a\\x00b' must not hold a NUL byte": {"sources": (SourceConfig(path="a\0b"),)},
    f"data.sources[0].path='{LONG}' must have names of": {"sources": (SourceConfig(path=LONG),)},
    f"data.token_dir='x/{LONG}' must have names of": {"token_dir": f"x/{LONG}"},
    "data.token_dir='$SCRATCH/tokens' must be written out": {"token_dir": "$SCRATCH/tokens"},
    f"data.tokenizer='{LONG}' must have names of": {"tokenizer": LONG},
    "data.token_dir='s3://b/t' must be a path on this machine, and is a URL; name a folder": {"token_dir": "s3://b/t"},
    "data.cache_dir='s3://b/c' must be a path on this machine, and is a URL; name a folder": {"cache_dir": "s3://b/c"},
    "data.tokenizer='s3://b/t' must be a path on this machine, and is a URL; copy": {"tokenizer": "s3://b/t"},
    "data.without='s3://b/w' must be a path on this machine, and is a URL; copy": {"without": "s3://b/w"},
    "data.sources[0].chat needs data.cleaning=null: only text is cleaned; set that to null": {
        "sources": (SourceConfig(path="a.txt", chat=ChatConfig()),),
        "cleaning": CleaningConfig(exact=True),
    },
}


@pytest.mark.parametrize("expected", BROKEN)
def test_each_rule_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert check_data(GOOD, 300) == []
    lines = check_data(replace(GOOD, **BROKEN[expected]), 300)
    assert [line for line in lines if line.startswith(expected) and "; " in line], lines
    assert len(lines) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt"]


def test_stages_beside_a_sequence_of_no_tokens_trip_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range of the length has its line elsewhere; stages are counted in sequences, which have none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert check_data(replace(GOOD, seq_len=0, stages=(StageConfig(from_tokens=8, weights=(1.0,)),)), 300) == []


def write_saved(folder: Path) -> None:
    """The least that tells a folder that save_to_disk wrote."""
    folder.mkdir()
    (folder / "data.arrow").write_bytes(b"")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        ("a.txt", {"split": "test"}, "split='test' changes nothing where path='a.txt' is no Hugging Face dataset"),
        ("a.txt", {"subset": "en"}, "subset='en' changes nothing where path='a.txt' is no Hugging Face dataset"),
        ("a", {"split": "test"}, "split='test' changes nothing where path='a' is no Hugging Face dataset"),
        ("a", {"exclude": ("b",)}, "exclude=['b'] changes nothing where path='a' is token files"),
        ("a", {"text_key": "body"}, "text_key='body' changes nothing where path='a' is token files"),
        ("a", {"chat": ChatConfig()}, "chat={...} changes nothing where path='a' is token files"),
        ("a", {"max_bad_share": 0.1}, "max_bad_share=0.1 changes nothing where path='a' is token files"),
        ("s3://b/a", {"chat": ChatConfig()}, "chat={...} changes nothing where path='s3://b/a' is token files"),
        ("hf://saved", {"subset": "en"}, "subset='en' changes nothing where path='hf://saved' is a saved dataset"),
    ],
)
def test_no_key_of_a_source_is_set_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path, fields, why) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    write_token_file(tmp_path / "a", [[1, 2]])
    write_saved(tmp_path / "saved")
    (line,) = check_data(replace(GOOD, sources=(SourceConfig(path=path, **fields),)), 300)
    (name,) = fields
    assert line.startswith(f"data.sources[0].{why}")
    assert line.endswith(f"; leave out {name}")
    assert check_data(replace(GOOD, sources=(SourceConfig(path=path),)), 300) == []


@pytest.mark.parametrize(
    ("path", "token_dir", "place"),
    [
        (".", "tokens", "tokens"),
        ("corpus", "corpus/deep/tokens", "deep/tokens"),
        ("corpus/", "corpus", "."),
        ("linked", "corpus/tokens", "tokens"),
        ("**/*.json", "tokens", "tokens"),
        ("c*/**", "corpus/tokens", "corpus/tokens"),
        ("**", "tokens", "tokens"),
        ("corpus/*/*/train-*", "corpus/tokens", "tokens"),
        ("**/*.txt", "tokens", None),
        ("*", "tokens", None),
        ("corpus", "tokens", None),
        ("corpus", "corpus2/tokens", None),
        ("corpus/a.txt", "corpus/tokens", None),
        (".", ".hidden/tokens", None),
        ("hf://.", "tokens", None),
    ],
)
def test_a_token_dir_that_a_source_would_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, token_dir: str, place: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "corpus/a.txt", "corpus/a.json", "corpus/x/x/train-0"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    Path("linked").symlink_to("corpus")
    config = replace(GOOD, sources=(SourceConfig(path=path),), token_dir=token_dir)
    if place is None:
        assert check_data(config, 300) == []
        return
    (line,) = check_data(config, 300)
    assert line.startswith(f"data.token_dir='{token_dir}' lies in data.sources[0].path='{path}', which would read its")
    assert (f"; name a folder outside of it, or add '**/{place}/**' to" in line) == (place != ".")
    if place != ".":
        source = SourceConfig(path=path, exclude=(f"**/{place}/**",))
        assert check_data(replace(config, sources=(source,)), 300) == []


def test_all_problems_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sources = (SourceConfig(path=""), SourceConfig(path="hf://"))
    assert len(check_data(replace(GOOD, token_dir="", sources=sources, tokenizer=LONG), 300)) == 4
    missing = (SourceConfig(path="a"), SourceConfig(path="b"))
    assert len(check_data(replace(GOOD, sources=missing), 300)) == 2


def test_training_a_tokenizer_needs_room_for_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert check_data(GOOD, 256)[0].startswith("model.vocab_size=256 must be at least 257 to train")
    write_token_file(tmp_path / "a", [[1, 2]])
    assert check_data(replace(GOOD, sources=(SourceConfig(path="a"),)), 256) == []
