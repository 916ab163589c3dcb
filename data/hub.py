"""The Hugging Face hub: checking that it can be reached, and streaming datasets from it or from a local folder."""

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from data.config import SourceConfig
from data.errors import DataError, reason_of, refuse
from data.files import find_below, keep_files
from data.sources import HUGGING_FACE, InputFile, check_no_exclude, input_files, is_hugging_face, reads_files

if TYPE_CHECKING:
    from datasets import IterableDataset

REACH_SECONDS = 5.0  # until the hub counts as out of reach


def why_unreachable(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Why the hub cannot be asked about this model or dataset, in a few words; None where it can.

    It takes seconds at most. Call it before the hub's libraries, which retry for most of a minute and print each try.
    """
    answer = ["no answer within a few seconds"]
    asking = threading.Thread(target=_ask, args=(name, kind, answer), daemon=True)  # DNS has no timeout
    asking.start()
    asking.join(REACH_SECONDS + 1)
    return answer[-1] or None


def _ask(name: str, kind: str, answer: list[str]) -> None:
    """Asks the hub and appends to ``answer`` what went wrong; "" if nothing did."""
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=REACH_SECONDS)
        answer.append("")
    except Exception as error:  # of several HTTP libraries, as versions have it
        answer.append(reason_of(error))


def count_hub_shards(source: SourceConfig, key: str) -> int:
    """The number of parts, its data files, in which the dataset can be read in parallel."""
    return open_hub(source, key).num_shards


def hub_records(source: SourceConfig, shard: int, key: str) -> Iterator[dict[str, Any]]:
    """The records of one of the dataset's shards, in order. Raises DataError where ``datasets`` fails to read it."""
    dataset = open_hub(source, key)
    try:
        yield from dataset.shard(num_shards=dataset.num_shards, index=shard)
    except DataError:
        raise
    except Exception as error:  # broken files make the library raise anything
        found = f"{key}.path={source.path!r} (split={source.split!r}, its file {shard + 1} of {dataset.num_shards})"
        rule = f"cannot be read by datasets ({reason_of(error)})"
        raise refuse(found, rule, "mend that file, or give another path") from error


def corpus_files(source: SourceConfig, key: str) -> list[InputFile]:
    """The files from which a raw source is read at present; for a dataset that is streamed, those of its split.

    Files on the hub are named with their revision, and count as 0 bytes. Raises DataError where the files cannot be
    listed or read, and where ``datasets`` cannot open the dataset.
    """
    if reads_files(source):
        return input_files(source, key)
    of_splits = _open(source, key)[0].config.data_files or {}
    named = [of_splits[source.split]] if source.split in of_splits else of_splits.values()
    paths = [str(path) for files in named for path in files]
    if is_on_hub(source):
        return [InputFile(path, 0) for path in paths]
    name = source.path.removeprefix(HUGGING_FACE)
    below = {os.path.relpath(os.path.realpath(path), os.path.realpath(name)): path for path in paths}
    return [InputFile(os.path.join(name, each), os.path.getsize(path)) for each, path in below.items()]


def is_on_hub(source: SourceConfig) -> bool:
    """Whether the source is a dataset on the hub, and not in a local folder."""
    name = source.path.removeprefix(HUGGING_FACE)
    return is_hugging_face(source) and not (name.startswith("/") or os.path.isdir(name))


def open_hub(source: SourceConfig, key: str) -> "IterableDataset":
    """The dataset's split as a stream. Raises DataError where ``datasets`` cannot open it.

    A dataset's own code is never run: ``datasets`` refuses loading scripts since version 4.
    """
    return _open(source, key)[1]


def _open(source: SourceConfig, key: str) -> tuple[Any, "IterableDataset"]:
    """(the library's builder of the dataset, its stream). Raises DataError where ``datasets`` cannot open it."""
    check_no_exclude(source, key)
    name = source.path.removeprefix(HUGGING_FACE)
    is_local = not is_on_hub(source)
    if is_local and os.path.isdir(name):
        keep_files(find_below(name), key)  # a pipe among them would be waited for
    unreachable = None if is_local else why_unreachable(name, "dataset")
    if unreachable is not None:
        rule = f"cannot be had from the Hugging Face hub ({unreachable})"
        raise refuse(f"{key}.path={source.path!r}", rule, "check the name and the network")
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        builder = datasets.load_dataset_builder(name, source.subset)
        foreign = _foreign_file(builder, name) if is_local else None
        dataset = builder.as_streaming_dataset(split=source.split)
    except Exception as error:  # missing; no such subset or split; a loading script; anything that a broken file does
        found = f"{key}.path={source.path!r} (subset={source.subset!r}, split={source.split!r})"
        remedy = "check the name, subset and split, or the network"
        raise refuse(found, f"cannot be opened by datasets ({reason_of(error)})", remedy) from error
    if foreign is not None:
        rule = f"names {foreign}, which lies outside it, as data (in its README.md)"
        raise refuse(f"{key}.path={source.path!r}", rule, "take that out, or copy the file into it")
    assert not isinstance(dataset, dict)
    return builder, dataset


def _foreign_file(builder: Any, folder: str) -> str | None:
    """A file or URL outside the folder that a local dataset names as its data; None where there is none."""
    inside = os.path.realpath(folder) + os.sep
    files = [str(path) for paths in (builder.config.data_files or {}).values() for path in paths]
    return next((path for path in files if not os.path.realpath(path).startswith(inside)), None)
