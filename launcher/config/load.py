"""Loading a config: defaults, YAML, dotted overrides, validation."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.config.overrides import apply_overrides, parse_overrides
from launcher.config.tree import RunConfig
from launcher.config.validate import build_config
from launcher.config.yaml_text import read_yaml_file
from launcher.errors import UserError
from launcher.slurm.rules import PATHS


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> RunConfig:
    """The config that the YAML file ``path`` and the ``key=value`` overrides describe; defaults fill the rest.

    ``base`` holds sections that lie below the file's: a key of theirs counts where the file has none. A leading ``~``
    of a path is the home directory.

    Types and names are checked here; rules between values are ``launcher.config.rules.check``'s.
    Raises UserError with every problem at once, one line each.
    """
    parsed, problems = parse_overrides(overrides)
    try:
        tree = read_yaml_file(Path(path))
    except UserError as error:
        raise UserError([*error.problems, *problems]) from None
    for section, values in (base or {}).items():
        own = tree.get(section)
        if own is None or isinstance(own, dict):
            tree[section] = {**values, **(own or {})}
    problems += apply_overrides(tree, parsed)
    config, faults = build_config(tree)
    if config is None or problems:
        raise UserError([*problems, *faults])
    return _expand_home(config)


def _expand_home(config: RunConfig) -> RunConfig:
    slurm = {key: path and os.path.expanduser(path) for key in PATHS for path in [getattr(config.slurm, key)]}
    return replace(
        config,
        run_dir=config.run_dir and os.path.expanduser(config.run_dir),
        data=replace(config.data, token_dir=os.path.expanduser(config.data.token_dir)),
        checkpoint=replace(config.checkpoint, dir=config.checkpoint.dir and os.path.expanduser(config.checkpoint.dir)),
        slurm=replace(config.slurm, **slurm),
    )
