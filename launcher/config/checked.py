"""What every command does first: load the config and check it, before anything is created."""

import os
from collections.abc import Sequence

from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.errors import UserError


def load_checked(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, world_size: int = 1, data: bool = True
) -> RunConfig:
    """The config of ``path`` and ``overrides``, which can run on ``world_size`` processes.

    With ``data`` the sources are looked at too (paths exist, weights are positive); without, only the config itself.
    Raises UserError with every problem at once, one line each.
    """
    config = load_config(path, overrides)
    problems = check(config, world_size)
    if data:
        from data.rules import check_data  # its libraries take a second to import

        told = {line.partition("=")[0] for line in problems}
        problems += [
            line for line in check_data(config.data, config.model.vocab_size) if line.partition("=")[0] not in told
        ]
    if problems:
        raise UserError(problems)
    return config
