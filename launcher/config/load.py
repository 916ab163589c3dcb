"""Loading a config: defaults, YAML, dotted overrides, validation."""

import os
from collections.abc import Sequence
from pathlib import Path

from launcher.config.overrides import apply_overrides, parse_overrides
from launcher.config.tree import RunConfig
from launcher.config.validate import build_config
from launcher.config.yaml_text import read_yaml_file
from launcher.errors import UserError


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """The config that the YAML file ``path`` and the ``key=value`` overrides describe; defaults fill the rest.

    Types and names are checked here; rules between values are ``launcher.config.rules.check``'s.
    Raises UserError with every problem at once, one line each.
    """
    parsed, problems = parse_overrides(overrides)
    try:
        tree = read_yaml_file(Path(path))
    except UserError as error:
        raise UserError([*error.problems, *problems]) from None
    problems += apply_overrides(tree, parsed)
    config, faults = build_config(tree)
    if config is None or problems:
        raise UserError([*problems, *faults])
    return config
