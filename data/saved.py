"""Datasets written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`: finding the Arrow files of a split."""

import json
import os
from pathlib import Path
from typing import Any

from data.errors import reason_of, refuse

STATE, SPLITS = "state.json", "dataset_dict.json"
SAVE_AGAIN = "save it again with save_to_disk"


def is_saved(folder: Path) -> bool:
    """Whether save_to_disk wrote this folder."""
    return (folder / STATE).is_file() or (folder / SPLITS).is_file()


def saved_paths(folder: Path, split: str, found: str) -> list[str]:
    """The Arrow files of a saved dataset, in order; for a saved DatasetDict those of ``split``.

    ``found`` is what the user named, for errors. Raises DataError where the folder has no such split, is damaged, or
    names files outside itself.
    """
    if (folder / SPLITS).is_file():
        splits = _read(folder / SPLITS, "splits")
        if split not in splits:
            there = ", ".join(map(str, splits[:20]))
            raise refuse(f"{found} (split={split!r})", f"has no such split, only {there}", "set split to one of them")
        folder = folder / _plain_name(split, folder / SPLITS)
    files = _read(folder / STATE, "_data_files")
    named = [entry.get("filename") if isinstance(entry, dict) else entry for entry in files]
    return [os.path.join(folder, _plain_name(name, folder / STATE)) for name in named]


def _read(path: Path, field: str) -> list[Any]:
    """The list in a field of a JSON file. Raises DataError where it is missing, or where rows are reordered."""
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(str(path), f"cannot be read ({reason_of(error)})", SAVE_AGAIN) from error
    if not isinstance(tree, dict) or not isinstance(tree.get(field), list):
        raise refuse(str(path), f"must hold a list {field}", SAVE_AGAIN)
    if tree.get("_indices_data_files"):
        raise refuse(str(path), "orders its rows by an index beside them", "call flatten_indices() and save it again")
    return tree[field]


def _plain_name(name: Any, path: Path) -> str:
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise refuse(str(path), f"names {str(name)[:100]!r}, which is no file of its folder", SAVE_AGAIN)
    return name
