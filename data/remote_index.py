"""Token files at URLs, on object stores or anywhere that fsspec can open, and what this machine keeps of them.

The URL of a PREFIX stands for PREFIX.bin, PREFIX.idx and, if it exists, PREFIX.mask. The last two are downloaded whole;
the first is read through a cache of blocks. On this machine they form a token file like any other, except for its .bin:

    CACHE/STEM-HASH/STEM.idx          and .mask, and packings made from it
    CACHE/STEM-HASH/STEM.copied       hashes of samples of these two, so that one that is damaged here is fetched again
    CACHE/STEM-HASH/STEM.remote       the URL, size and version of each object, as the store reports them

An object whose size or version differs from the record is refused, so that a run's tokens cannot change unnoticed.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import xxhash

from data.block_cache import locked, write_bound
from data.config import DataConfig
from data.errors import reason_of, refuse
from data.manifest import write_json
from data.partial import written_whole
from data.remote import ObjectRecord, RemoteObject, changed
from data.sources import expand_path, is_url
from data.tokenfile import sampled_hash

COPIED_BYTES = 1 << 24  # downloaded at once of an .idx or a .mask
_seen: dict[tuple[int, str], Path] = {}  # (process id, URL) that was compared with the store -> local prefix


def token_prefix(config: DataConfig, path: str) -> Path:
    """The local prefix of existing token files that a config names by path or by URL.

    For a URL, the .idx is downloaded unless it is here already. Raises DataError where the objects cannot be read, or
    have changed.
    """
    if not is_url(path):
        return Path(expand_path(path))
    if (os.getpid(), path) not in _seen:
        _seen[os.getpid(), path] = bring_index(path, Path(config.cache_dir), int(config.cache_gib * 2**30))
    return _seen[os.getpid(), path]


def bring_index(url: str, cache: Path, bound: int) -> Path:
    """Downloads the token file at ``url`` into the cache, all but its .bin; returns its local prefix.

    A copy that is there is kept, unless it was damaged since its download. The blocks of the cache may take ``bound``
    bytes. Raises DataError where objects cannot be read, or have changed.
    """
    try:
        return _bring_index(url.rstrip("/"), cache, bound)
    except OSError as error:
        reason = reason_of(error)
        found, _, rule = reason.partition(" ") if reason.startswith(url) else (url, "", reason)  # the object's own name
        raise refuse(found, rule, "check the network, the URL and the keys that lead to it") from error


def records_of(config: DataConfig) -> dict[str, dict[str, object]]:
    """URL -> record (size and version, as its store reports them) of each object of a config's token files at URLs.

    The records date from when the .idx was downloaded; each store is asked, once a process, whether they still hold.
    """
    paths = [*(source.path for source in config.sources), config.heldout_path or ""]
    recorded = [json.loads(Path(f"{token_prefix(config, path)}.remote").read_text()) for path in paths if is_url(path)]
    return {each["url"]: each for objects in recorded for each in objects.values()}


def check_records(config: DataConfig, before: Mapping[str, object], kept: Path) -> None:
    """Raises DataError where an object differs from its record ``before``; ``kept`` is the path of that record."""
    for url, now in records_of(config).items():
        if url in before and before[url] != now:
            raise changed(url, before[url], now, kept)


def _bring_index(url: str, cache: Path, bound: int) -> Path:
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in url.rpartition("/")[2])[:60]
    prefix = cache / f"{stem}-{xxhash.xxh3_64_hexdigest(url.encode())}" / stem
    objects = {end: RemoteObject(f"{url}.{end}") for end in ("bin", "idx", "mask")}
    told = {end: each.look(may_lack=end == "mask") for end, each in objects.items()}
    record, path = {end: asdict(each) for end, each in told.items() if each is not None}, Path(f"{prefix}.remote")
    write_bound(cache, bound)
    recorded = _read_record(path)
    if recorded is not None:
        for end in record.keys() | recorded.keys():
            if record.get(end) != recorded.get(end):
                raise changed(f"{url}.{end}", recorded.get(end), record.get(end), prefix.parent)
    ends, copied = sorted(record.keys() - {"bin"}), Path(f"{prefix}.copied")
    if recorded is not None and _has_copied(prefix, ends):
        return prefix
    with locked(cache / "locks" / prefix.name):
        if not (path.exists() and _has_copied(prefix, ends)):
            prefix.parent.mkdir(parents=True, exist_ok=True)
            for end in ends:
                _copy(objects[end], Path(f"{prefix}.{end}"))
            write_json(copied, _hashes_of_copies(prefix, ends))
            write_json(path, record)  # last, since it marks the others as complete
    return prefix


def _read_record(path: Path) -> dict[str, dict[str, object]] | None:
    """What PREFIX.remote records of each object; None where there is no such file. DataError where it is damaged."""
    try:
        return {end: asdict(ObjectRecord(**each)) for end, each in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise refuse(str(path), f"is damaged ({error})", f"delete {path.parent}") from error


def _has_copied(prefix: Path, ends: list[str]) -> bool:
    """Whether the copies PREFIX.END are there with the hashes that PREFIX.copied has of them."""
    try:
        return json.loads(Path(f"{prefix}.copied").read_text()) == _hashes_of_copies(prefix, ends)
    except (FileNotFoundError, ValueError, RecursionError):  # earlier versions have no such file
        return False


def _hashes_of_copies(prefix: Path, ends: list[str]) -> dict[str, str]:
    return {end: f"{sampled_hash(Path(f'{prefix}.{end}')):016x}" for end in ends}


def _copy(remote: "RemoteObject", path: Path) -> None:
    assert remote.record is not None
    with written_whole(path) as file:
        for start in range(0, remote.record.size, COPIED_BYTES):
            file.write(remote.fetch(start, min(start + COPIED_BYTES, remote.record.size)))
