"""Removing copies over all shards: of documents linked by pairs, the first one in the order of the sources is kept.

Shards are ordered by source, file and document, so which copy is kept depends on that order alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.cleaning.kept import DUPLICATES, EXACT, NEAR, REASONS, CleanedShard, read_lines, text_path
from data.cleaning.near import pairs_name
from data.manifest import write_json
from data.partial import written_whole

PARTS = 16  # parts of all hashes, by their first four bits: one part at a time is held in memory
SHOWN = 5  # copies of each kind and source that are recorded as samples
EXCERPT = 400  # characters of each sample
NUMBER = {reason: number for number, reason in REASONS.items()}


def find_exact_pairs(folder: Path, part: int, n_shards: int) -> Path:
    """Writes the pairs (first copy, later copy) of equal texts whose hashes lie in ``part``; returns the file's path.

    A pair is four little-endian uint32: shard and document of the first copy, then of the later one.
    """
    keys, places = [], []
    for shard in range(n_shards):
        hashes = np.load(folder / f"hashes/{shard:05}.npy", mmap_mode="r")
        (mine,) = np.nonzero((hashes[:, 0] >> np.uint64(60)) == part) if len(hashes) else (np.zeros(0, np.int64),)
        keys.append(np.asarray(hashes[mine]))
        places.append(np.uint64(shard) << np.uint64(32) | mine.astype(np.uint64))
    key, place = np.concatenate(keys), np.concatenate(places)
    order = np.lexsort((place, key[:, 1], key[:, 0]))
    key, place = key[order], place[order]
    is_copy = np.zeros(len(key), bool)
    is_copy[1:] = (key[1:] == key[:-1]).all(axis=1)
    first = place[np.maximum.accumulate(np.where(is_copy, 0, np.arange(len(key))))]
    pairs = np.stack([first[is_copy], place[is_copy]], axis=1)
    path = folder / pairs_name("exact", part)
    path.parent.mkdir(exist_ok=True)
    columns = np.stack([pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF)], axis=2).astype("<u4")
    with written_whole(path) as file:
        file.write(columns.tobytes())
    return path


def read_pairs(paths: Sequence[Path]) -> np.ndarray:
    """The pairs in these files, uint64 (pairs, 2): shard * 2^32 + document of each of the two."""
    columns = [np.fromfile(path, "<u4").reshape(-1, 2, 2).astype(np.uint64) for path in paths]
    both = np.concatenate(columns) if columns else np.zeros((0, 2, 2), np.uint64)
    return both[:, :, 0] << np.uint64(32) | both[:, :, 1]


def first_of_each(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(documents in pairs, ascending; the first document that each is linked to by any chain of pairs)."""
    documents, index = np.unique(pairs, return_inverse=True)
    index = index.reshape(-1, 2)
    label = np.arange(len(documents))
    while True:
        both = label[index]
        low, high = both.min(axis=1), both.max(axis=1)
        if np.array_equal(low, high):
            return documents, documents[label]
        np.minimum.at(label, high, low)  # a root is attached to the smallest root it is linked to
        while not np.array_equal(label, label[label]):
            label = label[label]


def settle(folder: Path, shards: Sequence[CleanedShard], exact: Sequence[Path], near: Sequence[Path]) -> dict[str, Any]:
    """Writes which texts of each shard are copies, then duplicates.json; returns the latter's content."""
    copies = read_pairs(exact)[:, 1]
    documents, first = first_of_each(np.concatenate([read_pairs(exact), read_pairs(near)]))
    is_removed = documents != first
    removed, kept = documents[is_removed], first[is_removed]
    reason = np.where(np.isin(removed, copies), NUMBER[EXACT], NUMBER[NEAR]).astype(np.uint32)
    shard_of = (removed >> np.uint64(32)).astype(np.int64)
    place_of = (removed & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    (folder / "removed").mkdir(exist_ok=True)
    for shard in np.unique(shard_of).tolist():
        mine = shard_of == shard
        _write_array(folder / f"removed/{shard:05}.npy", np.stack([place_of[mine], reason[mine]], axis=1))
    sources = np.array([shard.source for shard in shards])
    tree = {
        "sources": _by_source(sources, shard_of, (kept >> np.uint64(32)).astype(np.int64), reason),
        "cluster_sizes": _sizes(first),
        "samples": _samples(folder, sources, removed, kept, reason),
    }
    write_json(folder / DUPLICATES, tree)
    return tree


def _write_array(path: Path, array: np.ndarray) -> None:
    with written_whole(path) as file:
        np.save(file, array)


def _by_source(
    sources: np.ndarray, shard_of: np.ndarray, kept_in: np.ndarray, reason: np.ndarray
) -> list[dict[str, int | str]]:
    """Counts of copies by the source they were removed from, the source of the document kept instead, and reason."""
    rows = np.stack([sources[shard_of], sources[kept_in], reason.astype(np.int64)], axis=1)
    found, counts = np.unique(rows, axis=0, return_counts=True)
    return [
        {"of": of, "kept_in": kept, "reason": REASONS[why], "documents": count}
        for (of, kept, why), count in zip(found.tolist(), counts.tolist(), strict=True)
    ]


def _sizes(first: np.ndarray) -> dict[str, int]:
    """Size -> number of groups of copies with that many documents."""
    _, sizes = np.unique(first, return_counts=True)
    size, count = np.unique(sizes, return_counts=True)
    return {str(each): n for each, n in zip(size.tolist(), count.tolist(), strict=True)}


def _samples(
    folder: Path, sources: np.ndarray, removed: np.ndarray, kept: np.ndarray, reason: np.ndarray
) -> list[dict[str, int | str]]:
    """The first copies of each kind in each source, with the beginnings of the copy and of the kept text."""
    source = sources[(removed >> np.uint64(32)).astype(np.int64)]
    chosen: list[int] = []
    for number in np.unique(source):
        for why in REASONS:
            chosen += np.flatnonzero((source == number) & (reason == why))[:SHOWN].tolist()
    texts = _read_places(folder, {int(place) for i in chosen for place in (removed[i], kept[i])})
    return [
        {
            "source": int(source[i]),
            "reason": REASONS[int(reason[i])],
            "text": texts[int(removed[i])],
            "kept": texts[int(kept[i])],
        }
        for i in chosen
    ]


def _read_places(folder: Path, places: set[int]) -> dict[int, str]:
    found = {}
    for shard in sorted({place >> 32 for place in places}):
        wanted = {place & 0xFFFFFFFF for place in places if place >> 32 == shard}
        for number, text in enumerate(read_lines(text_path(folder, shard))):
            if number in wanted:
                found[shard << 32 | number] = text[:EXCERPT]
            if number >= max(wanted):
                break
    return found
