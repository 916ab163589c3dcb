"""The files of a model folder, checked before they are read.

A downloaded folder is not trusted: every file has to lie in the folder itself, no link may lead out of it, sizes are
limited, and what a header or an index claims is compared with the files before memory is allocated for it.
"""

import fnmatch
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.tokenizer_files import FETCHED_FILES, TOKENIZER_FILES
from launcher.errors import UserError
from parallel.checkpoint.local import LocalFolder
from parallel.checkpoint.regular import UnfitFile
from parallel.checkpoint.safetensors_stream import NotSafetensors, read_any_header
from parallel.checkpoint.schema import Malformed, parse_index, shorten

CONFIG_JSON = "config.json"
GENERATION_JSON = "generation_config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
LARGEST_CONFIG_BYTES = 1 << 20
LARGEST_INDEX_BYTES = 64 << 20
MOST_TENSORS = 1_000_000  # in all files: a model of 100 layers with 1000 experts has 300,000
MOST_PROBLEMS = 20  # that are listed for one folder
AGAIN = "download the model again"


@dataclass(frozen=True)
class Stored:
    """One tensor in the folder's files."""

    file: str  # path below the folder, with links resolved
    start: int  # the offset of its first byte in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, F8_E4M3, ...


@dataclass(frozen=True)
class ModelFolder:
    """A model folder whose files' headers have been read."""

    path: Path
    tensors: dict[str, Stored]  # by their names in transformers
    ignored: list[str]  # safetensors files that are not part of the model, and not read

    @property
    def files(self) -> LocalFolder:
        """The folder as a source of files, with links resolved."""
        return LocalFolder(Path(os.path.realpath(self.path)))


def folder_problems(given: str) -> list[str]:
    """Why nothing can be imported from the path ``given``, one line each; the files' contents are not read."""
    if not os.path.isdir(given):
        rule = f"is not a folder; give one with {CONFIG_JSON} and {ONE_FILE}, as downloaded from the hub"
        return [f"HF_DIR={given} {rule}"]
    path = Path(given)
    if not os.path.lexists(path / CONFIG_JSON):
        return [f"HF_DIR={path} must hold {CONFIG_JSON}, and has none; give a folder of a transformers model"]
    names = [name for name in os.listdir(path) if _is_read(name)]
    return [f"{path / name} {rule}" for name in sorted(names) if (rule := why_outside(path, name)) is not None]


def _is_read(name: str) -> bool:
    patterns = (CONFIG_JSON, GENERATION_JSON, ONE_FILE, INDEX, *FETCHED_FILES)
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def has_tokenizer(path: Path) -> bool:
    """Whether the folder has any file of a tokenizer."""
    return any(next(path.glob(pattern), None) is not None for pattern in TOKENIZER_FILES)


def why_outside(path: Path, file: str) -> str | None:
    """The rule, with a remedy, that ``file`` breaks if its name or a link leads out of the folder; None if none."""
    parts = file.split("/")
    if "\\" in file or "\0" in file or any(part in ("", ".", "..") for part in parts):
        return f"must be a file below {path}; {AGAIN}"
    root, real = os.path.realpath(path), os.path.realpath(path / file)
    if real.startswith(root.rstrip("/") + "/"):
        return None
    return "is a link that leads out of the folder; copy the folder with the files that its links mean (cp -rL)"


