"""Several runs from one file: the base config's, each with overrides of its own.

    grid:                                  # every combination of these values
      optimizer.lr: [1e-3, 3e-4]
      seed: [0, 1]
    runs:                                  # and these, one by one
      - {name: large, train.global_batch_size: 512, optimizer.lr: 2e-3}
    at_once: 2                             # no more at the same time

A run is named by its ``name``, or by the keys' last words and their values: lr=0.001,seed=0. Its directory lies in the
base config's run directory, under that name.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.checked import load_checked
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.config.words import show
from launcher.config.yaml_text import read_yaml_file
from launcher.errors import UserError

SECTIONS = ("grid", "runs", "at_once")
TAKEN = ("logs", "slurm")  # folders that a sweep's directory has besides those of its runs
MOST_RUNS = 1000  # Slurm takes arrays of 1001 tasks, unless a site says otherwise
LONGEST_NAME = 200  # bytes; file systems allow 255, and a folder's name here is a job's as well

Overrides = dict[str, Any]  # dotted key -> value


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, by name, in the order of the job array's tasks."""

    base: RunConfig  # with the overrides of the command line, and none of the runs'
    runs: dict[str, RunConfig]
    overrides: dict[str, Overrides]
    at_once: int | None  # at most so many run at the same time; None: no limit


def load_sweep(file: Path, path: Path, overrides: Sequence[str], profile: Mapping[str, Any]) -> Sweep:
    """The sweep that ``file`` makes of the config ``path`` with ``overrides``; the config of each run is checked.

    ``profile`` is the cluster's `slurm:` section. Raises UserError with every problem at once, one line each, which
    names the run where it concerns one run.
    """
    tree = read_yaml_file(file)
    problems = [f"{file}: {line}" for line in check_tree(tree)]
    if problems:
        raise UserError(problems)
    below = {"slurm": profile}
    base = load_config(path, overrides, below)
    listed, problems = name_runs(tree)
    problems = [f"{file}: {line}" for line in problems]
    configs, wrong = {}, {}
    for name, changes in listed.items():
        own = changes | {"name": f"{base.name}-{name}", "run_dir": f"{base.run_path}/{name}"}
        texts = [f"{key}={json.dumps(value)}" for key, value in own.items()]
        try:
            configs[name] = load_checked(path, [*overrides, *texts], base=below, world_size=None, data=False)
        except UserError as error:
            wrong[name] = error.problems
    problems += in_runs(wrong, len(listed))
    problems += check_together(base, configs)
    if problems:
        raise UserError(problems)
    return Sweep(base, configs, listed, tree.get("at_once"))


def check_tree(tree: Mapping[str, Any]) -> Iterator[str]:
    """A line for each thing that is wrong with the form of the sweep file."""
    for key in tree:
        if key not in SECTIONS:
            yield f"{key} must be one of {', '.join(SECTIONS)}; a run's keys go below grid or runs"
    grid, runs, at_once = tree.get("grid"), tree.get("runs"), tree.get("at_once")
    if not grid and not runs:
        yield "grid, runs must name at least one run between them; try grid: {optimizer.lr: [1e-3, 3e-4]}"
    if grid is not None and not isinstance(grid, dict):
        yield f"grid={show(grid)} must be keys with lists of values; try grid: {{optimizer.lr: [1e-3, 3e-4]}}"
    for key, values in grid.items() if isinstance(grid, dict) else ():
        if not isinstance(values, list) or not values:
            yield f"grid.{key}={show(values)} must be a list of values; try [{show(values)}]"
        yield from _check_key(f"grid.{key}", key)
        if key == "name":
            yield "grid.name must not be set, since each of its runs is another; name runs below runs"
    if runs is not None and not (isinstance(runs, list) and all(isinstance(run, dict) for run in runs)):
        yield f"runs={show(runs)} must be a list of runs, each with its keys; try runs: [{{optimizer.lr: 1e-3}}]"
    for number, run in enumerate(runs if isinstance(runs, list) else []):
        for key in run if isinstance(run, dict) else ():
            yield from _check_key(f"runs[{number}].{key}", key)
    if at_once is not None and (type(at_once) is not int or not 1 <= at_once <= MOST_RUNS):
        yield f"at_once={show(at_once)} must be a number of runs, at least 1 and at most {MOST_RUNS}; try null for all"
    lists = [values for values in grid.values() if isinstance(values, list)] if isinstance(grid, dict) else []
    n_runs = math.prod(map(len, lists)) if lists else 0
    n_runs += len(runs) if isinstance(runs, list) else 0
    if n_runs > MOST_RUNS:
        yield f"grid, runs make {show(n_runs)} runs, and must make at most {MOST_RUNS}; leave out keys or values"


