"""MinHash over shards: datatrove's signatures and buckets, with files that are written atomically.

Two documents form a pair where all hashes of a bucket agree: with probability 1 - (1 - s^r)^b for b buckets of r hashes
and documents whose sets of shingles have the similarity s (Broder 1997; Leskovec et al., Mining of Massive Datasets,
3.4).
"""

import functools
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from data.cleaning.config import NearConfig
from data.cleaning.judge import check_installed, hash_config, load_words
from data.errors import refuse
from data.partial import move_into_place, partial_suffix

SHINGLES_AT_ONCE = 1 << 14  # shingles hashed by all functions at once: 15 MB with 112 functions
FILES_BESIDE = 64  # files that a process has open besides signatures


class Signatures:
    """Collects the signatures of a shard's documents, in the layout of datatrove's ``MinhashDedupSignature``."""

    def __init__(self, config: NearConfig, words: str) -> None:
        check_installed()
        load_words(words)
        self.config = config
        self.step = _signature_step(config, words)
        self.buckets: list[list[list[int]]] = [[] for _ in range(config.buckets)]

    def add(self, text: str, number: int) -> None:
        """Adds the signature of document ``number`` of the shard; a text with fewer words than a shingle has none."""
        for bucket, hashes in zip(self.buckets, self.signature_of(text) or [], strict=False):
            bucket.append([*hashes, number])

    def signature_of(self, text: str) -> list[list[int]] | None:
        """Each bucket's list of hashes: each function's least value over the text's shingles; None without any."""
        shingles = self.step.get_shingles(text)
        parts = [
            np.array(self.step.get_signature(shingles[start : start + SHINGLES_AT_ONCE]), np.uint64)
            for start in range(0, len(shingles), SHINGLES_AT_ONCE)
        ]
        return functools.reduce(np.minimum, parts).tolist() if parts else None

    def write(self, folder: Path, shard: int) -> list[Path]:
        """Writes a file for each bucket below ``folder``, at its path below the folder of all shards."""
        paths = []
        for number, rows in enumerate(self.buckets):
            records = np.array([tuple(row) for row in sorted(rows)], _record(self.config))
            paths.append(folder / signature_name(number, shard))
            paths[-1].parent.mkdir(exist_ok=True)
            paths[-1].write_bytes(records.tobytes())
        return paths


def signature_name(bucket: int, shard: int) -> str:
    """The path, below the folder of all shards, at which datatrove looks for a shard's signatures."""
    return f"bucket_{bucket:03d}/{shard:05d}.minhash.sig"


def _record(config: NearConfig) -> np.dtype[Any]:
    hashes = [(f"hash{i}", "<u8") for i in range(config.hashes_per_bucket)]
    return np.dtype([*hashes, ("document", "<u4")])


@functools.lru_cache(maxsize=1)
def _signature_step(config: NearConfig, words: str) -> Any:
    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature

    return MinhashDedupSignature(os.devnull, minhash_config(config), words)


def minhash_config(config: NearConfig) -> Any:
    """Datatrove's config for the search for near-duplicates."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    return MinhashConfig(
        n_grams=config.n_grams,
        num_buckets=config.buckets,
        hashes_per_bucket=config.hashes_per_bucket,
        seed=config.seed,
        hash_config=hash_config(),
    )


def find_pairs(config: NearConfig, folder: Path, bucket: int, n_shards: int) -> Path:
    """Writes the pairs of documents whose hashes in a bucket agree to ``pairs/near-NNN.dups``; returns its path.

    A pair is four little-endian uint32: shard and document of the earlier one, then of the later. Memory holds one
    record of each shard. Raises DataError where more shards have to be open at once than the system allows.
    """
    check_installed()
    from datatrove.pipeline.dedup.minhash import MinhashDedupBuckets

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and n_shards + FILES_BESIDE > most:
        found = f"data.cleaning.near: {n_shards} shards"
        rule = f"must be open at once, and the system allows {most - FILES_BESIDE}"
        raise refuse(found, rule, "raise data.shard_bytes, or the limit of open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    partial = folder / f"bucket-{bucket:03d}.{partial_suffix()}"
    partial.mkdir(exist_ok=True)
    try:
        step = MinhashDedupBuckets(str(folder), str(partial), config=minhash_config(config))
        step.run(None, bucket, config.buckets)
        (written,) = partial.glob("*.dups")
        path = folder / pairs_name("near", bucket)
        move_into_place(written, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def pairs_name(kind: str, number: int) -> str:
    """The path of a file of pairs, below the folder of all shards."""
    return f"pairs/{kind}-{number:03d}.dups"
