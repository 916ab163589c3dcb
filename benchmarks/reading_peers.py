"""Times reading shuffled batches beside datatrove's, litdata's and Megatron's readers on the same tokens.

    python benchmarks/reading_peers.py [--shape 8x2048] [--tokens 20000000] [--rounds 3]

Each side reads one pass over the same token ids, batch after batch, in a process of its own; sides run one after
another. The CPU time of all its threads is measured from the second batch on, without opening and indices of shuffles.
Sides:

    ours                 Dataset.read and all of a batch's arrays: tokens, targets, positions and documents
    ours_tokens          Dataset.read and the tokens alone
    datatrove            DatatroveFolderDataset from the first window to the last, as it is meant to be read: tokens
    datatrove_mixed      DatatroveFolderDataset at random windows: tokens
    datatrove_positions  from the first window to the last, with positions that restart at each document
    litdata              StreamingDataset, shuffled, with TokensLoader: tokens, converted to int64
    megatron             GPTDataset, shuffled: tokens, labels, and masks and positions that ignore documents
    megatron_reset       GPTDataset with positions that restart at each document, and no loss at its end

A peer's samples are collated by torch's default_collate. ``times_ours`` is the median over the rounds of a side's
CPU seconds per token / those of Roundtable, of its tokens alone where a peer gives no more; above 1 Roundtable is
faster. A peer that is not installed is named as such. Prints one JSON line.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from data.config import DataConfig, SourceConfig
from data.dataset import open_dataset
from data.tokenfile import bin_path
from data.tokenwriter import TokenFileWriter

VOCAB, EOS = 32_000, 0
ARRAYS = ("tokens_BS", "targets_BS", "positions_BS", "documents_BS")
PACKAGES = {"datatrove": "datatrove", "litdata": "litdata", "megatron": "megatron.core"}
TOKENS_ALONE = ("datatrove", "datatrove_mixed", "litdata")
CHUNK_BYTES = 1 << 26  # of litdata's files, as its documentation on language models uses


def main() -> None:
    """Runs the side named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8x2048", metavar="SAMPLESxTOKENS")
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=list(SIDES))
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    args.batch, args.seq_len = map(int, args.shape.split("x"))
    if args.side is not None:
        print(json.dumps(time_side(args)))
        return
    missing = {peer: "not installed" for peer, package in PACKAGES.items() if not is_installed(package)}
    sides = [side for side in SIDES if side.split("_")[0] not in missing]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        args.folder = Path(folder)
        write_tokens(args)
        if "litdata" in sides:
            run(args, "litdata")  # writes its files
        rounds = [{side: run(args, side) for side in sides} for _ in range(args.rounds)]
    peers = [side for side in sides if not side.startswith("ours")]
    times = {side: statistics.median(each[side] / each[beside(side)] for each in rounds) for side in peers}
    speeds = {side: 1e-6 / statistics.median(each[side] for each in rounds) for side in sides}
    row = {"benchmark": "reading_peers", "shape": args.shape, "rounds": args.rounds, "times_ours": times}
    print(json.dumps(row | {"mtok_per_cpu_second": speeds, "peers": missing}))


def beside(side: str) -> str:
    """The side of Roundtable that returns the same arrays as this side."""
    return "ours_tokens" if side in TOKENS_ALONE else "ours"


def is_installed(package: str) -> bool:
    """Whether the package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def run(args: argparse.Namespace, side: str) -> float:
    """Runs one side in a new process; returns its CPU seconds per token."""
    flags = [f"--side={side}", f"--shape={args.shape}", f"--folder={args.folder}", f"--tokens={args.tokens}"]
    command, environment = [sys.executable, __file__, *flags], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])["seconds_a_token"]


def write_tokens(args: argparse.Namespace) -> None:
    """Writes random tokens in documents of median length 600, each with EOS, in Megatron's and datatrove's formats."""
    draw = np.random.default_rng(0)
    writer = TokenFileWriter(args.folder / "tokens", np.dtype(np.uint16))
    while writer.n_tokens < args.tokens:
        document = draw.integers(1, VOCAB, 1 + int(draw.lognormal(np.log(600), 1)))
        writer.add(np.append(document, EOS))
    writer.finish()
    (args.folder / "datatrove").mkdir()
    os.link(bin_path(args.folder / "tokens"), args.folder / "datatrove" / "tokens.ds")


def time_side(args: argparse.Namespace) -> dict[str, float]:
    """One side's CPU seconds per token, over its batches after the first one."""
    warnings.simplefilter("ignore")  # Megatron's, on what else it could use
    batches = SIDES[args.side](args)
    n_tokens, start = 0, 0.0
    for number, n_rows in enumerate(batches):
        if number == 0:
            start = time.process_time()
            continue
        n_tokens += n_rows * args.seq_len
    return {"seconds_a_token": (time.process_time() - start) / n_tokens}


