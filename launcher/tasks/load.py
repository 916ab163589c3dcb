"""Loads the tasks that the user names: own YAML files, and the harness's tasks, whose data is on the hub."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data.errors import reason_of
from data.hub import why_unreachable
from launcher.errors import UserError
from launcher.tasks.harness import confine_templates, need_harness, quietly
from launcher.tasks.own import is_own, read_own_task, with_documents

SEED = 1234  # the harness's default seed for drawing few-shot examples
ASKED = "EleutherAI/lambada_openai"  # the dataset that is requested to see whether the hub answers


@dataclass(frozen=True)
class Loaded:
    """The loaded tasks, and those named that are groups, by their names in the harness."""

    tasks: dict[str, Any]
    groups: dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """The user's request: tasks by name or by their files' paths, and how to evaluate them."""

    specs: tuple[str, ...]
    key: str  # the option or config key that names them, for messages
    shots: int | None = None  # examples before each document; None: as each task says
    limit: int | None = None  # documents of each task at most
    seed: int = SEED
    allows_code: bool = False


def check_asked(asked: Asked) -> None:
    """Checks names, own tasks' files and the hub's reachability without reading documents. Raises UserError."""
    if not asked.specs:
        raise UserError([f"{asked.key} must name a task; give names of the harness's, or paths of YAML files"])
    need_harness(asked.key)
    named = [spec for spec in asked.specs if not is_own(spec)]
    if named:
        check_named(named, asked.key)
    for spec in asked.specs:
        if is_own(spec) and not asked.allows_code:
            with quietly():
                read_own_task(Path(spec), asked.key)


def load_tasks(asked: Asked) -> Loaded:
    """The tasks with their documents. Raises UserError where one cannot be loaded, or is named twice.

    Unless ``asked.allows_code``, templates are sandboxed in this process from then on.
    """
    check_asked(asked)
    if not asked.allows_code:
        with quietly():
            confine_templates()
    loaded = Loaded({}, {})
    for spec in asked.specs:
        tasks, groups = load_own(spec, asked) if is_own(spec) else load_named(spec, asked)
        again = sorted(set(tasks) & set(loaded.tasks))
        if again:
            raise UserError([f"{asked.key}={spec} has the task {again[0]}, which is there already; name it once"])
        loaded.tasks.update(tasks)
        loaded.groups.update(groups)
    for name, task in loaded.tasks.items():
        set_shots(task, name, asked)
    return loaded


def load_own(spec: str, asked: Asked) -> tuple[dict[str, Any], dict[str, Any]]:
    """The task of the user's YAML file ``spec``, by name; and no groups, unless the file may run code."""
    if asked.allows_code:
        return load_with_code(spec, asked.key)
    path = Path(spec)
    config = with_documents(read_own_task(path, asked.key), path, asked.key)
    if "custom_dataset" not in config:
        check_hub(config["dataset_path"], f"{asked.key}={spec}")
    for name in ("tag", "group"):
        config.pop(name, None)
    with harness_errors(f"{asked.key}={spec}"):
        from lm_eval.api.task import ConfigurableTask

        task = ConfigurableTask(config=config)
    return {config["task"]: task}, {}


def load_with_code(spec: str, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tasks and groups of a file that may run code, by the harness's own reader.

    Its data files are looked for in the folder of the file. Raises UserError where it cannot be loaded.
    """
    if not Path(spec).is_file():
        raise UserError([f"{key}={spec} is no file; give the path of a task's YAML file"])
    with harness_errors(f"{key}={spec}"):
        from lm_eval.tasks import TaskManager
        from lm_eval.tasks._yaml_loader import load_yaml

        config = load_yaml(Path(spec))
        options = dict(config.get("dataset_kwargs") or {})
        if "data_files" in options:
            config["dataset_kwargs"] = {**options, "data_files": beside(options["data_files"], Path(spec).parent)}
        found = TaskManager(include_defaults=False).load([config])
    return dict(found["tasks"]), dict(found.get("groups", {}))


def beside(data_files: Any, folder: Path) -> Any:
    """``data_files`` (a name, a list or a map of them) with each name made a path below ``folder``; URLs stay."""
    if isinstance(data_files, Mapping):
        return {split: beside(names, folder) for split, names in data_files.items()}
    if isinstance(data_files, str):
        return data_files if "://" in data_files else str(folder / data_files)
    return [beside(name, folder) for name in data_files]


@cache
def harness_tasks() -> Any:
    """The harness's index of its own tasks, which takes half a minute to build."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def load_named(spec: str, asked: Asked) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tasks and the groups that the harness has under this name. Raises UserError where loading fails."""
    with harness_errors(f"{asked.key}={spec}"):
        found = harness_tasks().load([spec])
    return dict(found["tasks"]), dict(found.get("groups", {}))


def check_named(names: Sequence[str], key: str) -> None:
    """Raises UserError for names that the harness does not have, and where the hub, which has the data, is down.

    Checked here because the harness takes half a minute to report an unknown name, and most of a minute to give up on
    the hub.
    """
    known = set(names_in_harness())
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=3)
            near = f"; near it are {', '.join(close)}" if close else ""
            remedy = "give a task of the harness's, or the path of a YAML file (NAME.yaml)"
            raise UserError([f"{key}={name} is no task of lm-evaluation-harness{near}; {remedy}"])
    check_hub(ASKED, f"{key}={names[0]}")


def names_in_harness() -> Iterator[str]:
    """The names of the harness's tasks, groups and tags, found in its files without parsing them."""
    from importlib.util import find_spec

    spec = find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "tasks")
    line = re.compile(r"^\s*-?\s*(?:\"?(?:task|group|tag)\"?:\s*)?[\"']?([\w.\-:+]+)[\"']?\s*$", re.MULTILINE)
    for path in folder.rglob("*.y*ml"):
        yield from line.findall(path.read_text(encoding="utf-8", errors="replace"))


def check_hub(dataset: str, told: str) -> None:
    """Raises UserError where the hub does not answer; does nothing with HF_HUB_OFFLINE, where the cache is used.

    ``told`` begins the message.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return
    unreachable = why_unreachable(dataset, "dataset")
    if unreachable is not None:
        rule = f"needs a dataset of the Hugging Face hub, which cannot be had ({unreachable})"
        remedy = (
            "check the network, set HF_HUB_OFFLINE=1 where the cache has it, or give a task's file with data beside it"
        )
        raise UserError([f"{told} {rule}; {remedy}"])


def set_shots(task: Any, name: str, asked: Asked) -> None:
    """Sets the task's number of few-shot examples and their seed. Raises UserError where it has too few examples."""
    if asked.shots is not None:
        task.set_config(key="num_fewshot", value=asked.shots)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=asked.seed)
    shots = task.get_config("num_fewshot")
    with harness_errors(f"{asked.key}: {name}"):
        n_examples = len([*task.fewshot_docs()]) if shots else 0
    if shots > n_examples:
        told = f"{asked.key}: {name} takes {shots} examples, and its fewshot_split has {n_examples}"
        lower = "--shots" if asked.shots is not None else "num_fewshot in its file"
        raise UserError([f"{told}; lower {lower}"])


@contextmanager
def harness_errors(told: str) -> Iterator[None]:
    """A context that discards the harness's output and turns its exceptions into a UserError of one line."""
    try:
        with quietly():
            yield
    except UserError:
        raise
    except Exception as error:  # the harness and its libraries raise exceptions of any type
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise UserError([f"{told} cannot be used by lm-evaluation-harness ({reason}); mend it"]) from error