def _check_key(place: str, key: str) -> Iterator[str]:
    if key == "slurm" or key.startswith("slurm."):
        yield f"{place} must be the same for all runs, which are tasks of one job array; set it in the config"
    if key == "run_dir":
        yield f"{place} must not be set: a run's directory lies in the sweep's, under the run's name; set name"


def name_runs(tree: Mapping[str, Any]) -> tuple[dict[str, Overrides], list[str]]:
    """The overrides of each run by its name, those of the grid first; and a line for each name that is not allowed."""
    grid = tree.get("grid") or {}
    every = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    every += [dict(run) for run in tree.get("runs") or []]
    found: dict[str, Overrides] = {}
    problems = []
    for changes in every:
        given = changes.pop("name", None)
        name = given if isinstance(given, str) else name_of(changes) if given is None else show(given)
        if not re.fullmatch(r"\w[\w.,+=@-]*", name) or len(name.encode()) > LONGEST_NAME:
            what = f"the run {show(changes)} would be named {name!r}, which"
            problems.append(
                f"{what} is no folder's name of letters, digits and . , + = @ _ -; give it a name below runs"
            )
        elif name in TAKEN:
            problems.append(f"name={name} must not be {' or '.join(TAKEN)}, folders that the sweep has; choose another")
        elif name in found:
            problems.append(f"name={name} must be one run's only; give one of the two another name below runs")
        else:
            found[name] = changes
    return found, problems


def name_of(changes: Overrides) -> str:
    """A run's name made of its overrides: lr=0.001,seed=0.

    Each key is shortened to its last word, unless another key ends in the same word.
    """
    last = {key: key.rpartition(".")[2] for key in changes}
    counts = Counter(last.values())
    words = {key: word if counts[word] == 1 else key for key, word in last.items()}
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    return ",".join(f"{words[key]}={values[key]}" for key in changes)


def in_runs(problems: Mapping[str, Sequence[str]], n_runs: int) -> list[str]:
    """The problems of all runs as lines that begin with the run's name; one that all runs share is listed once."""
    counts = Counter(line for lines in problems.values() for line in dict.fromkeys(lines))
    shared = [line for line, count in counts.items() if count == n_runs > 1]
    own = [f"{name}: {line}" for name, lines in problems.items() for line in lines if line not in shared]
    return [f"every run: {line}" for line in shared] + own


def check_together(base: RunConfig, configs: Mapping[str, RunConfig]) -> Iterator[str]:
    """A line for each conflict between the runs of a sweep: a chain of jobs, or a shared checkpoint directory."""
    if base.slurm.chain != 1:
        yield (
            f"slurm.chain={base.slurm.chain} must be 1 with --sweep: runs that Slurm may queue again go on by "
            "themselves (slurm.requeue=true); elsewhere submit it again, and each run goes on from its checkpoint"
        )
    names: dict[str, str] = {}
    for name, config in configs.items():
        other = names.setdefault(config.checkpoint_location, name)
        if other != name:
            yield (
                f"{name}: checkpoint.dir={config.checkpoint.dir} must be this run's alone, and is {other}'s too; "
                "leave it out, or give each run its own"
            )