def ours(args: argparse.Namespace) -> Iterator[int]:
    """Reads batches with Roundtable, with all arrays or tokens only; yields each batch's number of samples."""
    config = DataConfig(seq_len=args.seq_len, sources=(SourceConfig(path=str(args.folder / "tokens")),))
    dataset = open_dataset(config, seed=0, vocab_size=VOCAB, split="train")
    for first in range(0, dataset.n_samples - args.batch, args.batch):
        batch = dataset.read(np.arange(first, first + args.batch))
        for name in ARRAYS[:1] if args.side == "ours_tokens" else ARRAYS:
            getattr(batch, name)
        yield args.batch


def collated(args: argparse.Namespace, sample: Callable[[int], Any], numbers: Any) -> Iterator[int]:
    """Collates batches of a map-style dataset's samples; yields each batch's number of samples."""
    from torch.utils.data import default_collate

    for first in range(0, len(numbers) - args.batch, args.batch):
        default_collate([sample(int(number)) for number in numbers[first : first + args.batch]])
        yield args.batch


def datatrove(args: argparse.Namespace) -> Iterator[int]:
    """Reads batches with datatrove, in the order of the file or at random; yields each batch's number of samples."""
    from datatrove.utils.dataset import DatatroveFolderDataset

    positions = args.side == "datatrove_positions"
    dataset = DatatroveFolderDataset(
        str(args.folder / "datatrove"),
        args.seq_len,
        "*.ds",
        token_size=2,
        return_positions=positions,
        positions_from_eos_token_id=EOS if positions else None,
    )
    numbers = np.arange(len(dataset))
    if args.side == "datatrove_mixed":
        np.random.default_rng(0).shuffle(numbers)
    return collated(args, dataset.__getitem__, numbers)


def litdata(args: argparse.Namespace) -> Iterator[int]:
    """Reads batches with litdata's streaming dataset; yields each batch's number of samples.

    The first call writes litdata's files.
    """
    import torch
    from litdata.streaming import StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    folder, loader = args.folder / "litdata", TokensLoader(block_size=args.seq_len + 1)
    if not folder.exists():
        folder.mkdir()
        writer = BinaryWriter(str(folder), chunk_bytes=CHUNK_BYTES, item_loader=loader)
        tokens = np.fromfile(bin_path(args.folder / "tokens"), np.uint16)
        for number, first in enumerate(range(0, len(tokens), args.seq_len + 1)):
            writer[number] = tokens[first : first + args.seq_len + 1]
        writer.done()
        writer.merge()
    dataset, rows = StreamingDataset(str(folder), item_loader=loader, shuffle=True), []
    for row in dataset:
        rows.append(torch.as_tensor(row).to(torch.int64))
        if len(rows) == args.batch:
            torch.stack(rows)
            rows = []
            yield args.batch


def megatron(args: argparse.Namespace) -> Iterator[int]:
    """Reads batches with Megatron's GPTDataset, shuffled; yields each batch's number of samples.

    Its indices are built before timing begins.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    names = SimpleNamespace(eod=EOS, pad=VOCAB + 1, vocab_size=VOCAB, unique_identifiers={})
    resets = args.side == "megatron_reset"
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=args.seq_len,
        split="1",
        tokenizer=names,  # pyright: ignore[reportArgumentType]
        reset_position_ids=resets,
        reset_attention_mask=False,
        eod_mask_loss=resets,
        create_attention_mask=False,
        path_to_cache=str(args.folder / args.side),
    )
    file = IndexedDataset(str(args.folder / "tokens"))
    n_documents, n_samples = len(file.document_indices) - 1, args.tokens // args.seq_len
    indices = np.arange(n_documents, dtype=np.int32)
    dataset = GPTDataset(file, str(args.folder / "tokens"), indices, n_samples, Split.train, config)
    return collated(args, dataset.__getitem__, range(n_samples))


SIDES: dict[str, Callable[[argparse.Namespace], Iterator[int]]] = {
    "ours": ours,
    "ours_tokens": ours,
    "datatrove": datatrove,
    "datatrove_mixed": datatrove,
    "datatrove_positions": datatrove,
    "litdata": litdata,
    "megatron": megatron,
    "megatron_reset": megatron,
}

if __name__ == "__main__":
    main()
