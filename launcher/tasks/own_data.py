"""Reads the documents of a user's own task from files beside its YAML file, without cache or network."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import DataError, reason_of
from data.files import find_matching, keep_files
from launcher.errors import UserError

FORMATS = ("json", "csv", "parquet", "text")
OPTIONS = {"data_files", "field"}


def read_splits(task: Mapping[str, Any], path: Path, key: str) -> Any:
    """The splits that ``dataset_kwargs.data_files`` names, as a ``datasets.DatasetDict``.

    ``path`` is the task's file and ``key`` the option that names it. Raises UserError where a file is missing or
    broken, or a split has no document.
    """
    from datasets import Dataset, DatasetDict

    told, options = f"{key}={path}: dataset_kwargs", task.get("dataset_kwargs") or {}
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise UserError([f"{told}.{unknown[0]} is not known here; {' and '.join(sorted(OPTIONS))} are"])
    splits = {}
    for split, patterns in named_files(options.get("data_files"), told).items():
        files = [file for pattern in patterns for file in files_of(pattern, path.parent, f"{told}.data_files")]
        records = [record for file in files for record in read_records(file, task["dataset_path"], options, told)]
        if not records:
            raise UserError([f"{told}.data_files: {split} has no document; give a file with some"])
        try:
            splits[split] = Dataset.from_list(records)
        except Exception as error:  # pyarrow raises where a field is text in one document and a number in another
            rule = f"{split}'s documents must have fields of one type each ({reason_of(error)})"
            raise UserError([f"{told}.data_files: {rule}"]) from None
    return DatasetDict(splits)


def named_files(data_files: Any, told: str) -> dict[str, list[str]]:
    """The file names or globs of each split; without splits they all belong to ``train``. Raises UserError."""
    splits = data_files if isinstance(data_files, dict) else {"train": data_files}
    found = {split: [names] if isinstance(names, str) else names for split, names in splits.items()}
    for names in found.values():
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise UserError([f"{told}.data_files must name files, as in data_files: {{test: questions.jsonl}}"])
    return found


def files_of(pattern: str, folder: Path, told: str) -> list[str]:
    """The files that a name or a glob below ``folder`` matches. Raises UserError where there is none."""
    if "://" in pattern:
        raise UserError([f"{told}={pattern} must be a file on this machine; fetch it, and name the copy"])
    try:
        found = [name for name, _ in keep_files(find_matching(str(folder / pattern)), told)]
    except DataError as error:
        raise UserError(error.problems) from None
    if not found:
        raise UserError([f"{told}={pattern} is not there (it is looked for in {folder.absolute()}); give a file"])
    return found


def read_records(file: str, kind: str, options: Mapping[str, Any], told: str) -> list[dict[str, Any]]:
    """The documents of a file of the format ``kind``. Raises UserError where it cannot be read as such."""
    try:
        match kind:
            case "json":
                return json_records(Path(file).read_text(encoding="utf-8"), options.get("field"))
            case "csv":
                with open(file, encoding="utf-8", newline="") as lines:
                    return [*csv.DictReader(lines)]
            case "text":
                return [
                    {"text": line} for line in Path(file).read_text(encoding="utf-8").removesuffix("\n").split("\n")
                ]
            case _:
                import pyarrow.parquet

                return pyarrow.parquet.read_table(file).to_pylist()
    except Exception as error:  # the readers of the formats raise exceptions of several libraries
        raise UserError([f"{told}.data_files: {file} cannot be read as {kind} ({reason_of(error)}); mend it"]) from None


def json_records(text: str, field: str | None) -> list[dict[str, Any]]:
    """The documents in a JSON text: one object a line, or one list of objects, which may be in the key ``field``.

    Raises ValueError for anything else.
    """
    if field is not None or text.lstrip()[:1] == "[":
        whole = json.loads(text)
        records = whole[field] if field is not None else whole
    else:
        records = []
        for number, line in enumerate(text.split("\n"), 1):  # splitlines() could also split within a string
            if line.strip():
                try:
                    records.append(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError("each document must be an object")
    return records
