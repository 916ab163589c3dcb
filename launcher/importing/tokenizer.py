"""The tokenizer of a model folder, loaded without running code and kept with the checkpoint."""

from pathlib import Path
from typing import Any

from data.errors import refuse
from data.tokenizer import count_ids, save_tokenizer
from data.tokenizer_files import load_folder
from launcher.importing.folder import has_tokenizer

REMEDY = "mend it, or remove the tokenizer's files to import the weights alone"


def load_tokenizer(path: Path, vocab_size: int) -> Any:
    """The folder's tokenizer as ``transformers`` loads it, without running the folder's code; None where it has none.

    Raises DataError where it is not a fast one, has no eos_token, or has more ids than ``vocab_size``.
    """
    if not has_tokenizer(path):
        return None
    found = f"HF_DIR={path}: its tokenizer"
    tokenizer = load_folder(path, found, REMEDY)
    if not tokenizer.is_fast:
        raise refuse(found, "must be a fast one (with a tokenizer.json)", "convert it, or remove its files")
    if tokenizer.eos_token_id is None:
        raise refuse(found, "has no eos_token, which ends each document", "set eos_token in its tokenizer_config.json")
    n_ids = count_ids(tokenizer)
    if n_ids > vocab_size:
        raise refuse(found, f"has {n_ids} ids, but vocab_size={vocab_size} in config.json is smaller", REMEDY)
    return tokenizer


def begins_with_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer, which may be None, puts its bos_token before a text that it is given."""
    if tokenizer is None or tokenizer.bos_token_id is None:
        return False
    return tokenizer.encode("")[:1] == [tokenizer.bos_token_id]


def tokenizer_attachments(tokenizer: Any, folder: Path) -> Path | None:
    """A new folder in ``folder`` with the tokenizer's files as training keeps them; None without a tokenizer."""
    if tokenizer is None:
        return None
    save_tokenizer(tokenizer, folder / "tokenizer")
    return folder / "tokenizer"
