"""Reading shuffled batches against a bare memory-map copy of the same windows; opening ten billion tokens.

    python benchmarks/data_reading.py [--shape 64x2048x1 ...] [--tokens 50000000] [--rounds 5]

A shape is samples x tokens x files; without one, all of docs/data.md's table. Three sides run in processes of their
own, in turn, on the same files and the same windows in the same order. Copy: each window of seq_len + 1 tokens from a
numpy memmap into an int64 array, one new array a batch. Read: Dataset.read, which finds the samples, looks at their
ids and makes the batch's tokens. All: also its targets, positions and document numbers, which are made when they are
first asked for; the four are three times the copy's bytes. Speeds are million tokens per CPU second; ``ratio`` and
``all_ratio`` are the medians over the rounds of a side's time / the copy's. Prints one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from data.config import DataConfig, SourceConfig
from data.dataset import Dataset, open_dataset
from data.tokenfile import HEADER, MAGIC, TokenFile, bin_path
from data.tokenwriter import TokenFileWriter

VOCAB = 32_000
SPARSE_TOKENS, SPARSE_DOCUMENTS = 10_000_000_000, 5_000_000
FAR_STEP = 1_000_000
COUNTED = 15_360  # samples of a large batch


SHAPES = ("64x2048x1", "64x2048x8", "64x512x1", "16x8192x1", "8x2048x1")
ARRAYS = ("tokens_BS", "targets_BS", "positions_BS", "documents_BS")


def main() -> None:
    """Runs the side named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="SAMPLESxTOKENSxFILES")
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=["copy", "read", "all", "open"])
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    shapes = args.shape or SHAPES
    if args.side is not None:
        set_shape(args, shapes[0])
        side = {"copy": time_copy, "read": time_read, "all": time_all, "open": measure_opening}[args.side]
        print(json.dumps(side(args)))
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        args.folder = Path(folder)
        rows = [compare(args, shape) for shape in shapes]
        write_sparse(args.folder / "sparse")
        print(json.dumps({"benchmark": "data_reading", "shapes": rows, **run_side(args, "open", SHAPES[0])}))


def set_shape(args: argparse.Namespace, shape: str) -> None:
    """The shape's three numbers, as arguments."""
    args.batch, args.seq_len, args.files = map(int, shape.split("x"))


def compare(args: argparse.Namespace, shape: str) -> dict[str, float | str]:
    """All rounds of the three sides at one shape."""
    set_shape(args, shape)
    write_files(args)
    sides = ("copy", "read", "all")
    rounds = [[run_side(args, side, shape)["seconds"] for side in sides] for _ in range(args.rounds)]
    n_tokens = count_batches(args) * args.batch * args.seq_len
    medians = (statistics.median(side) for side in zip(*rounds, strict=True))
    return {
        "shape": shape,
        "ratio": statistics.median(read / copy for copy, read, _ in rounds),
        "all_ratio": statistics.median(each / copy for copy, _, each in rounds),
        **{f"{side}_mtok_per_cpu_second": n_tokens / median / 1e6 for side, median in zip(sides, medians, strict=True)},
    }


def run_side(args: argparse.Namespace, side: str, shape: str) -> dict[str, float]:
    """One side in a fresh process."""
    flags = [f"--side={side}", f"--shape={shape}", f"--folder={args.folder}", f"--tokens={args.tokens}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *flags]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def write_files(args: argparse.Namespace) -> None:
    """Random tokens in documents whose lengths are log-normal, 600 tokens in the middle, as web text has them; once."""
    if bin_path(prefix(args, 0)).exists():
        return
    draw = np.random.default_rng(0)
    for number in range(args.files):
        writer = TokenFileWriter(prefix(args, number), np.dtype(np.uint16))
        while writer.n_tokens < args.tokens // args.files:
            writer.add(draw.integers(0, VOCAB, 1 + int(draw.lognormal(np.log(600), 1))))
        writer.finish()


def prefix(args: argparse.Namespace, number: int) -> Path:
    """The token file of this number."""
    return args.folder / f"tokens-{number + 1}-of-{args.files}"


def write_sparse(path: Path) -> None:
    """Ten billion tokens in documents of 2000, of which the disk holds only the .idx."""
    length = SPARSE_TOKENS // SPARSE_DOCUMENTS
    with bin_path(path).open("wb") as file:
        file.truncate(2 * SPARSE_TOKENS)
    with path.with_name(f"{path.name}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, SPARSE_DOCUMENTS, SPARSE_DOCUMENTS + 1))
        file.write(np.full(SPARSE_DOCUMENTS, length, np.int32).tobytes())
        file.write(np.arange(0, 2 * SPARSE_TOKENS, 2 * length, dtype=np.int64).tobytes())
        file.write(np.arange(SPARSE_DOCUMENTS + 1, dtype=np.int64).tobytes())


def open_files(args: argparse.Namespace) -> Dataset:
    """The files as sources of equal weight."""
    sources = tuple(SourceConfig(path=str(prefix(args, number))) for number in range(args.files))
    return open_dataset(DataConfig(seq_len=args.seq_len, sources=sources), seed=0, vocab_size=VOCAB, split="train")


def count_batches(args: argparse.Namespace) -> int:
    """One pass over the data."""
    return args.tokens // (args.batch * args.seq_len)


def time_read(args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of reading every batch of one pass."""
    dataset = open_files(args)
    start = time.process_time()
    for step in range(count_batches(args)):
        dataset.read(np.arange(step * args.batch, (step + 1) * args.batch))
    return {"seconds": time.process_time() - start}


def time_all(args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of reading every batch of one pass with all of its arrays."""
    dataset = open_files(args)
    start = time.process_time()
    for step in range(count_batches(args)):
        batch = dataset.read(np.arange(step * args.batch, (step + 1) * args.batch))
        for name in ARRAYS:
            getattr(batch, name)
    return {"seconds": time.process_time() - start}


def time_copy(args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of copying the same windows."""
    dataset = open_files(args)
    files = [np.memmap(bin_path(prefix(args, n)), TokenFile(prefix(args, n)).dtype, "r") for n in range(args.files)]
    batches = []
    for step in range(count_batches(args)):
        located = dataset._locate(np.arange(step * args.batch, (step + 1) * args.batch))
        batches.append([column.tolist() for column in located])
    start = time.process_time()
    for file_B, start_B, length_B in batches:
        out = np.empty((args.batch, args.seq_len + 1), np.int64)
        for row, (file, first, length) in enumerate(zip(file_B, start_B, length_B, strict=True)):
            out[row, :length] = files[file][first : first + length]
    return {"seconds": time.process_time() - start}


def measure_opening(args: argparse.Namespace) -> dict[str, float]:
    """Wall seconds and private memory of opening the sparse file and drawing a far step's batch."""
    config = DataConfig(seq_len=args.seq_len, sources=(SourceConfig(path=str(args.folder / "sparse")),))
    before, start = private_mib(), time.perf_counter()
    dataset = open_dataset(config, seed=0, vocab_size=VOCAB, split="train")
    batch = dataset.read(np.arange(FAR_STEP * args.batch, (FAR_STEP + 1) * args.batch))
    seconds = time.perf_counter() - start
    found = {"open_seconds": seconds, "open_private_mib": private_mib() - before, "open_rows": len(batch.tokens_BS)}
    for name in ("count_seconds", "count_again_seconds"):
        start = time.process_time()
        dataset.count(np.arange(FAR_STEP, FAR_STEP + COUNTED))
        found[name] = time.process_time() - start
    return found


def private_mib() -> float:
    """This process's private memory; mapped pages of files are not among it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


if __name__ == "__main__":
    main()
