"""Samples for measurements without token files: each is one document of random tokens, as long as a sequence."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from launcher.config.tree import RunConfig
from launcher.training.batches import HostBatch


class WholeSequences:
    """A stand-in for a dataset. No position is padding, and every target counts, the last of a sequence too."""

    def __init__(self, config: RunConfig) -> None:
        self.seq_len, self.vocab_size, self.seed = config.data.seq_len, config.model.vocab_size, config.seed

    def read(self, indices: np.ndarray) -> HostBatch:
        """The samples with these numbers, in the host's memory. The same number always gives the same tokens."""
        draw = [np.random.default_rng([self.seed, int(number)]) for number in indices.ravel()]
        rows = [each.integers(0, self.vocab_size, self.seq_len + 1) for each in draw]
        tokens_BS = torch.from_numpy(np.stack(rows).astype(np.int64))
        positions_BS = torch.arange(self.seq_len, dtype=torch.int32).expand(len(rows), -1).contiguous()
        documents_BS = torch.from_numpy(np.zeros((len(rows), self.seq_len), dtype=np.int32))
        return HostBatch(tokens_BS[:, :-1], tokens_BS[:, 1:], positions_BS, documents_BS, has_padding=False)

    def count(self, indices: np.ndarray) -> tuple[int, int]:
        """The number of targets that count, and of tokens, in these samples."""
        return indices.size * self.seq_len, indices.size * self.seq_len

    def count_further(self, indices: np.ndarray, depth: int) -> list[int]:
        """The numbers of targets that count 2, 3, ... tokens ahead, one for each depth of multi-token prediction."""
        return [indices.size * (self.seq_len - ahead) for ahead in range(1, depth + 1)]

    def progress(self, consumed: int, skipped: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """An empty dict, as these samples have no epochs."""
        return {}
