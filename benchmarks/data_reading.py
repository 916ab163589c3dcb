"""Times reading shuffled batches against a plain memory-map copy of the same windows, and opening ten billion tokens.

    python benchmarks/data_reading.py [--shape 64x2048x1 ...] [--kind plain ...] [--tokens 50000000] [--rounds 5]

A shape is samples x tokens x files; without one, all of docs/data.md's table. Kinds: plain; packed (by best fit);
masked (half of the tokens are no targets); fim (half of the documents' parts are rearranged); cached (token files at a
URL, whose blocks lie in the cache). Sides run in processes of their own, one after another, on the same files and the
same windows in the same order:

    copy     each window of seq_len + 1 tokens from a numpy memmap into an int64 array, one new array a batch
    read     Dataset.read and the batch's tokens as int64
    thread   the work of the thread that reads ahead for a step: Dataset.read, ids checked, documents found
    step     the step's own work on its device, here the CPU: making all arrays; the reading is not timed
    all      Dataset.read and all of the batch's arrays on the host, as a rank of cp or tp gets them

Speeds are million tokens per CPU second; ``ratio`` (of the read), ``thread_ratio``, ``step_ratio`` and ``all_ratio``
are the medians over the rounds of a side's time / the copy's. Prints one JSON line.
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
from data.fim import FillInTheMiddle
from data.masks import MaskWriter
from data.pieces import pieces_of
from data.prepare import prepare
from data.tokenfile import HEADER, MAGIC, TokenFile, bin_path, idx_path, mask_path
from data.tokenwriter import TokenFileWriter

VOCAB = 32_000
SPARSE_TOKENS, SPARSE_DOCUMENTS = 10_000_000_000, 5_000_000
FAR_STEP = 1_000_000
COUNTED = 15_360  # samples of a large batch


SHAPES = ("64x2048x1", "64x2048x8", "64x512x1", "16x8192x1", "8x2048x1")
KINDS = ("plain", "packed", "masked", "fim", "cached")
SIDES = ("copy", "read", "thread", "step", "all")
ARRAYS = ("tokens_BS", "targets_BS", "positions_BS", "documents_BS")


def main() -> None:
    """Runs the side named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="SAMPLESxTOKENSxFILES")
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--side", choices=[*SIDES, "open"])
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    shapes, kinds = args.shape or SHAPES, args.kind or ["plain"]
    if args.side is not None:
        set_shape(args, shapes[0], kinds[0])
        print(json.dumps(measure_opening(args) if args.side == "open" else {"seconds": time_side(args)}))
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        args.folder = Path(folder)
        rows = [compare(args, shape, kind) for kind in kinds for shape in shapes]
        write_sparse(args.folder / "sparse")
        print(json.dumps({"benchmark": "data_reading", "shapes": rows, **run_side(args, "open", SHAPES[0], "plain")}))


def set_shape(args: argparse.Namespace, shape: str, kind: str) -> None:
    """Sets the shape's three numbers and the kind in ``args``."""
    args.batch, args.seq_len, args.files = map(int, shape.split("x"))
    args.one_kind = kind


def compare(args: argparse.Namespace, shape: str, kind: str) -> dict[str, float | str]:
    """Runs all rounds of all sides at one shape; returns the ratios and speeds."""
    set_shape(args, shape, kind)
    write_files(args)
    dataset = open_files(args)  # packs, or brings everything into the cache, before anything is timed
    if kind == "cached":
        for step in range(count_batches(args)):
            dataset.read(samples_of(args, step))
    rounds = [{side: run_side(args, side, shape, kind)["seconds"] for side in SIDES} for _ in range(args.rounds)]
    n_tokens = count_batches(args) * args.batch * args.seq_len
    row: dict[str, float | str] = {"shape": shape, "kind": kind}
    for side in SIDES[1:]:
        name = "ratio" if side == "read" else f"{side}_ratio"
        row[name] = statistics.median(times[side] / times["copy"] for times in rounds)
    for side in SIDES:
        row[f"{side}_mtok_per_cpu_second"] = n_tokens / statistics.median(times[side] for times in rounds) / 1e6
    return row


