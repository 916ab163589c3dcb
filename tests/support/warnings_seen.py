"""Checks that a library gives no warnings."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# Also given for published models with LongRoPE: transformers 4 accepts no key beside the three that they have.
ADVICE = "Please set the `factor` field of `rope_parameters`"
# Logged once where packages with kernels for linear attention are not installed.
PLAINLY = "is falling back to its reference PyTorch implementation"


class Messages(logging.Handler):
    """A log handler that collects messages of level WARNING or above, except ADVICE and PLAINLY."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not any(words in record.getMessage() for words in (ADVICE, PLAINLY)):
            self.messages.append(record.getMessage())


@contextmanager
def no_warnings() -> Iterator[None]:
    """A context that fails where Python or transformers' logger gives a warning."""
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
