"""Controls lm-evaluation-harness: requires that it is installed, silences it, and sandboxes tasks' templates."""

import contextlib
import importlib.util
import io
import logging
import os
import threading
from collections.abc import Iterator

from launcher.errors import UserError

PROBE = "{{ ''.__class__.__mro__ }}"  # the usual first step of a template that tries to run code


def need_harness(key: str) -> None:
    """Raises UserError where the harness is not installed. ``key`` is the option that needs it, for the message."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError([f"{key} needs lm-evaluation-harness, which is not installed; pip install 'roundtable[eval]'"])


def harness_version() -> str:
    """The version of lm-evaluation-harness that is installed."""
    from importlib.metadata import version

    return version("lm-eval")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A context in which everything that the harness and its libraries print and log is discarded."""
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
    """Gives tqdm's bars a thread lock instead of a semaphore, about which multiprocessing warns after a kill."""
    from tqdm import tqdm

    if not hasattr(tqdm, "_lock"):  # it makes one of its own with its first bar
        tqdm.set_lock(threading.RLock())


def confine_templates() -> None:
    """Makes the harness render tasks' templates in jinja2's sandbox, in this process from now on.

    Without it, a template in a task's file could run code. Raises UserError where this version of the harness does not
    use the sandbox.
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
