"""Recall and precision of near-duplicate removal on planted copies, beside the recall that MinHash's theory predicts.

Documents of random words, and of each a copy in which each word is replaced with a given probability. A pair of
similarity s (Jaccard's, of its sets of shingles, counted exactly) must be found with probability 1 - (1 - s^r)^b, for r
hashes in each of b buckets. Prints one JSON line: for each share of edits the recall, the expected recall with an
interval of four standard deviations for so many independent pairs, and the mean similarity; over all, the precision.

    python benchmarks/near_duplicates.py [--pairs 200] [--buckets 14] [--hashes 8] [--seed 0]
"""

import argparse
import json
import math
import random
import tempfile
from pathlib import Path

import numpy as np

from data.cleaning.config import NearConfig
from data.cleaning.near import Signatures, find_pairs

EDITS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
WIDTH = 4.0  # standard deviations: one in 16,000 falls outside by chance


def random_words(draw: random.Random, n: int = 4000) -> list[str]:
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9))) for _ in range(n)]


def plant(n_pairs: int, seed: int) -> tuple[list[str], list[tuple[int, int, float]]]:
    """The documents, and (index of the first, index of its copy, share of edits) for each planted pair."""
    draw = random.Random(seed)
    words = random_words(draw)
    documents, pairs = [], []
    for edits in EDITS:
        for _ in range(n_pairs):
            first = draw.choices(words, k=draw.randint(80, 300))
            copy = [draw.choice(words) if draw.random() < edits else word for word in first]
            pairs.append((len(documents), len(documents) + 1, edits))
            documents += [" ".join(first), " ".join(copy)]
    return documents, pairs


def linked(documents: list[str], config: NearConfig) -> set[tuple[int, int]]:
    """The pairs of documents that share a bucket, by the code that prepares data, over two shards."""
    half = len(documents) // 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shard, part in enumerate((documents[:half], documents[half:])):
            signatures = Signatures(config, "en")
            for number, text in enumerate(part):
                signatures.add(text, number)
            signatures.write(folder, shard)
        files = [find_pairs(config, folder, bucket, 2) for bucket in range(config.buckets)]
        rows = np.concatenate([np.fromfile(path, "<u4").reshape(-1, 4) for path in files]).astype(int)
    return {(a * half + b, c * half + d) for a, b, c, d in rows.tolist()}


def similarity(one: str, other: str, signatures: Signatures) -> float:
    """The Jaccard similarity of two documents' sets of shingles."""
    a, b = (set(signatures.step.get_shingles(text)[:, 0].tolist()) for text in (one, other))
    return len(a & b) / len(a | b)


def measure(n_pairs: int, config: NearConfig, seed: int) -> dict[str, object]:
    documents, pairs = plant(n_pairs, seed)
    found, signatures = linked(documents, config), Signatures(config, "en")
    rows = []
    for edits in EDITS:
        mine = [(first, copy) for first, copy, share in pairs if share == edits]
        like = [similarity(documents[first], documents[copy], signatures) for first, copy in mine]
        chances = [1 - (1 - s**config.hashes_per_bucket) ** config.buckets for s in like]
        recall, expected = sum(pair in found for pair in mine) / len(mine), sum(chances) / len(mine)
        width = WIDTH * math.sqrt(sum(p * (1 - p) for p in chances)) / len(mine)
        rows.append(
            {
                "edits": edits,
                "similarity": round(sum(like) / len(like), 4),
                "recall": recall,
                "expected": round(expected, 4),
                "interval": [round(expected - width, 4), round(expected + width, 4)],
                "inside": abs(recall - expected) <= width + 1e-9,
            }
        )
    planted = {(first, copy) for first, copy, _ in pairs}
    precision = len(found & planted) / max(1, len(found))
    bands = {"n_grams": config.n_grams, "buckets": config.buckets, "hashes_per_bucket": config.hashes_per_bucket}
    return {"benchmark": "near_duplicates", **bands, "pairs_of_each": n_pairs, "precision": precision, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("pairs", 200), ("buckets", 14), ("hashes", 8), ("n_grams", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = NearConfig(n_grams=options.n_grams, buckets=options.buckets, hashes_per_bucket=options.hashes)
    print(json.dumps(measure(options.pairs, config, options.seed)))


if __name__ == "__main__":
    main()
