"""Token files at URLs, through a cache of blocks: the same tokens as of local files, within its bound."""

import dataclasses
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

import data.block_cache
import data.remote
import data.remote_index
import data.remote_tokens
from data.block_cache import BlockCache, write_bound
from data.config import DataConfig, SourceConfig
from data.dataset import Dataset, open_dataset
from data.errors import DataError, UnreadObject
from data.find_text import CHUNK_TOKENS
from data.foreign import check_foreign_files
from data.overlap import n_trained_on
from data.prepare import prepare
from data.remote import RemoteObject
from data.remote_index import bring_index
from data.tokenfile import TokenFile
from data.tokenwriter import TokenFileWriter
from object_store import count_fetches

VOCAB, BLOCK = 100_000, 512


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.block_cache, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(data.remote_tokens, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(data.remote, "WAITS_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(data.remote_index, "_seen", {})


def write_file(prefix: Path, dtype: type = np.uint16, *, has_mask: bool = False, seed: int = 0) -> Path:
    prefix.parent.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    writer = TokenFileWriter(prefix, np.dtype(dtype), has_mask=has_mask)
    for n in random.integers(1, 90, 120):
        writer.add(random.integers(0, 65_000 if dtype is np.uint16 else VOCAB, int(n)), random.random(int(n)) < 0.5)
    writer.finish()
    return prefix


def a_config(folder: Path, *sources: str, bound: int = 1 << 30, **more) -> DataConfig:
    listed = tuple(SourceConfig(path=path) for path in sources)
    cache = {"cache_dir": str(folder / "cache"), "cache_gib": bound / 2**30}
    return DataConfig(seq_len=24, sources=listed, token_dir=str(folder / "tokens"), **{**cache, **more})


def opened(config: DataConfig) -> Dataset:
    prepare(config, vocab_size=VOCAB)
    return open_dataset(config, seed=0, vocab_size=VOCAB, split="train")


def n_cached(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "cache" / "blocks").glob("*/*"))


@pytest.mark.parametrize("packing", ["sequential", "best_fit", "one_document"])
@pytest.mark.parametrize("bound", [1 << 30, 3000])
def test_batches_are_those_of_local_files(tmp_path: Path, packing: str, bound: int) -> None:
    """16 and 32 bits, one with a mask; also where the cache holds five blocks, a twelfth of what is read."""
    paths = [
        write_file(tmp_path / "there" / "a"),
        write_file(tmp_path / "there" / "b", np.int32, has_mask=True, seed=1),
    ]
    local = opened(a_config(tmp_path, *map(str, paths), packing=packing))
    remote = opened(a_config(tmp_path, *(f"file://{path}" for path in paths), packing=packing, bound=bound))
    assert [file.is_remote for file in remote.files] == [True, True]
    for start in range(0, 300, 20):
        indices = np.arange(start, start + 20)
        one, other = local.read(indices), remote.read(indices)
        for name in ("tokens_BS", "targets_BS", "positions_BS", "documents_BS"):
            assert (getattr(one, name) == getattr(other, name)).all()
        assert local.count(indices) == remote.count(indices)
        assert n_cached(tmp_path) <= bound
    assert n_cached(tmp_path) > 1000
    assert n_trained_on(remote.files[:1], remote.files) == n_trained_on(local.files[:1], local.files)
    assert (remote.files[0].tokens[:CHUNK_TOKENS] == local.files[0].tokens).all()


def test_heldout_text_may_lie_there_too(tmp_path: Path) -> None:
    path = write_file(tmp_path / "there" / "a")
    config = a_config(tmp_path, f"file://{path}", heldout_path=f"file://{path}")
    check_foreign_files(config, VOCAB)
    dataset = open_dataset(config, seed=0, vocab_size=VOCAB, split="heldout")
    plain = open_dataset(dataclasses.replace(config, heldout_path=str(path)), seed=0, vocab_size=VOCAB, split="heldout")
    assert (dataset.read(np.arange(9)).tokens_BS == plain.read(np.arange(9)).tokens_BS).all()


def test_planted_a_cache_that_makes_no_room_passes_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.block_cache, "make_room", lambda *_: None)
    with pytest.raises(AssertionError):
        test_batches_are_those_of_local_files(tmp_path, "sequential", 3000)


