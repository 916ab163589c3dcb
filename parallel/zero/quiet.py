"""Imports DeepSpeed for the first time, without loading torch's compiler and without its log line on the accelerator.

Each of DeepSpeed's ZeRO optimizers imports its Muon, which no run uses and whose decorator, torch.compile, would import
the compiler: 2 s of processor time in each process (2 cores, 2026-11-22).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _leave_as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """A stand-in for the decorator torch.compile, with or without arguments, that compiles nothing."""
    return function if function is not None else lambda decorated: decorated


@contextmanager
def _quiet_and_uncompiled() -> Iterator[None]:
    compile_, level = torch.compile, logging.root.manager.disable
    torch.compile = _leave_as_it_is
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        torch.compile = compile_


with _quiet_and_uncompiled():
    import deepspeed.runtime.zero.muon.muon_optimizer
deepspeed.utils.logger.setLevel(logging.ERROR)