def read_config_json(path: Path) -> dict[str, Any]:
    """The content of config.json. Raises UserError where it cannot be read or is not a JSON object."""
    content = small_file(path, CONFIG_JSON, LARGEST_CONFIG_BYTES)
    where = path / CONFIG_JSON
    try:
        tree = json.loads(content, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError([f"{where} must be JSON, and is not ({shorten(reason, 200)}); {AGAIN}"]) from None
    if not isinstance(tree, dict):
        raise UserError([f"{where} must hold a JSON object, and holds {type(tree).__name__}; {AGAIN}"])
    return tree


def refuse_constant(name: str) -> Any:
    """Raises ValueError. As ``parse_constant`` of json.loads, which would otherwise accept NaN and Infinity."""
    raise ValueError(f"{name} is no number")


def small_file(path: Path, name: str, most: int) -> bytes:
    """The content of one file of the folder, of at most ``most`` bytes.

    Raises UserError where it is outside, too large, no regular file or unreadable.
    """
    where = path / name
    rule = why_outside(path, name)
    if rule is not None:
        raise UserError([f"{where} {rule}"])
    real = Path(os.path.realpath(where))
    try:
        return LocalFolder(real.parent).read_bytes(real.name, most)
    except UnfitFile as error:
        raise UserError([f"{where} {error}; {AGAIN}"]) from None
    except OSError as error:
        raise UserError([f"{where} cannot be read ({error.strerror}); mend that"]) from None


def open_model(path: Path) -> ModelFolder:
    """The folder with a list of its tensors; only the files' headers are read. Raises UserError with every problem."""
    listed = listed_tensors(path)
    files = sorted(set(listed.values())) if listed is not None else [ONE_FILE]
    problems: list[str] = []
    tensors: dict[str, Stored] = {}
    for file in files:
        try:
            held = tensors_of(path, file)
        except UserError as error:
            problems += error.problems
            continue
        expected = {name for name, place in listed.items() if place == file} if listed is not None else held.keys()
        problems += index_problems(path, file, expected, held)
        tensors |= held
        if len(tensors) > MOST_TENSORS:
            raise UserError([f"HF_DIR={path} must hold at most {MOST_TENSORS:,} tensors; give another model"])
    if problems:
        raise UserError(cut(problems))
    others = {each.name for each in path.glob("*.safetensors")} - set(files)
    return ModelFolder(path, tensors, sorted(others))


def listed_tensors(path: Path) -> dict[str, str] | None:
    """The index's map of each tensor to its file; None where the model is a single file.

    Raises UserError where there is neither or both, or the index is wrong.
    """
    has_file, has_index = (os.path.lexists(path / name) for name in (ONE_FILE, INDEX))
    if has_file and has_index:
        rule = f"holds both {ONE_FILE} and {INDEX}, and one of them counts"
        raise UserError([f"HF_DIR={path} {rule}; remove the other"])
    if has_file:
        return None
    if not has_index:
        pickled = sorted({each.name for pattern in PICKLES for each in path.glob(pattern)})
        if pickled:
            rule = f"holds pickled weights ({pickled[0]}), which run code when they are read, and no {ONE_FILE}"
            raise UserError([f"HF_DIR={path} {rule}; convert it to safetensors where you trust it"])
        raise UserError([f"HF_DIR={path} must hold {ONE_FILE} or {INDEX}, and has neither; {AGAIN}"])
    try:
        listed = parse_index(small_file(path, INDEX, LARGEST_INDEX_BYTES))
    except Malformed as error:
        raise UserError([f"{path / INDEX} is no index of safetensors files: {error}; {AGAIN}"]) from None
    outside = [
        f"{path / INDEX}: {shorten(file)} {rule}"
        for file in sorted(set(listed.values()))
        if (rule := why_outside(path, file)) is not None
    ]
    if outside or not listed:
        raise UserError(cut(outside) or [f"{path / INDEX} must list the model's tensors, and lists none; {AGAIN}"])
    return listed


def tensors_of(path: Path, file: str) -> dict[str, Stored]:
    """The tensors that one file's header lists. Raises UserError where it is missing, truncated or not safetensors."""
    rule = why_outside(path, file)
    if rule is not None:
        raise UserError([f"{path / file} {rule}"])
    root = Path(os.path.realpath(path))
    own = Path(os.path.realpath(path / file)).relative_to(root).as_posix()
    folder = LocalFolder(root)
    try:
        size = folder.size(own)
        if size is None:
            raise UserError([f"{path / file} is missing; {AGAIN}"])
        with folder.open(own) as opened:
            begin, entries = read_any_header(opened, size)
    except (NotSafetensors, UnfitFile) as error:
        raise UserError([f"{path / file} {error}; {AGAIN}"]) from None
    except OSError as error:
        raise UserError([f"{path / file} cannot be read ({error.strerror}); mend that"]) from None
    return {name: Stored(own, begin + each.data_offsets[0], each.shape, each.dtype) for name, each in entries.items()}


def index_problems(path: Path, file: str, expected: Iterable[str], held: Iterable[str]) -> Iterator[str]:
    """One line for each tensor that the index lists in ``file`` without its being there, or the reverse."""
    expected, held = set(expected), set(held)
    for name in sorted(expected - held):
        yield f"{path / file} must hold {name}, which {INDEX} lists there, and lacks it; {AGAIN}"
    for name in sorted(held - expected):
        yield f"{path / file} holds {name}, which {INDEX} does not list there; {AGAIN}"


def cut(problems: list[str]) -> list[str]:
    """The first MOST_PROBLEMS lines, and a line with the number of the others."""
    more = len(problems) - MOST_PROBLEMS
    return problems if more <= 0 else [*problems[:MOST_PROBLEMS], f"and {more:,} more such problems"]
