"""`roundtable eval --text`: a checkpoint's loss on a given text, which need not be part of the run's data."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.config import SourceConfig
from data.dataset import Dataset
from data.documents import files_to_read, read_documents
from data.errors import DataError
from data.opened import Source, packings_of
from data.packed import packed_by_of, write_packing
from data.shards import Shard, plan_shards
from data.shardtask import ShardTask
from data.shardwriter import write_shard
from data.tokenfile import TokenFile
from data.tokenizer import check_kept
from launcher.commands.trained import OTHER_CHECKPOINT, Trained, bos_id, naming_tokenizer, open_trained
from launcher.console import say
from launcher.errors import UserError
from launcher.scratch import scratch_folder
from launcher.training.evaluation import loss_of, perplexity
from launcher.watch.metrics import encode_json
from parallel.processes.stop import undoing


@dataclass
class Corpus:
    """The text as the model reads it: packed like held-out data, attention within documents, each ending in EOS."""

    dataset: Dataset
    n_documents: int
    n_bytes: int  # of UTF-8
    n_targets: int  # tokens that are predicted: all but each document's first


@undoing()
def evaluate_text(path: Path | str, text: str, text_key: str = "text", *, as_json: bool) -> int:
    """Prints the checkpoint's loss per token, bits per byte and perplexity on the file ``text``; returns 0.

    ``text`` may be whatever a data source's path may be: a text file (one document), jsonl, parquet, a folder, a glob.
    Raises UserError where it cannot be read or holds nothing to predict, or where the checkpoint has no tokenizer.
    """
    source = SourceConfig(path=text, text_key=text_key)
    with as_options("--text"):
        files = files_to_read(source, "--text")
        trained = open_trained(path)
        shards = plan_shards(source, files, trained.config.data.shard_bytes, "--text")
        if trained.tokenizer is None:
            problem = f"CHECKPOINT={path} holds no tokenizer, so no text can be read"
            raise UserError([f"{problem}; leave out --text, or set data.tokenizer and train on"])
        with naming_tokenizer(trained.checkpoint, "CHECKPOINT") as found:
            check_kept(trained.tokenizer, found, trained.config.model.vocab_size, OTHER_CHECKPOINT)
        with scratch_folder() as folder:
            corpus = read_corpus(source, shards, trained, trained.tokenizer, folder)
            report(trained, corpus, loss_of(trained, corpus.dataset, corpus.dataset.n_samples), as_json=as_json)
    return 0


@contextmanager
def as_options(option: str) -> Iterator[None]:
    """Turns DataErrors about keys of the data source ``option`` into UserErrors about the command line's options."""
    try:
        yield
    except DataError as error:
        problems = error.problems
        for key, given in ((f"{option}.path=", f"{option}="), (f"{option}.text_key=", "--text-key=")):
            problems = [given + line.removeprefix(key) if line.startswith(key) else line for line in problems]
        raise UserError(problems) from error


def read_corpus(source: SourceConfig, shards: list[Shard], trained: Trained, tokenizer: Path, folder: Path) -> Corpus:
    """The text's documents as a dataset of token files in ``folder``, made as `prepare` makes them."""
    n_bytes, n_documents, prefixes = 0, 0, []
    for number, shard in enumerate(shards):
        n_bytes += sum(len(text.encode(errors="replace")) for text, _ in read_documents(source, shard, "--text"))
        task = ShardTask(folder, number, shard, source, "--text", tokenizer, 0.0, bos_id(trained))
        record = write_shard(task, lambda *_: None, lambda: False)
        n_documents += record.n_documents
        prefixes += [folder / file.name for file in record.files]
    files = tuple(TokenFile(prefix) for prefix in prefixes)
    config = trained.config
    packed_by = packed_by_of(config.data)
    if packed_by is not None:
        for prefix in prefixes:
            write_packing(prefix, config.data.seq_len, packed_by)
    dataset = Dataset(
        [Source(1.0, files, trusted=True, packings=packings_of(files, config.data))],
        seq_len=config.data.seq_len,
        seed=config.seed,
        vocab_size=config.model.vocab_size,
        shuffled=False,
    )
    n_targets = dataset.count(np.arange(dataset.n_samples))[0] if dataset.n_samples else 0
    if n_targets == 0:
        raise UserError([f"--text={source.path} holds no token to predict; give a file with some text"])
    return Corpus(dataset, n_documents, n_bytes, n_targets)


def report(trained: Trained, corpus: Corpus, loss: float, *, as_json: bool) -> None:
    """Prints the loss, bits per byte, perplexity and sizes, in a line or as JSON."""
    bits_per_byte = loss * corpus.n_targets / math.log(2) / corpus.n_bytes
    step, n_targets, n_bytes = trained.checkpoint.step, corpus.n_targets, corpus.n_bytes
    if as_json:
        numbers = {"step": step, "loss": loss, "bits_per_byte": bits_per_byte, "perplexity": perplexity(loss)}
        say(encode_json({**numbers, "tokens": n_targets, "documents": corpus.n_documents, "bytes": n_bytes}))
        return
    say(
        f"step {step}: loss {loss:.4f} a token, {bits_per_byte:.4f} bits a byte (perplexity {perplexity(loss):.2f}) "
        f"over {n_targets} predicted tokens of {corpus.n_documents} documents, {n_bytes} bytes"
    )
