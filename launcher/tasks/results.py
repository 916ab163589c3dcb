"""Builds the requests of loaded tasks, and computes the harness's own metrics from their answers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import UserError
from launcher.tasks.harness import harness_version
from launcher.tasks.load import Asked, Loaded, harness_errors

BOOTSTRAPS = 1000  # resamples of a standard error for which there is no formula


@dataclass(frozen=True)
class Requests:
    """The requests of all tasks, in an order determined by the tasks and their documents alone."""

    loaded: Loaded
    asked: Asked
    instances: dict[str, list[Any]]  # task -> the harness's Instances

    def of_kind(self, kind: str) -> list[Any]:
        """All requests of one request_type."""
        return [each for own in self.instances.values() for each in own if each.request_type == kind]

    @property
    def kinds(self) -> list[str]:
        """The request types that occur among the requests, each once."""
        return list(dict.fromkeys(each.request_type for own in self.instances.values() for each in own))


def build_requests(loaded: Loaded, asked: Asked) -> Requests:
    """The requests of all tasks: prompts with their few-shot examples, as text.

    Raises UserError where a task needs other input than text, runs what the model writes, or fails to build requests.
    """
    instances = {}
    for name, task in loaded.tasks.items():
        if getattr(task, "MULTIMODAL", False):
            raise UserError([f"{asked.key}: {name} needs pictures or sound, and the model reads text; leave it out"])
        if getattr(task, "UNSAFE_CODE", False) and not asked.allows_code:
            raise UserError([f"{asked.key}: {name} runs what the model writes; leave it out, or use --allow-task-code"])
        with harness_errors(f"{asked.key}: {name}"):
            task.build_all_requests(limit=asked.limit)
            instances[name] = task.instances
    return Requests(loaded, asked, instances)


def results_of(requests: Requests, answers: Mapping[int, Any], *, with_errors: bool = True) -> dict[str, Any]:
    """The results as a tree for JSON: for each task and group the number of documents, shots and metrics.

    ``answers`` holds the answer to each Instance, by its id(). ``with_errors``: also compute standard errors, which may
    take long.
    """
    raw: dict[str, dict[str, Any]] = {}
    tasks: dict[str, Any] = {}
    for name, task in requests.loaded.tasks.items():
        with harness_errors(f"{requests.asked.key}: {name}"):
            values = values_of(task, requests.instances[name], answers)
            raw[name] = aggregated(task, values, with_errors=with_errors)
        tasks[name] = {
            "version": None if task.VERSION == "Yaml" else task.VERSION,  # "Yaml" means that the task has no version
            "shots": task.get_config("num_fewshot"),
            "documents": raw[name]["sample_len"],
            "metrics": metrics_of(raw[name], task.higher_is_better()),
        }
    groups = {}
    for name, group in requests.loaded.groups.items():
        with harness_errors(f"{requests.asked.key}: {name}"):
            found = dict(group.aggregate(raw))
        if found.get("sample_len"):
            groups[name] = {"documents": found["sample_len"], "metrics": metrics_of(found, {})}
    about = {"lm_eval": harness_version(), "seed": requests.asked.seed, "limit": requests.asked.limit}
    return {**about, "tasks": tasks, **({"groups": groups} if groups else {})}


def values_of(task: Any, instances: Sequence[Any], answers: Mapping[int, Any]) -> dict[tuple[str, str], list[Any]]:
    """(metric, filter) -> the metric's value for each document, computed from the filtered answers."""
    by_document: dict[int, list[Any]] = defaultdict(list)
    for instance in instances:
        instance.resps = [answers[id(instance)]] * (instance.repeats or 1)
        instance.filtered_resps = {}
        by_document[instance.doc_id].append(instance)
    task.apply_filters()
    values: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for own in by_document.values():
        own.sort(key=lambda instance: instance.idx)
        for name in own[0].filtered_resps:
            found = task.process_results(own[0].doc, [instance.filtered_resps[name] for instance in own])
            for metric, value in found.items():
                values[metric, name].append(value)
    return values


def aggregated(task: Any, values: Mapping[tuple[str, str], Sequence[Any]], *, with_errors: bool) -> dict[str, Any]:
    """The metrics over all documents, and their standard errors, under the keys that the harness's groups expect."""
    from lm_eval.api.metrics import mean, stderr_for_metric

    found: dict[str, Any] = {"sample_len": max(map(len, values.values()), default=0)}
    for (metric, name), own in values.items():
        aggregate = task.aggregation().get(metric, mean)
        found[f"{metric},{name}"] = aggregate(own)
        error_of = stderr_for_metric(aggregate, BOOTSTRAPS) if with_errors and len(own) > 1 else None
        found[f"{metric}_stderr,{name}"] = "N/A" if error_of is None else error_of(own)
    return found


def metrics_of(raw: Mapping[str, Any], higher_is_better: Mapping[str, bool]) -> dict[str, Any]:
    """Metric (METRIC/FILTER where there is a filter) -> its value and standard error; None where there is none."""
    found = {}
    for key, value in raw.items():
        metric, comma, name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = raw.get(f"{metric}_stderr,{name}")
        shown = metric if name == "none" else f"{metric}/{name}"
        found[shown] = {"value": plain(value), "stderr": plain(error)}
        if metric in higher_is_better:
            found[shown]["higher_is_better"] = bool(higher_is_better[metric])
    return found


def plain(value: Any) -> float | None:
    """The value as a float; None where it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
