"""Loading and checking a config, which every command does first, before anything is created."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.config.layout_rules import least_ranks
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.errors import UserError


def load_checked(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = 1,
    data: bool = True,
    base: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The config of ``path`` and ``overrides``, checked for ``world_size`` processes (None: those of its Slurm job).

    ``base`` holds default values by section, such as a cluster profile's; keys of the YAML file take precedence.
    With ``data`` the data sources are checked too (their paths exist); without, only the config itself.
    Raises UserError with every problem at once, one line each.
    """
    config = load_config(path, overrides, base)
    problems = check(config, config.slurm.world_size if world_size is None else world_size)
    if data:
        from data.rules import check_data  # its libraries take a second to import

        told = {line.partition("=")[0] for line in problems}
        problems += [
            line for line in check_data(config.data, config.model.vocab_size) if line.partition("=")[0] not in told
        ]
        if not any(line.startswith(("run_dir=", "data.sources[")) for line in problems):
            problems += _check_run_dir(config)
    if problems:
        raise UserError(problems)
    return config


def fewest_ranks(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> int:
    """The fewest processes that the config's layout takes: for commands that train nothing, such as `prepare`."""
    return least_ranks(load_config(path, overrides).parallel)


def _check_run_dir(config: RunConfig) -> list[str]:
    """A line for each data source that would read files that runs write, since each start would change its corpus."""
    from data.rules import check_outside
    from launcher.training.run_parts import CHECKPOINTS, CONFIG, LOGS, METRICS, REPORT
    from parallel.checkpoint.store import MANIFEST, step_name

    written = [CONFIG, METRICS, REPORT, f"{LOGS}/rank-0.log", f"{CHECKPOINTS}/{step_name(1)}/{MANIFEST}"]
    if config.run_dir is not None:
        return check_outside(f"run_dir={config.run_dir!r}", config.run_path, written, config.data)
    runs, written = config.run_path.parent, [f"{config.name}/{name}" for name in written]
    return check_outside(f"run_dir=null ({config.run_path})", runs, written, config.data)
