"""Seeing that a library warns of nothing."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Of LongRoPE's published files too: version 4 takes no fourth key beside the three that they have.
ADVICE = "Please set the `factor` field of `rope_parameters`"
# Said once where packages with kernels for linear attention are not installed.
PLAINLY = "is falling back to its reference PyTorch implementation"


class Messages(logging.Handler):
    """Collects what is logged at level WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not any(words in record.getMessage() for words in (ADVICE, PLAINLY)):
            self.messages.append(record.getMessage())


@contextmanager
def no_warnings() -> Iterator[None]:
    """Fails where Python warns, or transformers' logger does."""
    handler = Messages()
    loggers = [logging.getLogger(), logging.getLogger("transformers")]  # the latter does not propagate
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert handler.messages == []
