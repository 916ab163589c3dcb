"""Tokens for a profile: the config's own where they are prepared, else random ones in temporary token files."""

from pathlib import Path

import numpy as np

from data.dataset import Dataset, open_dataset
from data.opened import Source
from data.prepared import find_prepared
from data.tokenfile import TokenFile, token_dtype
from data.tokenwriter import TokenFileWriter
from launcher.config.tree import RunConfig
from launcher.scratch import scratch_folder

LONGEST = 2048  # the most tokens of a random document
MOST = 1 << 22  # the most random tokens that are written; they are repeated after that


def open_tokens(config: RunConfig, n_samples: int) -> tuple[Dataset, bool]:
    """The training samples, and whether they are the config's own; if not, they are ``n_samples`` of random tokens.

    Random tokens are the same on all ranks. Their files are removed as soon as they are open.
    """
    if config.data.sources and find_prepared(config.data, config.model.vocab_size) is not None:
        own = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
        return own, True
    with scratch_folder() as folder:
        file = write_random(folder / "random", config, n_samples)
    source = Source(1.0, (file,), trusted=True, name="random")
    seq_len, vocab_size = config.data.seq_len, config.model.vocab_size
    return Dataset([source], seq_len=seq_len, seed=config.seed, vocab_size=vocab_size, shuffled=True), False


def write_random(prefix: Path, config: RunConfig, n_samples: int) -> TokenFile:
    """Token files of random documents of up to LONGEST tokens, mapped into memory."""
    rng = np.random.default_rng(config.seed)
    n_tokens = max(config.data.seq_len + 1, min(MOST, n_samples * config.data.seq_len))
    writer = TokenFileWriter(prefix, token_dtype(config.model.vocab_size))
    while writer.n_tokens < n_tokens:
        length = int(rng.integers(2, LONGEST + 1))
        writer.add(rng.integers(0, config.model.vocab_size, length))
    writer.finish()
    return TokenFile(prefix)
