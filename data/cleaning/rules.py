"""The rules of the config's data.cleaning section that are cheap to check; all broken ones are reported at once."""

import os
from dataclasses import fields

from data.cleaning.config import CleaningConfig
from data.errors import problem
from data.places import why_no_path
from data.sources import expand_path

KEY = "data.cleaning"


def check_cleaning(config: CleaningConfig, *, looks: bool) -> list[str]:
    """One line for each rule that the section breaks. ``looks``: also check that the named files exist."""
    found = []
    if not (config.sections or config.exact):
        stages = [field.name for field in fields(config) if field.name not in ("words", "max_chars")]
        rule = "must turn a stage on, and turns none on"
        found.append(problem(KEY, rule, f"give {', '.join(stages[:-1])} or {stages[-1]}, or set it to null"))
    if config.mask is not None and not (config.mask.emails or config.mask.ips):
        remedy = f"set one of them to true, or {KEY}.mask to null"
        found.append(problem(f"{KEY}.mask.emails=False", f"and {KEY}.mask.ips=False leave nothing to mask", remedy))
    if config.words != CleaningConfig().words and not config.splits_words:
        rule = "is for stages that split documents into words, and none is on"
        found.append(problem(f"{KEY}.words={config.words!r}", rule, "leave it out, or turn one on: near, say"))
    found += _check_prose(config)
    for key, values in _lists(config).items():
        if not values or not all(values):
            found.append(problem(f"{key}={list(values)}", "must name one at least, and none that is empty", "add one"))
    for key, path in _paths(config):
        rule = why_no_path(path)
        if rule is None and looks and not os.path.isfile(expand_path(path)):
            rule = "is no file"
        if rule is not None:
            found.append(problem(f"{key}={path!r}", rule, "check the path"))
    return found


def _check_prose(config: CleaningConfig) -> list[str]:
    """Rules on settings that would drop every document, which would be noticed only after hours of work."""
    prose, key, found = config.gopher_quality, f"{KEY}.gopher_quality", []
    if prose is None:
        return found
    for name, least, most in (
        ("doc_words", prose.min_doc_words, prose.max_doc_words),
        ("avg_word_length", prose.min_avg_word_length, prose.max_avg_word_length),
    ):
        if 0 < most < least:
            rule = f"must be at most {key}.max_{name}={most}, or every document is dropped"
            found.append(problem(f"{key}.min_{name}={least}", rule, f"try {most}, or max_{name}=0, which is no limit"))
    n_named = len(set(prose.stop_words or ()))
    if prose.stop_words is not None and n_named < prose.min_stop_words:
        rule = f"must be at most the {n_named} different words of {key}.stop_words, or every document is dropped"
        found.append(problem(f"{key}.min_stop_words={prose.min_stop_words}", rule, "try 0, or name more words"))
    return found


def _lists(config: CleaningConfig) -> dict[str, tuple[str, ...]]:
    lists: dict[str, tuple[str, ...]] = {}
    if config.decontaminate is not None:
        lists[f"{KEY}.decontaminate.files"] = config.decontaminate.files
        lists[f"{KEY}.decontaminate.text_keys"] = config.decontaminate.text_keys
    if config.language is not None:
        lists[f"{KEY}.language.keep"] = config.language.keep
    return lists


def _paths(config: CleaningConfig) -> list[tuple[str, str]]:
    """(key, path) of each file that the section names; an empty name in a list is reported with the list."""
    found = [(f"{KEY}.language.model", config.language.model)] if config.language is not None else []
    files = config.decontaminate.files if config.decontaminate is not None else ()
    return [*found, *((f"{KEY}.decontaminate.files", path) for path in files if path)]
