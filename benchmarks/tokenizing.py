"""Times making token files from a jsonl file, against the tokenizer alone, and beside datatrove and Megatron.

    python benchmarks/tokenizing.py [--megabytes 10] [--rounds 3]

The corpus is Python's standard library, one record for each file, repeated; the tokenizer, of 8192 ids, is trained on
it. Each side runs in a process of its own with one thread, one side after another; CPU time is measured, after imports.
Sides:

    alone      tokenizers' encode_batch_fast of all texts, which lie in memory, in batches as ``prepare`` makes them
    ours       what a worker of ``prepare`` does with a shard: read, hash, tokenize, write, sync, hash
    datatrove  JsonlReader and MegatronDocumentTokenizer
    megatron   json.loads, the tokenizer called for each text, IndexedDatasetBuilder: what its tools/preprocess_data.py,
               which its package leaves out, does in each of its processes

``share_of_alone`` is the median over the rounds of the tokenizer's CPU time per token / Roundtable's; ``times_ours``
that of a peer's / Roundtable's, above 1 where Roundtable is faster. A peer that is not installed is named as such.
Prints one JSON line.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.config import DataConfig, SourceConfig
from data.prepare import _begin_source, plan_sources
from data.shardwriter import BATCH_CHARACTERS, write_shard
from data.tokenfile import TokenFile
from data.tokenizer import load_fast, read_info
from data.tokenizer_setup import set_up_tokenizer

VOCAB = 8192
END = "<|endoftext|>"
PACKAGES = {"datatrove": ("datatrove", "orjson"), "megatron": ("megatron.core",)}  # orjson: what JsonlReader needs


def main() -> None:
    """Runs the side named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=list(SIDES))
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(time_side(args)))
        return
    missing = {
        peer: f"{package} is not installed"
        for peer, packages in PACKAGES.items()
        for package in packages
        if not is_installed(package)
    }
    sides = [side for side in SIDES if side not in missing]
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        args.folder = Path(folder)
        write_corpus(args)
        tokenizer_of(args)
        rounds = [{side: run(args, side) for side in sides} for _ in range(args.rounds)]
    counts = {side: {each[side]["n_tokens"] for each in rounds} for side in sides}
    times = [{side: each[side]["seconds"] / each[side]["n_tokens"] for side in sides} for each in rounds]
    row = {
        "benchmark": "tokenizing",
        "n_tokens": {side: sorted(found) for side, found in counts.items()},
        "share_of_alone": statistics.median(each["alone"] / each["ours"] for each in times),
        "times_ours": {
            side: statistics.median(each[side] / each["ours"] for each in times) for side in sides if side in PACKAGES
        },
        "mtok_per_cpu_second": {side: 1e-6 / statistics.median(each[side] for each in times) for side in sides},
        "peers": missing,
    }
    print(json.dumps(row))


def is_installed(package: str) -> bool:
    """Whether the package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def run(args: argparse.Namespace, side: str) -> dict[str, float]:
    """Runs one side in a new process; returns its seconds and tokens."""
    command = [sys.executable, __file__, f"--side={side}", f"--folder={args.folder}"]
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def write_corpus(args: argparse.Namespace) -> None:
    """Writes Python's standard library as jsonl, repeated until the file has the megabytes asked for."""
    corpus(args).parent.mkdir()
    n_bytes, paths = 0, sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    with corpus(args).open("w") as file:
        while n_bytes < args.megabytes * 10**6:
            for path in paths:
                text = path.read_text(errors="replace")
                if text and n_bytes < args.megabytes * 10**6:
                    n_bytes += file.write(json.dumps({"text": text}) + "\n")


def corpus(args: argparse.Namespace) -> Path:
    """The path of the jsonl file."""
    return args.folder / "corpus" / "texts.jsonl"


def config_of(args: argparse.Namespace) -> DataConfig:
    """The data config for ``prepare``: one source, nothing held out."""
    source = SourceConfig(path=str(corpus(args)))
    return DataConfig(sources=(source,), token_dir=str(args.folder / "tokens"), heldout_fraction=0.0)


def tokenizer_of(args: argparse.Namespace) -> Path:
    """The folder of the tokenizer, which is trained at the first call."""
    config = config_of(args)
    plans = plan_sources(config, VOCAB)
    folder = set_up_tokenizer(config, VOCAB, [(plan.source, plan.shards, plan.key) for plan in plans])
    assert folder is not None
    return folder


def time_side(args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds and tokens of one side."""
    warnings.simplefilter("ignore")
    out = args.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    work = SIDES[args.side](args, out)
    start = time.process_time()
    n_tokens = work()
    return {"seconds": time.process_time() - start, "n_tokens": n_tokens}


def alone(args: argparse.Namespace, out: Path) -> Callable[[], int]:
    """A function that only tokenizes; returns the number of tokens, with one for the end of each document."""
    tokenizer, batches, n_characters = load_fast(tokenizer_of(args)), [[]], 0
    texts = [json.loads(line)["text"] for line in corpus(args).open()]
    for text in texts:
        batches[-1].append(text)
        n_characters += len(text)
        if n_characters >= BATCH_CHARACTERS:
            batches.append([])
            n_characters = 0

    def work() -> int:
        n_tokens = len(texts)
        for batch in batches:
            n_tokens += sum(len(each) for each in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
        return n_tokens

    return work


def ours(args: argparse.Namespace, out: Path) -> Callable[[], int]:
    """A function that writes all shards as a worker of ``prepare`` does; returns the number of tokens."""
    config = config_of(args)
    (plan,) = plan_sources(config, VOCAB)
    tasks = _begin_source(config, plan, tokenizer_of(args))
    for path in tasks[0].folder.glob("*-0*"):
        path.unlink()

    def work() -> int:
        records = [write_shard(task, lambda *_: None, lambda: False) for task in tasks]
        return sum(file.n_tokens for record in records for file in record.files)

    return work


def datatrove(args: argparse.Namespace, out: Path) -> Callable[[], int]:
    """A function that runs datatrove's reader and tokenizer; returns the number of tokens."""
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer
    from loguru import logger

    logger.remove()
    reader = JsonlReader(str(corpus(args).parent))
    writer = MegatronDocumentTokenizer(str(out), "out", str(tokenizer_of(args) / "tokenizer.json"), END)
    _ = writer.tokenizer

    def work() -> int:
        writer.run(reader.run())
        (found,) = out.glob("*.bin")
        return TokenFile(found.with_suffix("")).n_tokens

    return work


def megatron(args: argparse.Namespace, out: Path) -> Callable[[], int]:
    """A function that tokenizes one text after another into Megatron's builder; returns the number of tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from transformers import AutoTokenizer

    folder = tokenizer_of(args)
    tokenizer, end = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), read_info(folder).eos_id

    def work() -> int:
        builder = IndexedDatasetBuilder(str(out / "out.bin"), dtype=np.uint16)
        with corpus(args).open(encoding="utf-8") as file:
            for line in file:
                ids = tokenizer(json.loads(line)["text"]).input_ids
                ids.append(end)
                builder.add_document(ids, [len(ids)])  # pyright: ignore[reportArgumentType]
        builder.finalize(str(out / "out.idx"))
        return TokenFile(out / "out").n_tokens

    return work


SIDES: dict[str, Callable[[argparse.Namespace, Path], Callable[[], int]]] = {
    "alone": alone,
    "ours": ours,
    "datatrove": datatrove,
    "megatron": megatron,
}

if __name__ == "__main__":
    main()
