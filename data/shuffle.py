"""The training order: the sample at each of its places, and the place of a sample within an epoch.

Stages deal the places to the sources (data/stages.py), and each source gives its samples in a new permutation every
epoch (data/order.py). Shape letters: N places or samples.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np

from data.order import permutation_key, permute, unpermute
from data.stages import Stages

EPOCHS = 1 << 40  # more epochs than a source ever has
MOST_KEYS = 4096  # kept, of (source, epoch): 2 MB; a source of few samples has a new one at every few samples


class Shuffle:
    """The training order given by a seed, the stages and the number of samples of each source."""

    def __init__(self, seed: int, stages: Stages, source_samples: Sequence[int]) -> None:
        self.seed, self.stages, self.source_samples = seed, stages, list(source_samples)
        self._first_sample = np.cumsum([0, *source_samples])  # of each source
        self._key = lru_cache(MOST_KEYS)(partial(permutation_key, seed))

    def samples(self, index_N: np.ndarray) -> np.ndarray:
        """int64 [N]: the samples at these places, numbered through all sources."""
        source_N, nth_N = self.stages.deal(index_N)
        sizes_N = np.array(self.source_samples)[source_N]
        epoch_N, sample_N = np.divmod(nth_N, sizes_N)
        visit_N = source_N * EPOCHS + epoch_N
        if len(visit_N) and visit_N.min() == visit_N.max():  # numpy divides faster by a number than by an array of it
            source, epoch = divmod(int(visit_N[0]), EPOCHS)
            permuted_N = permute(sample_N, self.source_samples[source], self._key(source, epoch))
            return int(self._first_sample[source]) + permuted_N
        visits = sorted(set(visit_N.tolist()))
        keys = np.array([self._key(*divmod(visit, EPOCHS)) for visit in visits])
        key_N = keys.T[:, np.searchsorted(visits, visit_N)]
        return self._first_sample[source_N] + permute(sample_N, sizes_N, key_N)

    def places(self, source: int, epoch: int, sample_N: np.ndarray) -> np.ndarray:
        """int64 [N]: the places of these samples of a source within its epoch, from 0."""
        return unpermute(sample_N, self.source_samples[source], self._key(source, epoch))
