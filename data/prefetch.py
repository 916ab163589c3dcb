"""Fetching blocks of a remote file ahead of their use, with a few threads."""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from data.block_cache import BlockCache

N_THREADS = 8  # a store answers in tens of milliseconds, many requests at a time


class Prefetcher:
    """Fetches blocks into a cache. Errors are ignored here: reading the block tries again, and raises them."""

    def __init__(self, blocks: BlockCache) -> None:
        self._blocks = blocks
        self._pool: tuple[int, ThreadPoolExecutor] | None = None  # with its process: threads do not survive a fork
        self._under_way: set[int] = set()
        self._lock = threading.Lock()

    def want(self, numbers: Iterable[int]) -> None:
        """Begins to fetch the blocks that are neither in the cache nor being fetched; returns at once."""
        for number in numbers:
            with self._lock:
                if number in self._under_way or self._blocks.holds(number):
                    continue
                self._under_way.add(number)
            self._threads().submit(self._bring, number)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = (os.getpid(), ThreadPoolExecutor(N_THREADS, thread_name_prefix="blocks ahead"))
        return self._pool[1]

    def _bring(self, number: int) -> None:
        try:
            with suppress(Exception):
                self._blocks.fetch(number)
        finally:
            with self._lock:
                self._under_way.discard(number)
