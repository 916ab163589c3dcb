"""Runs that begin and end without training, for tests of which run owns a folder of checkpoints."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.config.tree import CheckpointConfig, RunConfig
from launcher.errors import UserError
from launcher.training.owner import read_run_id
from launcher.training.run_dir import check_run_dir, claim
from parallel.processes.start import run_ranks
from small_models import example_config

SECONDS = 60  # timeout for all runs to begin


def config_of(folder: Path, name: str, place: Path | None) -> RunConfig:
    """The config of a run in FOLDER/NAME whose checkpoints lie in ``place`` (None: in the run directory)."""
    checkpoint = CheckpointConfig(dir=str(place) if place is not None else None)
    return RunConfig(model=example_config("llama"), name=name, run_dir=str(folder / name), checkpoint=checkpoint)


def start(config: RunConfig) -> str:
    """Begins and ends a run as the command does; returns the run id that it drew."""
    check_run_dir(config)
    claim(config).close()
    name = read_run_id(config.run_path)
    assert name is not None
    return name


def at_once(configs: Sequence[RunConfig], meeting: Path) -> tuple[list[str], list[str]]:
    """Starts each run in a process of its own, all at the same time.

    Returns the names of those that began, and the error lines of those that were refused.
    """
    meeting.mkdir()
    answers = run_ranks(begin, len(configs), configs, meeting, timeout_seconds=SECONDS, threads=1)
    began = [config.name for config, problems in zip(configs, answers, strict=True) if problems is None]
    return began, [line for problems in answers if problems is not None for line in problems]


def begin(configs: Sequence[RunConfig], meeting: Path) -> list[str] | None:
    """Starts the config of this rank once all ranks are there; returns why it was refused, or None."""
    rank = int(os.environ["RANK"])
    (meeting / str(rank)).touch()
    while len(list(meeting.iterdir())) < len(configs):
        time.sleep(0)
    try:
        start(configs[rank])
    except UserError as error:
        return error.problems
    return None
