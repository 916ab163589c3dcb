"""Documents for a proof: ragged, random, written as token files and read back through the real loader."""

from pathlib import Path

import numpy as np

from data.batch import Batch
from data.config import DataConfig, SourceConfig
from data.dataset import Dataset
from data.tokenwriter import TokenFileWriter
from launcher.config.tree import RunConfig


def write_documents(folder: Path, config: RunConfig, n_samples: int) -> DataConfig:
    """Writes two token files and returns the data config that mixes them.

    Documents of 1 token to two sequences, of an uneven distribution of ids. The second file is so small that it comes
    round in every few samples; its last sample is padded, so that padding is in most batches.
    """
    random = np.random.default_rng(config.seed)
    seq_len, vocab_size = config.data.seq_len, config.model.vocab_size
    large, small = folder / "large", folder / "small"
    _write(large, random, n_tokens=n_samples * seq_len, longest=2 * seq_len, vocab_size=vocab_size)
    _write(small, random, n_tokens=2 * seq_len + seq_len // 3, longest=seq_len // 2, vocab_size=vocab_size)
    sources = (SourceConfig(path=str(large), weight=2.0), SourceConfig(path=str(small), weight=1.0))
    return DataConfig(seq_len=seq_len, sources=sources, token_dir=str(folder))


def _write(prefix: Path, random: np.random.Generator, *, n_tokens: int, longest: int, vocab_size: int) -> None:
    writer = TokenFileWriter(prefix, np.dtype(np.uint16))
    while writer.n_tokens < n_tokens:
        length = min(int(random.integers(1, longest + 1)), n_tokens - writer.n_tokens)
        ids = np.minimum(random.geometric(4.0 / vocab_size, size=length), vocab_size) - 1
        writer.add(ids)
    writer.finish()


class WatchedDataset(Dataset):
    """The real dataset, remembering the sample numbers and batches of the step's reads."""

    reads: list[tuple[np.ndarray, Batch]]

    @classmethod
    def watching(cls, dataset: Dataset) -> "WatchedDataset":
        """The same dataset, watched from now on."""
        watched = cls.__new__(cls)
        watched.__dict__.update(dataset.__dict__)
        watched.reads = []
        return watched

    def read(self, indices: np.ndarray) -> Batch:
        """As Dataset.read."""
        batch = super().read(indices)
        self.reads.append((np.array(indices), batch))
        return batch
