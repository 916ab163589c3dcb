"""Reads a task of the user's own, a YAML file in the harness's format, and refuses everything in it that is code.

The file is parsed here, without the tag ``!function``, and the harness is given plain values only. Whatever it would
execute rather than read (a metric's script, a prompt's module, a pickle) is refused by name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.yaml_text import read_yaml_file
from launcher.errors import UserError
from launcher.tasks.own_data import FORMATS, read_splits

CODE = "use --allow-task-code if you trust the file and what it names"
EVAL = "evaluate it with `roundtable eval --tasks ... --allow-task-code` if you trust the file and what it names"
OUTPUT_TYPES = ("loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until")
PLAIN = {  # keys of a task that the harness only reads
    *("task", "task_alias", "tag", "group", "include", "output_type", "metadata", "repeats", "num_fewshot"),
    *("dataset_path", "dataset_name", "dataset_kwargs"),
    *("training_split", "validation_split", "test_split", "fewshot_split", "fewshot_config"),
    *("doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix", "description"),
    *("target_delimiter", "fewshot_delimiter", "metric_list", "filter_list", "generation_kwargs"),
}
FEWSHOT = {"sampler", "split", "samples", "doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix"}
FEWSHOT |= {"fewshot_delimiter", "target_delimiter", "fewshot_indices"}
FILTERS = {"regex", "regex_pos", "remove_whitespace", "multi_choice_regex", "take_first", "take_first_k"}
FILTERS |= {"majority_vote", "lowercase", "uppercase", "map", "format_span"}


def is_own(spec: str) -> bool:
    """Whether ``spec`` is the path of a task's YAML file, rather than a task's name in the harness."""
    return spec.endswith((".yaml", ".yml"))


def read_own_task(path: Path, key: str) -> dict[str, Any]:
    """The task in the file as plain values, with its includes merged. Raises UserError with a line for each problem.

    ``key`` is the option or config key that names the file, for messages.
    """
    return checked(read_with_includes(path, key, ()), path, key)


def read_with_includes(path: Path, key: str, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The mapping in the file, merged over those of the files that it includes. ``seen``: files including this one."""
    if not path.is_file():
        told = f", which {seen[-1]} includes," if seen else ""
        raise UserError([f"{key}={path}{told} is no file; give the path of a task's YAML file"])
    if path.resolve() in seen:
        raise UserError([f"{key}={path} includes itself; take one include out"])
    try:
        own = read_yaml_file(path)
    except UserError as error:
        is_code = [f"{line}; {with_remedy(CODE, key)}" if "the tag !" in line else line for line in error.problems]
        raise UserError([f"{key}: {line}" for line in is_code]) from None
    includes = own.pop("include", [])
    merged: dict[str, Any] = {}
    for name in includes if isinstance(includes, list) else [includes]:
        merged |= read_with_includes(path.parent / str(name), key, (*seen, path.resolve()))
    return merged | own


def checked(task: dict[str, Any], path: Path, key: str) -> dict[str, Any]:
    """The task itself. Raises UserError where it is malformed or the harness would execute a part of it."""
    problems = [f"{key}={path}: {with_remedy(line, key)}" for line in problems_of(task)]
    if problems:
        raise UserError(problems)
    return task


def with_remedy(line: str, key: str) -> str:
    """The line with a remedy that fits ``key``: --allow-task-code exists on the command line, but not in a config."""
    return line if key == "--tasks" else line.replace(CODE, EVAL)


def problems_of(task: Mapping[str, Any]) -> list[str]:
    """A line for each problem of a task, without the file's name."""
    problems = [
        f"{name!r} is not a key that is plain data; leave it out, or {CODE}" for name in sorted({*task} - PLAIN)
    ]
    if not isinstance(task.get("task"), str) or not task["task"]:
        problems.append("task must be the task's name; write task: NAME")
    kind = task.get("output_type", "generate_until")
    if kind not in OUTPUT_TYPES:
        problems.append(f"output_type={kind!r} must be one of {', '.join(OUTPUT_TYPES)}")
    if not isinstance(task.get("dataset_path"), str):
        problems.append(f"dataset_path must be {', '.join(FORMATS)}, or a dataset's name on the Hugging Face hub")
    if not (task.get("test_split") or task.get("validation_split")):
        problems.append("test_split or validation_split must name the documents to evaluate; try test_split: test")
    for name, kinds in SHAPES.items():
        if task.get(name) is not None and not isinstance(task[name], kinds):
            problems.append(f"{name}={task[name]!r:.60} must be {WORDS[kinds]}")
    return problems if problems else [*metric_problems(task), *filter_problems(task), *fewshot_problems(task)]


