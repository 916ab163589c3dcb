"""Documents for a proof: ragged, random, written as token files and read back through the real loader."""

from pathlib import Path

import numpy as np

from data.batch import Batch
from data.config import DataConfig, SourceConfig
from data.dataset import Dataset
from data.tokenwriter import TokenFileWriter
from launcher.config.tree import RunConfig


def write_documents(folder: Path, config: RunConfig, n_samples: int) -> DataConfig:
    """Writes two token files for training and one held-out file, and returns the data config that reads them.

    Documents have 1 token to two sequences, with unevenly distributed ids. The second file is so small that it is
    repeated every few samples; its last sample is padded, so most batches hold padding. The held-out file has
    train.eval_sequences samples, of which the second holds no target and the last is padded.
    """
    random = np.random.default_rng(config.seed)
    seq_len, vocab_size = config.data.seq_len, config.model.vocab_size
    large, small, heldout = folder / "large", folder / "small", folder / "heldout"
    _write(large, random, n_tokens=n_samples * seq_len, longest=2 * seq_len, vocab_size=vocab_size)
    _write(small, random, n_tokens=2 * seq_len + seq_len // 3, longest=seq_len // 2, vocab_size=vocab_size)
    n_tokens = (config.train.eval_sequences - 1) * seq_len + seq_len // 2
    short = range(seq_len, 2 * seq_len + 1)  # documents of one token, in which nothing is predicted
    _write(heldout, random, n_tokens=n_tokens, longest=seq_len, vocab_size=vocab_size, short=short)
    sources = (SourceConfig(path=str(large), weight=2.0), SourceConfig(path=str(small), weight=1.0))
    return DataConfig(seq_len=seq_len, sources=sources, token_dir=str(folder), heldout_path=str(heldout))


def _write(
    prefix: Path,
    random: np.random.Generator,
    *,
    n_tokens: int,
    longest: int,
    vocab_size: int,
    short: range = range(0),
) -> None:
    """Writes documents of random lengths, ``n_tokens`` in all; within the token range ``short`` each has one token."""
    writer = TokenFileWriter(prefix, np.dtype(np.uint16))
    while writer.n_tokens < n_tokens:
        length = min(int(random.integers(1, longest + 1)), n_tokens - writer.n_tokens)
        if writer.n_tokens < short.stop:
            length = 1 if writer.n_tokens >= short.start else min(length, short.start - writer.n_tokens)
        ids = np.minimum(random.geometric(4.0 / vocab_size, size=length), vocab_size) - 1
        writer.add(ids)
    writer.finish()


class WatchedDataset(Dataset):
    """The real dataset, with the sample numbers and batches that were read kept in ``reads``."""

    reads: list[tuple[np.ndarray, Batch]]

    @classmethod
    def watching(cls, dataset: Dataset) -> "WatchedDataset":
        """A copy of ``dataset`` that notes what is read of it."""
        watched = cls.__new__(cls)
        watched.__dict__.update(dataset.__dict__)
        watched.reads = []
        return watched

    def read(self, indices: np.ndarray) -> Batch:
        """The batch of these samples, which is also kept in ``reads``."""
        batch = super().read(indices)
        self.reads.append((np.array(indices), batch))
        return batch
