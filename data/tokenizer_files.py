"""Loading a tokenizer's folder, which may be untrusted: its files are checked first, and no code in it is ever run.

``transformers`` can be made to import Python files that a tokenizer names under ``auto_map``; Roundtable refuses such
folders. ``transformers`` and ``huggingface_hub`` are imported only when a tokenizer is loaded.
"""

import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import DataError, reason_of, refuse
from data.hub import why_unreachable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The files that determine a tokenizer's tokens; model weights beside them do not.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model")
FETCHED_FILES = (*TOKENIZER_FILES, "config.json", "chat_template*", "*.tiktoken", "tekken.json")
NAMING_CODE = ("tokenizer_config.json", "config.json")
LARGEST_FILE = 1 << 30  # bytes; the largest vocabularies in use take some 40 MB
REMEDY = "name a tokenizer's folder or hub name, or null to train one"


def load_folder(folder: Path, found: str, remedy: str = REMEDY) -> "PreTrainedTokenizerFast":
    """The tokenizer of this folder as ``transformers`` loads it, without running any code of the folder's.

    ``found`` is what the user named, for errors, and ``remedy`` what to do instead. Raises DataError where a file names
    code, is broken, is too large or is no regular file, and where ``transformers`` cannot load it. Downloads nothing.
    """
    check_files(folder, found)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # broken files make the libraries raise anything, plain Exception included
        raise _refuse_loading(folder, found, error, remedy) from error
    finally:
        logging.set_verbosity(verbosity)


def fetch_tokenizer(name: str) -> Path:
    """The local folder with a copy of the hub's tokenizer ``name``: downloaded, or cached if the hub is unreachable.

    It downloads files of known kinds only, no code. Raises DataError, within seconds, where there is neither.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        rule = "is no folder, and no name on the Hugging Face hub"
        raise refuse(f"data.tokenizer={name!r}", rule, "check the path, or put the folder back")
    disable_progress_bars()
    unreachable = why_unreachable(name, "model")
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(FETCHED_FILES), local_files_only=unreachable is not None
        )
    except Exception as error:  # of several HTTP libraries, as versions have it
        reason = unreachable or reason_of(error)
        rule = f"is no folder, and cannot be had from the Hugging Face hub ({reason})"
        raise refuse(f"data.tokenizer={name!r}", rule, f"check the name and the network; {REMEDY}") from error
    return Path(folder)


def check_files(folder: Path, found: str) -> None:
    """Raises DataError, naming the file, where reading the folder would hang, take all memory or run code."""
    names = {path for pattern in FETCHED_FILES for path in folder.glob(pattern)}
    for path in sorted(names):
        _check_kind(path, found)
    for path in sorted(path for path in names if path.suffix == ".json"):
        tree = _read_json(path, found)
        code = _code_named(tree) if path.name in NAMING_CODE else None
        if code is not None:
            rule = f"names code to run under auto_map ({code}), and Roundtable never runs a tokenizer's code"
            raise refuse(f"{found}: {path}", rule, "remove auto_map from it, or name a tokenizer that needs no code")


def _check_kind(path: Path, found: str) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise refuse(f"{found}: {path}", f"cannot be read ({error.strerror})", "mend it, or remove it") from error
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise refuse(f"{found}: {path}", "is not a regular file", "remove it")
    if status.st_size > LARGEST_FILE:
        raise refuse(f"{found}: {path}", f"has {status.st_size} bytes, more than {LARGEST_FILE}", "name another")


def _read_json(path: Path, found: str) -> Any:
    """A JSON file's content. Raises DataError where it is not JSON that could be written again unchanged."""
    try:
        tree = json.loads(path.read_bytes())
        json.dumps(tree, ensure_ascii=False).encode()  # a lone surrogate would fail in the middle of saving
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(f"{found}: {path}", f"is not JSON that can be used ({reason_of(error)})", "mend it") from error
    if not isinstance(tree, dict) and path.name not in ("tokenizer.model.json", "vocab.json"):
        raise refuse(f"{found}: {path}", f"must hold a JSON object but holds {type(tree).__name__}", "mend it")
    return tree


def _code_named(tree: dict[str, Any]) -> str | None:
    """The tokenizer class for which ``auto_map`` names code; None where it names none."""
    named = tree.get("auto_map")
    if isinstance(named, dict):
        named = named.get("AutoTokenizer")
    return None if named is None else str(named)[:200]


def _refuse_loading(folder: Path, found: str, error: Exception, remedy: str) -> DataError:
    """The refusal of a folder that cannot be loaded; it names tokenizer.json where that file alone fails too."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            Tokenizer.from_file(str(path))
        except Exception as own:
            found, error = f"{found}: {path}", own
    return refuse(found, f"cannot be loaded by transformers ({reason_of(error)})", remedy)
