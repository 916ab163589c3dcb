"""The first import of DeepSpeed: without torch's compiler, and without its word on the accelerator that it finds.

Each of its ZeRO optimizers imports its Muon, which no run takes and whose decorator torch.compile imports the compiler:
2 s of processor time in each process (2 cores, 2026-11-22).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """torch.compile as a decorator that leaves functions as they are."""
    real = torch.compile
    torch.compile = lambda *_, **__: lambda function: function
    try:
        yield
    finally:
        torch.compile = real


logging.disable(logging.WARNING)
with _nothing_compiled():
    import deepspeed.runtime.zero.muon.muon_optimizer
logging.disable(logging.NOTSET)
deepspeed.utils.logger.setLevel(logging.ERROR)