def a_cache(folder: Path, n_blocks: int) -> tuple[BlockCache, list[int], bytes]:
    """A cache of so many blocks, what it fetches, and the file's bytes."""
    content, fetched = np.random.default_rng(0).bytes(20 * BLOCK - 100), []

    def fetch(start: int, stop: int) -> bytes:
        fetched.append(start // BLOCK)
        return content[start:stop]

    write_bound(folder, n_blocks * (BLOCK + 8))
    return BlockCache(folder, "object", len(content), fetch), fetched, content


def test_what_was_used_the_longest_ago_goes_first(tmp_path: Path) -> None:
    cache, fetched, content = a_cache(tmp_path, 10)
    for block in range(10):
        assert cache.read(block * BLOCK, block * BLOCK + 5) == content[block * BLOCK : block * BLOCK + 5]
        os.utime(cache.folder / f"{block:08}", ns=(0, block + (100 if block == 0 else 0)))  # block 0 was used again
    cache.read(10 * BLOCK, 10 * BLOCK + 1)
    assert sorted(int(path.name) for path in cache.folder.iterdir()) == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert fetched == list(range(11))
    assert cache.read(0, len(content)) == content


def test_a_torn_block_is_fetched_again(tmp_path: Path) -> None:
    cache, _, content = a_cache(tmp_path, 30)
    assert cache.read(0, len(content)) == content
    for damage in (b"", bytes(BLOCK + 8), (cache.folder / "00000003").read_bytes()[:-40]):
        (cache.folder / "00000003").write_bytes(damage)
        again, fetched_again, _ = a_cache(tmp_path, 30)  # another process's
        assert again.read(0, len(content)) == content
        assert fetched_again == [3]


@pytest.mark.parametrize("end", ["idx", "mask", "copied"])
@pytest.mark.parametrize("damage", ["a bit", "cut", "gone"])
def test_an_index_or_a_mask_that_is_damaged_in_the_cache_is_fetched_again(
    tmp_path: Path, end: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bit of the index makes two documents begin at one place, where opening the file does not look."""
    path = write_file(tmp_path / "there" / "a", has_mask=True)
    config = a_config(tmp_path, f"file://{path}")
    before = opened(config).read(np.arange(40))
    (copy,) = (tmp_path / "cache").glob(f"*/a.{end}")
    content = copy.read_bytes()
    copy.unlink()
    if damage != "gone":
        at = len(content) - 88 if end == "idx" else len(content) // 2
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        copy.write_bytes(flipped if damage == "a bit" else content[:-8])
    monkeypatch.setattr(data.remote_index, "_seen", {})
    after = opened(config).read(np.arange(40))
    assert copy.read_bytes() == content
    for name in ("tokens_BS", "targets_BS", "positions_BS", "documents_BS"):
        assert (getattr(before, name) == getattr(after, name)).all()


@pytest.mark.parametrize("content", ["", "[1]", "3", '{"bin": 3}', '{"bin": {}}', '{"bin": {"url": "a"}}', "[" * 9999])
def test_a_damaged_record_of_objects_is_one_line(tmp_path: Path, content: str, monkeypatch) -> None:
    config = a_config(tmp_path, f"file://{write_file(tmp_path / 'there' / 'a')}")
    opened(config)
    (record,) = (tmp_path / "cache").glob("*/a.remote")
    record.write_text(content)
    monkeypatch.setattr(data.remote_index, "_seen", {})
    with pytest.raises(DataError, match=rf"{record} is damaged \(.*\); delete {record.parent}") as caught:
        opened(config)
    assert len(caught.value.problems) == 1


def test_planted_a_hash_that_is_not_compared_gives_other_tokens(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(data.block_cache.xxhash, "xxh3_64_digest", lambda _: bytes(8))
    with pytest.raises(AssertionError):
        test_a_torn_block_is_fetched_again(tmp_path)


def test_processes_of_a_machine_fetch_each_block_once(tmp_path: Path) -> None:
    path = write_file(tmp_path / "there" / "a")
    tokens = TokenFile(path).tokens
    order = np.random.default_rng(1).permutation(-(-len(tokens) // 50)).tolist()
    log = tmp_path / "log"
    arguments = (str(tmp_path / "cache"), f"file://{path}", str(log), BLOCK)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        rolled = [(*arguments, order[n * 20 :] + order[: n * 20]) for n in range(3)]
        assert pool.starmap(count_fetches, rolled) == [tokens.astype(np.int64).sum()] * 3
    fetched = [int(line) for line in log.read_text().split()]
    assert sorted(fetched) == list(range(0, tokens.nbytes, BLOCK))


def test_windows_are_fetched_ahead_by_several_threads(tmp_path: Path) -> None:
    path = write_file(tmp_path / "there" / "a")
    file = TokenFile(bring_index(f"file://{path}", tmp_path / "cache", 1 << 30))
    file.prefetch(0, 2000)
    pool = file.tokens._prefetcher._pool
    assert pool is not None
    pool[1].shutdown(wait=True)
    assert all(file.tokens.blocks.holds(block) for block in range(2000 * 2 // BLOCK))


@pytest.mark.parametrize("when", ["between two starts", "within a run"])
@pytest.mark.parametrize("end", ["bin", "idx"])
def test_an_object_that_has_changed_is_refused(tmp_path: Path, when: str, end: str, monkeypatch) -> None:
    path = write_file(tmp_path / "there" / "a")
    config = a_config(tmp_path, f"file://{path}")
    dataset = opened(config)
    dataset.read(np.arange(3))
    content = Path(f"{path}.{end}").read_bytes()
    Path(f"{path}.{end}").write_bytes(content)
    os.utime(f"{path}.{end}", (1, 1))
    line = rf"file://.*/a.{end} has changed: it is {len(content)} bytes, mtime 1.0 now, and was {len(content)} bytes"
    if when == "within a run":
        if end == "idx":
            return  # read whole when the run began
        with pytest.raises(DataError, match=line):
            dataset.read(np.arange(300))
        return
    monkeypatch.setattr(data.remote_index, "_seen", {})
    with pytest.raises(DataError, match=line):
        opened(config)


def test_a_network_that_fails_is_tried_again_and_then_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "there" / "a")
    remote, failures = RemoteObject(f"file://{path}.bin"), [2]
    told = RemoteObject._told

    def failing(self: RemoteObject):
        if failures[0]:
            failures[0] -= 1
            raise TimeoutError("the store does not answer")
        return told(self)

    monkeypatch.setattr(RemoteObject, "_told", failing)
    assert remote.look() is not None
    failures[0] = 2
    assert len(remote.fetch(0, 10)) == 10
    failures[0] = 100
    with pytest.raises(OSError, match=r"a.bin cannot be read after 3 tries over 0 s \(the store does not answer\)"):
        remote.fetch(0, 10)
    with pytest.raises(DataError, match=r"a.bin cannot be read after 3 tries .*; check the network, the URL and"):
        bring_index(f"file://{path}", tmp_path / "cache", 1 << 30)


def test_fewer_bytes_than_were_asked_for_are_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that ends early gives a part without a word; it would be kept as a whole block."""
    path = write_file(tmp_path / "there" / "a")
    remote, failures = RemoteObject(f"file://{path}.bin"), [2]
    assert remote.look() is not None
    fs, _ = remote._open()
    whole = fs.cat_file

    def cut(path: str, start: int, end: int) -> bytes:
        failures[0] -= 1
        return whole(path, start=start, end=end)[: -1 if failures[0] >= 0 else None]

    monkeypatch.setattr(fs, "cat_file", cut)
    assert remote.fetch(7, 17) == Path(f"{path}.bin").read_bytes()[7:17]
    failures[0] = 100
    with pytest.raises(OSError, match=r"a.bin cannot be read after 3 tries over 0 s \(9 bytes came of 10\)"):
        remote.fetch(7, 17)


@pytest.mark.parametrize("error", [PermissionError("no key"), FileNotFoundError("gone")])
def test_what_another_try_cannot_mend_is_told_at_once(tmp_path: Path, monkeypatch, error: OSError) -> None:
    remote, tries = RemoteObject(f"file://{write_file(tmp_path / 'there' / 'a')}.bin"), []
    assert remote.look() is not None

    def refused(*_: object, **__: object) -> bytes:
        tries.append(1)
        raise error

    monkeypatch.setattr(remote._open()[0], "cat_file", refused)
    with pytest.raises(UnreadObject, match=rf"a\.bin cannot be read \({error}\)"):
        remote.fetch(0, 10)
    assert tries == [1]


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("file:///nowhere/a", r"file:///nowhere/a.bin is not there; check the URL"),
        ("nosuch://bucket/a", r"nosuch://bucket/a.bin is no URL that fsspec can open \(Protocol not known: nosuch\)"),
        ("gs://bucket/a", r"gs://bucket/a.bin cannot be opened: fsspec lacks what gs:// needs"),
    ],
)
def test_a_url_that_leads_nowhere_is_one_line(tmp_path: Path, url: str, line: str) -> None:
    with pytest.raises(DataError, match=line) as caught:
        check_foreign_files(a_config(tmp_path, url), VOCAB)
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    path = write_file(tmp_path / "there" / "a")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"data.cache_dir='.*cache' cannot be written to"):
        check_foreign_files(a_config(tmp_path, f"file://{path}"), VOCAB)
