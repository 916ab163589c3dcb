"""The harness itself: whether it is here, what it prints, and how far the templates of a task's file may reach."""

import contextlib
import importlib.util
import io
import logging
import os
import threading
from collections.abc import Iterator

from launcher.errors import UserError

PROBE = "{{ ''.__class__.__mro__ }}"  # where a template that wants to run code begins


def need_harness(key: str) -> None:
    """Raises UserError where the harness is not installed. ``key`` is what the user asked for it by."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError([f"{key} needs lm-evaluation-harness, which is not installed; pip install 'roundtable[eval]'"])


def harness_version() -> str:
    """The installed version."""
    from importlib.metadata import version

    return version("lm-eval")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """While it is entered, what the harness and its libraries print and log is dropped: bars, hints, warnings."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap: a process forked here would hold torch's threads
    lock_bars_by_threads()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def lock_bars_by_threads() -> None:
    """Gives the harness's bars a lock without a semaphore, of which multiprocessing complains after a kill."""
    from tqdm import tqdm

    if not hasattr(tqdm, "_lock"):  # it makes one of its own with its first bar
        tqdm.set_lock(threading.RLock())


def confine_templates() -> None:
    """Has jinja2's sandbox render tasks' templates, in this process from now on: in them, too, code can be written.

    Raises UserError where this version of the harness does not take it.
    """
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    if not isinstance(utils.env, SandboxedEnvironment):
        confined = SandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
        confined.filters.update(utils.env.filters)
        utils.env = confined
    with contextlib.suppress(SecurityError):
        utils.apply_template(PROBE, {})
        told = f"lm-eval {harness_version()} cannot be kept from running code in the templates of a task's file"
        raise UserError(
            [f"{told}; install the version in pyproject.toml, or use --allow-task-code for files you trust"]
        )
