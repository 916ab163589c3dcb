"""Logs the rows of metrics.jsonl to Weights & Biases, through the ``wandb`` package, under the same keys.

A run never waits long for W&B and never stops because of it: a failure is announced in one line, and the run goes on
without W&B. Files lie in RUN_DIR/wandb, and so does the run's id, so that a resumed run continues the same charts.
Offline files can be seen in a terminal with ``wandb leet`` and uploaded later with ``wandb sync``.
"""

import contextlib
import logging
import netrc
import os
import re
import secrets
import shlex
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil

from data.errors import reason_of
from launcher.config.tree import WandbConfig
from launcher.console import tell
from launcher.watch.null_run import NullRun
from launcher.watch.wandb_import import wandb
from launcher.watch.wandb_read import is_whole

INIT_SECONDS = 30.0  # an unreachable server costs the start of a run at most this
FINISH_SECONDS = 30.0  # and its end at most this; the rest stays on disk for `wandb sync`
ANSWER_SECONDS = 30.0  # W&B's service is given up where a call to it does not return for so long
REACH_SECONDS = 5.0  # the longest wait for the server's answer before a job is submitted
RUN_ID_FILE = "run_id"

HAS_ALL = "metrics.jsonl has every number"
WITHOUT = f"training goes on, {HAS_ALL}"

SERVICE = "wandb-core"  # the process that wandb starts; it writes to disk and talks to the server

Announce = Callable[[str], None]


class NoAnswer(Exception):
    """W&B's service has not answered a call in time."""


class WandbRun:
    """An open W&B run, online or offline. The first failure is announced; after it, nothing more is logged."""

    def __init__(self, run: wandb.Run, run_dir: Path, announce: Announce) -> None:
        self._run: wandb.Run | None = run
        self._run_dir = run_dir
        self._announce = announce

    def log(self, row: Mapping[str, Any]) -> None:
        """Logs one row. Charts use its ``step`` as their axis, so several rows may have the same step.

        The values must be plain Python (``plain_row``), since W&B turns tensors into histograms.
        """
        if self._run is not None:
            run = self._run
            self._attempt(f"logging stopped at step {row['step']}", lambda: run.log(dict(row)), ANSWER_SECONDS)

    def finish(self, exit_code: int = 0) -> None:
        """Ends the run within about FINISH_SECONDS; what was not uploaded stays on disk. A second call does nothing."""
        if self._run is not None:
            run, self._run = self._run, None
            seconds = FINISH_SECONDS + ANSWER_SECONDS
            ended = self._attempt("not everything was uploaded", lambda: run.finish(exit_code=exit_code), seconds)
            tear_down()
            remove_temporary_folders(self._run_dir)
            if ended:
                self._check_file(Path(run.dir).parent / f"run-{run.id}.wandb")

    def _check_file(self, path: Path) -> None:
        """Announces a file that lacks rows: on a full disk W&B's service drops them without an error."""
        try:
            whole = is_whole(path)
        except (OSError, ValueError):
            whole = False
        if not whole:
            self._announce(
                f"W&B: {path} could not be written to its end and lacks rows, as where its disk is full; {HAS_ALL}"
            )

    def _attempt(self, what: str, act: Callable[[], None], seconds: float) -> bool:
        """Calls ``act`` and returns whether it succeeded within ``seconds``; a failure is announced and ends W&B."""
        try:
            within(seconds, act)
        except Exception as error:  # wandb raises undocumented types of its own; none of them may end the training
            self._run = None
            self._announce(f"W&B: {what}: {reason_of(error)}; {WITHOUT}")
            tear_down()
            return False
        return True


