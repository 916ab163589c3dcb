"""Loading a config: defaults, YAML, dotted overrides, validation."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launcher.config.overrides import apply_overrides, parse_overrides
from launcher.config.tree import RunConfig
from launcher.config.validate import build_config
from launcher.config.yaml_text import MAX_BYTES, MAX_VALUES, read_yaml_file
from launcher.errors import UserError
from launcher.slurm.rules import PATHS


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> RunConfig:
    """The config that the YAML file ``path`` and the ``key=value`` overrides describe; defaults fill the rest.

    ``base`` holds default values by section; keys of the file take precedence. A leading ``~`` of a path is the home
    directory.

    Types and names are checked here; rules between values are checked by ``launcher.config.rules.check``.
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
    if _is_too_large(config):
        raise UserError(
            [
                f"{path}: must have at most {MAX_VALUES:,} values and about {MAX_BYTES // 2:,} bytes with every key "
                "written out, as it is saved in the run directory; take globs for data.sources, and shorter texts"
            ]
        )
    return _expand_home(config)


def _is_too_large(config: RunConfig) -> bool:
    """Whether the saved copy, in which every key is written out, might not be read again."""
    tree = asdict(config)
    return _values(tree) > MAX_VALUES or 2 * len(json.dumps(tree)) > MAX_BYTES  # YAML's indents are longer than quotes


def _values(node: Any) -> int:
    """The number of lists, maps, keys and plain values in ``node``."""
    if isinstance(node, dict):
        return 1 + sum(1 + _values(value) for value in node.values())
    return 1 + sum(map(_values, node)) if isinstance(node, (list, tuple)) else 1


def _expand_home(config: RunConfig) -> RunConfig:
    slurm = {key: path and os.path.expanduser(path) for key in PATHS for path in [getattr(config.slurm, key)]}
    return replace(
        config,
        run_dir=config.run_dir and os.path.expanduser(config.run_dir),
        init_from=config.init_from and os.path.expanduser(config.init_from),
        data=replace(
            config.data,
            token_dir=os.path.expanduser(config.data.token_dir),
            cache_dir=os.path.expanduser(config.data.cache_dir),
        ),
        checkpoint=replace(config.checkpoint, dir=config.checkpoint.dir and os.path.expanduser(config.checkpoint.dir)),
        slurm=replace(config.slurm, **slurm),
    )