def run_side(args: argparse.Namespace, side: str, shape: str, kind: str) -> dict[str, float]:
    """Runs one side in a new process; returns its JSON."""
    flags = [
        f"--side={side}",
        f"--shape={shape}",
        f"--kind={kind}",
        f"--folder={args.folder}",
        f"--tokens={args.tokens}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *flags]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def write_files(args: argparse.Namespace) -> None:
    """Writes random tokens in documents of log-normal lengths, median 600 as in web text; once for each shape."""
    if bin_path(prefix(args, 0)).exists():
        return
    draw = np.random.default_rng(0)
    for number in range(args.files):
        writer = TokenFileWriter(prefix(args, number), np.dtype(np.uint16))
        lengths: list[int] = []
        while writer.n_tokens < args.tokens // args.files:
            lengths.append(1 + int(draw.lognormal(np.log(600), 1)))
            writer.add(draw.integers(0, VOCAB, lengths[-1]))
        writer.finish()
        if args.one_kind == "masked":
            write_mask(prefix(args, number), lengths)


def write_mask(path: Path, lengths: list[int]) -> None:
    """Writes a mask in which the second half of each document counts as targets."""
    with mask_path(path).open("wb") as file:
        writer = MaskWriter(file)
        for length in lengths:
            writer.add(np.arange(length) >= length // 2)
        writer.finish(idx_path(path))


def prefix(args: argparse.Namespace, number: int) -> Path:
    """The prefix of the token file of this number; files with masks are separate ones."""
    kind = "masked" if args.one_kind == "masked" else "tokens"
    return args.folder / f"{kind}-{number + 1}-of-{args.files}"


def write_sparse(path: Path) -> None:
    """Writes a token file of ten billion tokens in documents of 2000; the .bin is sparse and takes no disk space."""
    length = SPARSE_TOKENS // SPARSE_DOCUMENTS
    with bin_path(path).open("wb") as file:
        file.truncate(2 * SPARSE_TOKENS)
    with path.with_name(f"{path.name}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, SPARSE_DOCUMENTS, SPARSE_DOCUMENTS + 1))
        file.write(np.full(SPARSE_DOCUMENTS, length, np.int32).tobytes())
        file.write(np.arange(0, 2 * SPARSE_TOKENS, 2 * length, dtype=np.int64).tobytes())
        file.write(np.arange(SPARSE_DOCUMENTS + 1, dtype=np.int64).tobytes())


def open_files(args: argparse.Namespace) -> Dataset:
    """The dataset of the files, as sources of equal weight; prepares it first where the kind needs that."""
    where = "file://" if args.one_kind == "cached" else ""
    sources = tuple(SourceConfig(path=f"{where}{prefix(args, number)}") for number in range(args.files))
    config = DataConfig(
        seq_len=args.seq_len,
        sources=sources,
        packing="best_fit" if args.one_kind == "packed" else "sequential",
        token_dir=str(args.folder / "prepared"),
        cache_dir=str(args.folder / "cache"),
    )
    if args.one_kind in {"packed", "cached"}:
        prepare(config, vocab_size=VOCAB)
    dataset = open_dataset(config, seed=0, vocab_size=VOCAB, split="train")
    if args.one_kind == "fim":
        dataset.fim = FillInTheMiddle(0.5, 0.5, (VOCAB - 3, VOCAB - 2, VOCAB - 1), eos_id=0, seed=0)
    return dataset


def count_batches(args: argparse.Namespace) -> int:
    """The number of batches in one pass over the data."""
    return args.tokens // (args.batch * args.seq_len)


def samples_of(args: argparse.Namespace, step: int) -> np.ndarray:
    """The sample indices of one batch."""
    return np.arange(step * args.batch, (step + 1) * args.batch)


def time_side(args: argparse.Namespace) -> float:
    """CPU seconds of one side for every batch of one pass."""
    dataset = open_files(args)
    if args.side == "copy":
        return time_copy(args, dataset)
    if args.side in {"thread", "step"}:
        return time_training(args, dataset)
    samples = [samples_of(args, step) for step in range(count_batches(args))]
    start = time.process_time()
    for of_step in samples:
        batch = dataset.read(of_step)
        if args.side == "read":
            _ = batch.tokens_BS
        if args.side == "all":
            for name in ARRAYS:
                getattr(batch, name)
    return time.process_time() - start


def time_training(args: argparse.Namespace, dataset: Dataset) -> float:
    """CPU seconds of the thread or the step for every batch of one pass."""
    import torch  # takes seconds, and the other sides do not need it

    from launcher.training.batches import narrow

    device, seconds = torch.device("cpu"), 0.0
    samples = [samples_of(args, step) for step in range(count_batches(args))]
    if args.side == "thread":
        start = time.process_time()
        for of_step in samples:
            narrow(dataset.read(of_step), device)
        return time.process_time() - start
    for of_step in samples:
        kept = narrow(dataset.read(of_step), device)
        start = time.process_time()
        kept.spread(device)
        seconds += time.process_time() - start
    return seconds


def time_copy(args: argparse.Namespace, dataset: Dataset) -> float:
    """CPU seconds of copying the same windows."""
    files = [np.memmap(bin_path(prefix(args, n)), TokenFile(prefix(args, n)).dtype, "r") for n in range(args.files)]
    batches = [ranges_of(dataset, samples_of(args, step)) for step in range(count_batches(args))]
    start = time.process_time()
    for ranges in batches:
        out = (np.zeros if args.one_kind == "packed" else np.empty)((args.batch, args.seq_len + 1), np.int64)
        for row, offset, file, first, length in ranges:
            out[row, offset : offset + length] = files[file][first : first + length]
    return time.process_time() - start


def ranges_of(dataset: Dataset, indices: np.ndarray) -> list[tuple[int, ...]]:
    """(row, offset in it, file, first token, number of tokens) of each range that these samples consist of."""
    file_B, start_B, length_B = dataset._locate(indices)
    rows_B = np.arange(len(file_B))
    columns = (rows_B, np.zeros_like(rows_B), file_B, start_B, length_B)
    if dataset._packings:
        pieces = pieces_of(dataset._packings, file_B, start_B)
        columns = (pieces.row_P, pieces.offset_P, pieces.file_P, pieces.start_P, pieces.length_P)
    return list(zip(*(column.tolist() for column in columns), strict=True))


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
    """This process's private memory in MiB; mapped pages of files do not count."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


if __name__ == "__main__":
    main()