def open_wandb(
    config: WandbConfig,
    run_config: Mapping[str, Any],
    run_dir: Path,
    name: str,
    announce: Announce = tell,
) -> WandbRun | NullRun:
    """Opens the W&B run, on rank 0 only; returns within about INIT_SECONDS and never raises because of W&B.

    ``run_config`` is the resolved config as nested dicts. The W&B run whose id is saved in ``run_dir`` is continued;
    without one a new run begins. Mode auto follows WANDB_MODE where it is set; otherwise it is online where a key is
    found (WANDB_API_KEY, netrc or wandb's settings; no network is used) and offline where not. Where online does not
    work, the run is opened offline; where that fails too, or the mode is disabled, a NullRun is returned.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb's own telemetry writes to stderr when it fails
    logging.raiseExceptions = False  # on a full disk each line of wandb's own log would be a traceback
    wandb_dir = run_dir / "wandb"
    give_cache(wandb_dir / "cache")
    mode = choose_mode(config.mode)
    if mode == "disabled":
        return NullRun()
    try:
        wandb_dir.mkdir(parents=True, exist_ok=True)
        run_id = saved_run_id(run_dir) or secrets.token_hex(4)
        (wandb_dir / RUN_ID_FILE).write_text(run_id + "\n")
    except OSError as error:
        announce(f"W&B: {wandb_dir} cannot be written: {error.strerror}; {WITHOUT}")
        return NullRun()
    remove_temporary_folders(run_dir)  # those of a run that was killed
    arguments = {"project": config.project, "entity": config.entity, "id": run_id, "name": name, "dir": str(run_dir)}
    run = _init(mode, arguments, run_config, announce)
    if run is None and mode == "online":
        run = _init("offline", arguments, run_config, announce)
    if run is None:
        return NullRun()
    upload = f"`wandb sync {shlex.quote(str(wandb_dir))}/offline-run-*` uploads it"
    announce(f"W&B: offline; {upload}" if run.offline else f"W&B: {run.url}")
    return WandbRun(run, run_dir, announce)


def give_cache(folder: Path) -> None:
    """Makes W&B's service write its log and cache to ``folder`` where the user's cache directory cannot be written.

    The service would otherwise write every line of its log to stderr. Must be called before the service starts;
    ``choose_mode`` may start it. Sets XDG_CACHE_HOME in this process's environment.
    """
    usual = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", "/dev/null"), ".cache")
    try:
        os.makedirs(os.path.join(usual, "wandb", "logs"), exist_ok=True)  # as the service would
    except OSError:
        os.environ["XDG_CACHE_HOME"] = str(folder.absolute())


def remove_temporary_folders(run_dir: Path) -> None:
    """Removes the temporary folders that an open W&B run has in RUN_DIR/wandb; no W&B run may be open."""
    for folder in (run_dir / "wandb").glob("*run-*/tmp"):
        shutil.rmtree(folder, ignore_errors=True)


def saved_run_id(run_dir: Path) -> str | None:
    """The W&B id under which this run directory was logged, or None."""
    path = run_dir / "wandb" / RUN_ID_FILE
    text = path.read_text(errors="replace").strip() if path.exists() else ""
    return text if re.fullmatch(r"[\w-]+", text) else None


def choose_mode(mode: Literal["auto", "online", "offline", "disabled"]) -> Literal["online", "offline", "disabled"]:
    """The mode itself unless it is auto; auto is WANDB_MODE where set, else online with a key and offline without."""
    if mode != "auto":
        return mode
    match os.environ.get("WANDB_MODE"):
        case ("online" | "offline" | "disabled") as chosen:
            return chosen
        case _:
            return "online" if has_key() else "offline"


def has_key() -> bool:
    """Whether wandb would find a key for its server in the environment, its settings or netrc; no network is used."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        settings = wandb.setup(settings=_settings()).settings
    except (wandb.Error, ValueError, OSError):  # unusable settings: init would fail on them as well
        return False
    return bool(settings.api_key) or any(_netrc_has(host) for host in _hosts(settings.base_url))


def unreachable(seconds: float = REACH_SECONDS) -> str | None:
    """One line saying why W&B's server did not answer within ``seconds``; None where it answered, even with an error.

    Raises wandb.Error where wandb's settings cannot be used.
    """
    address = wandb.setup(settings=_settings()).settings.base_url
    try:
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(address, timeout=seconds):
            return None
    except (OSError, ValueError) as error:  # OSError includes URLError and TimeoutError
        reason = getattr(error, "reason", None) or error
        return f"no answer from {address} within {seconds:g} s ({' '.join(str(reason).split())})"
    return None


def _hosts(base_url: str) -> set[str]:
    """The hosts whose netrc entries count for a server; wandb's default server is also listed as api.wandb.ai."""
    default = wandb.Settings().base_url
    return {urlsplit(base_url).netloc} | ({"api.wandb.ai"} if base_url == default else set())


def _netrc_has(host: str) -> bool:
    path = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")  # unchanged where the home directory is unknown
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, ValueError, netrc.NetrcParseError):  # ValueError: the file is not text
        return False


def _settings() -> wandb.Settings:
    """Roundtable's settings for wandb: silent, with timeouts.

    wandb also reads the user's settings and fails where the user has no home directory, so WANDB_CONFIG_DIR is set.
    """
    if os.path.expanduser("~") == "~":
        os.environ.setdefault("WANDB_CONFIG_DIR", os.devnull)
    return wandb.Settings(
        silent=True,
        quiet=True,
        console="off",
        init_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
    )


def _init(
    mode: Literal["online", "offline"],
    arguments: Mapping[str, Any],
    run_config: Mapping[str, Any],
    announce: Announce,
) -> wandb.Run | None:
    """The opened run, or None after announcing why not."""
    try:
        if mode == "online" and not has_key():  # wandb would ask for one on the terminal
            raise wandb.Error("no key; run `wandb login` or set WANDB_API_KEY")
        wandb.setup(settings=_settings())
        run = wandb.init(
            mode=mode,
            config=dict(run_config),
            resume="allow",
            allow_val_change=True,  # a resumed run may have another batch size, layout, ...
            settings=_settings(),
            **arguments,
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        for name in ("eval_loss", "eval_loss/*"):
            run.define_metric(name, step_metric="step", summary="last,min")
    except Exception as error:  # as in _attempt: nothing that wandb raises may end the training
        announce(f"W&B: {mode} does not work: {reason_of(error)}")
        tear_down()
        return None
    return run


def tear_down() -> None:
    """Stops wandb's service, so that the same run id can be opened again and wandb does nothing at exit."""
    with contextlib.suppress(Exception, SystemExit):  # raised for a service that has died; that was announced
        within(ANSWER_SECONDS, wandb.teardown)


def within(seconds: float, act: Callable[[], None]) -> None:
    """Calls ``act``, which talks to wandb's service, in a thread, and raises what it raises.

    Raises NoAnswer where ``act`` has not returned within ``seconds``. The service is then killed, because ``act``
    would wait for it forever.
    """
    ended: Future[None] = Future()

    def run() -> None:
        try:
            ended.set_result(act())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="W&B", daemon=True).start()
    try:
        ended.result(seconds)
    except TimeoutError:
        if ended.done():  # ``act`` itself raised a TimeoutError
            raise
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.name() == SERVICE:
                    child.kill()
        raise NoAnswer(f"its service has not answered for {seconds:g} s") from None