SHAPES: dict[str, Any] = {
    **dict.fromkeys(("task_alias", "training_split", "validation_split", "test_split", "fewshot_split"), str),
    **dict.fromkeys(("description", "target_delimiter", "fewshot_delimiter", "gen_prefix", "dataset_name"), str),
    **dict.fromkeys(("dataset_kwargs", "generation_kwargs", "fewshot_config", "metadata"), dict),
    **dict.fromkeys(("metric_list", "filter_list"), list),
    **dict.fromkeys(("num_fewshot", "repeats"), int),
}
WORDS = {str: "text", dict: "a map of keys", list: "a list", int: "a whole number"}


def metric_problems(task: Mapping[str, Any]) -> list[str]:
    """A line for each metric or aggregation that the harness does not have; other metrics are scripts it would run."""
    from lm_eval.api import metrics  # noqa: F401  (importing it registers them)
    from lm_eval.api.registry import aggregation_registry, metric_registry

    problems = []
    for entry in task.get("metric_list") or []:
        if not isinstance(entry, dict) or not isinstance(entry.get("metric"), str):
            problems.append(f"metric_list has {entry!r:.60}, and each entry must be a map with metric: NAME")
            continue
        name, aggregation = entry["metric"], entry.get("aggregation", "mean")
        if entry.get("hf_evaluate") or name not in metric_registry:
            problems.append(f"metric_list: {name!r} is no metric of the harness's own, but a script; {CODE}")
        elif not isinstance(aggregation, str) or aggregation not in aggregation_registry:
            problems.append(f"metric_list: {name!r} has aggregation={aggregation!r}, which the harness does not know")
    return problems


def filter_problems(task: Mapping[str, Any]) -> list[str]:
    """A line for each filter that takes code or does not exist."""
    problems = []
    for entry in task.get("filter_list") or []:
        steps = entry.get("filter") if isinstance(entry, dict) else None
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps) or "name" not in entry:
            problems.append(f"filter_list has {entry!r:.60}, and each entry must be a map with name and filter")
            continue
        names = [step.get("function") for step in steps]
        problems += [
            f"filter_list: {name!r} must be one of {', '.join(sorted(FILTERS))}"
            for name in names
            if name not in FILTERS
        ]
    return problems


def fewshot_problems(task: Mapping[str, Any]) -> list[str]:
    """A line for each key of fewshot_config that takes code or does not exist."""
    config = task.get("fewshot_config") or {}
    problems = [
        f"fewshot_config.{name} is not plain data; leave it out, or {CODE}" for name in sorted({*config} - FEWSHOT)
    ]
    if config.get("sampler", "default") not in ("default", "first_n"):
        problems.append(f"fewshot_config.sampler={config['sampler']!r} must be default or first_n")
    return problems


def with_documents(task: dict[str, Any], path: Path, key: str) -> dict[str, Any]:
    """The task with its documents read from the files beside it; a dataset on the hub is left to the harness.

    Raises UserError where a file is missing or broken.
    """
    if task["dataset_path"] not in FORMATS:
        if Path(task["dataset_path"]).exists():  # `datasets` would load this path instead of the hub's dataset
            rule = f"dataset_path={task['dataset_path']} is here, and only {', '.join(FORMATS)} are read from files"
            raise UserError([f"{key}={path}: {rule}; name the files in dataset_kwargs.data_files"])
        return task
    splits = read_splits(task, path, key)
    for name in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if task.get(name) is not None and task[name] not in splits:
            there = ", ".join(sorted(splits))
            raise UserError([f"{key}={path}: {name}={task[name]} is none of dataset_kwargs.data_files: {there}"])

    def documents(**_: Any) -> Any:
        return splits

    return {**task, "dataset_kwargs": None, "custom_dataset": documents}
