"""From what the user names to the tasks of the harness: own files, and its own tasks, whose data the hub has."""

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

SEED = 1234  # of the draws of examples, as the harness has it
ASKED = "EleutherAI/lambada_openai"  # a dataset by which the hub is known to answer


@dataclass(frozen=True)
class Loaded:
    """The tasks, and the groups among what was named, by the harness's names for them."""

    tasks: dict[str, Any]
    groups: dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What the user asks for: tasks by name or by their files' paths, and how they are evaluated."""

    specs: tuple[str, ...]
    key: str  # that they were given as
    shots: int | None = None  # examples before each document; None: as each task says
    limit: int | None = None  # documents of each task at most
    seed: int = SEED
    allows_code: bool = False


def check_asked(asked: Asked) -> None:
    """What can be said without reading documents: of own tasks' files, of names, and of the hub. Raises UserError."""
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
    """The tasks with their documents. Raises UserError, in a line, where one cannot be had."""
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
    """The task of a file."""
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
    """The task of a file that may run code, by the harness's own reader; its data files lie beside it."""
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
    """The names of files, relative to ``folder``."""
    if isinstance(data_files, Mapping):
        return {split: beside(names, folder) for split, names in data_files.items()}
    if isinstance(data_files, str):
        return data_files if "://" in data_files else str(folder / data_files)
    return [beside(name, folder) for name in data_files]


@cache
def harness_tasks() -> Any:
    """The harness's index of its own tasks, which takes it half a minute to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def load_named(spec: str, asked: Asked) -> tuple[dict[str, Any], dict[str, Any]]:
    """A task or a group of the harness's."""
    with harness_errors(f"{asked.key}={spec}"):
        found = harness_tasks().load([spec])
    return dict(found["tasks"]), dict(found.get("groups", {}))


def check_named(names: Sequence[str], key: str) -> None:
    """Refuses names that the harness does not have, and any while the hub, which has the data, does not answer.

    The harness itself takes half a minute to say the one, and tries for most of a minute before it says the other.
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
    """Raises UserError where the hub does not answer; where it is not to be asked, the cache has what there is."""
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
    """Examples before each document, and what they are drawn from."""
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
    """Turns what the harness raises within it into a UserError of one line, and drops what it prints."""
    try:
        with quietly():
            yield
    except UserError:
        raise
    except Exception as error:  # of the harness and its libraries, which raise anything
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise UserError([f"{told} cannot be used by lm-evaluation-harness ({reason}); mend it"]) from error
