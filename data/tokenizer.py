"""The tokenizer: one from a folder or the hub, or one trained on the sources.

Whatever its origin, it is kept as a transformers tokenizer directory under token_dir, so a run does not depend on
the folder or the hub afterwards. ``transformers`` is imported only when a tokenizer is loaded through it.
"""

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from data.cleaning.groups import groups_of
from data.config import DataConfig, SourceConfig
from data.errors import DataError, reason_of, refuse
from data.manifest import hash_file
from data.partial import partial_suffix, sync_folder
from data.sources import expand_path, is_raw
from data.tokenizer_files import TOKENIZER_FILES, check_files, fetch_tokenizer, load_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

INFO = "roundtable.json"  # a TokenizerInfo, beside transformers' own files
PREPARE = "run `roundtable prepare` with this config"
SAMPLE_BYTES = 16_000_000  # text that a tokenizer is trained on, at most
TRAINING = 1  # a version, increased when training on the same sources would give another tokenizer


@dataclass(frozen=True)
class TokenizerInfo:
    """What preparation needs to know about a tokenizer besides its tokenizer.json."""

    eos_id: int
    n_ids: int  # the largest id, plus one
    fingerprint: str  # a hash of tokenizer.json and eos_id
    origins: list[str] = field(default_factory=list)  # folders that it is a copy of, by their absolute paths
    bos_id: int | None = None  # the id of its bos_token, if it has one


def tokenizer_folder(config: DataConfig, vocab_size: int) -> Path | None:
    """The folder of the config's tokenizer, complete if it exists; None where no source needs a tokenizer.

    Its name holds a hash of everything that fixes the tokenizer.
    """
    if config.tokenizer is None:
        raw = [source for source in config.sources if is_raw(source)]
        if not raw:
            return None
        trained_on = [_read_for_training(source) for source in raw]
        cleaned = [group.folder.name for group in groups_of(config)]
        fixed = [TRAINING, vocab_size, SAMPLE_BYTES, trained_on, *([cleaned] if cleaned else [])]
        if config.tokenizer_model != "bpe" or config.special_tokens:
            fixed += [config.tokenizer_model, config.special_tokens]
        name, fixes = f"{config.tokenizer_model}-{vocab_size}", json.dumps(fixed)
    else:
        origin = Path(expand_path(config.tokenizer))
        name = Path(config.tokenizer).name[:50] or "local"
        if not os.path.exists(origin) and (copy := _copy_of(origin, config, name)) is not None:
            return copy
        fixes = _hash_origin(origin) if os.path.isdir(origin) else f"hub/{config.tokenizer}"
        if any(source.chat is not None for source in config.sources):  # else a template changes no token
            fixes += "".join(hash_file(path) for path in sorted(origin.glob("chat_template*")) if path.is_file())
        if config.add_bos:  # a copy whose TokenizerInfo has bos_id
            fixes += "/bos"
    return Path(config.token_dir) / f"tokenizer-{name}-{xxhash.xxh3_64(fixes.encode()).hexdigest()}"


def _copy_of(origin: Path, config: DataConfig, name: str) -> Path | None:
    """The copy of a folder that no longer exists, if all copies made of it are the same tokenizer; else None."""
    copies = {}
    for folder in sorted(Path(config.token_dir).glob(f"tokenizer-{glob.escape(name)}-*")):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            info = _read_info(folder)
            if os.path.abspath(origin) in info.origins and (info.bos_id is not None or not config.add_bos):
                copies[info.fingerprint] = folder
    return next(iter(copies.values())) if len(copies) == 1 else None


def _read_for_training(source: SourceConfig) -> list[Any]:
    """The settings of a source that fix the text on which a tokenizer is trained."""
    fixed = [expand_path(source.path), source.exclude, source.text_key, source.subset, source.split, source.weight]
    return fixed if source.chat is None else [*fixed, asdict(source.chat)]


def load_tokenizer(config: DataConfig, vocab_size: int) -> "PreTrainedTokenizerFast | None":
    """The run's tokenizer as ``transformers`` loads it; None where the sources are token files and none is named.

    Raises DataError where a tokenizer has to be trained first, or cannot be used (see ``check_tokenizer``).
    """
    folder = tokenizer_folder(config, vocab_size)
    if folder is None:
        return None
    if folder.is_dir():
        return load_origin(str(folder))
    if config.tokenizer is None:
        raise refuse("data.tokenizer=null", "means one trained on the sources, which is not there yet", PREPARE)
    return check_tokenizer(load_origin(config.tokenizer), config, vocab_size)


def check_tokenizer(
    tokenizer: "PreTrainedTokenizerFast", config: DataConfig, vocab_size: int
) -> "PreTrainedTokenizerFast":
    """Returns the tokenizer that the config names. Raises DataError where it cannot be used.

    It must be a fast tokenizer with an eos_token, and with a bos_token for data.add_bos, and its ids must be below
    ``vocab_size``.
    """
    found = f"data.tokenizer={config.tokenizer!r}"
    if not tokenizer.is_fast:
        raise refuse(found, "must be a fast tokenizer (one with a tokenizer.json)", "convert it, or name another")
    if tokenizer.eos_token_id is None:
        raise refuse(found, "has no eos_token, which ends each document", "set eos_token in its tokenizer_config.json")
    if config.add_bos and tokenizer.bos_token_id is None:
        raise no_bos(found)
    n_ids = count_ids(tokenizer)
    if n_ids > vocab_size:
        remedy = f"set model.vocab_size to {-(-n_ids // 128) * 128} or more"
        raise refuse(f"{found} has {n_ids} ids", f"but model.vocab_size={vocab_size} is smaller", remedy)
    return tokenizer


def no_bos(found: str) -> DataError:
    """The refusal of data.add_bos with a tokenizer that has no bos_token; ``found`` names the tokenizer."""
    remedy = "set bos_token in its tokenizer_config.json, or data.add_bos to false"
    return refuse(f"data.add_bos=true: {found}", "has no bos_token, which begins each document", remedy)


def bos_id_of(config: DataConfig, folder: Path, found: str | None = None) -> int | None:
    """The id of the token that begins each document by data.add_bos; None where data.add_bos is false.

    ``folder`` is the tokenizer's, which errors call ``found``. Raises DataError where it has no such token.
    """
    if not config.add_bos:
        return None
    bos_id = read_info(folder).bos_id
    if bos_id is None:
        raise no_bos(found or str(folder))
    return bos_id


def after_bos(ids: list[int], bos_id: int | None) -> list[int]:
    """A text's tokens with ``bos_id`` in front, unless that is None or they begin with it already."""
    return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]


def count_ids(tokenizer: "PreTrainedTokenizerFast") -> int:
    """The largest id, plus one."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: Path, origin: str | None = None) -> None:
    """Writes the tokenizer's directory, atomically: it is complete or absent.

    ``origin``: the folder or hub name that it comes from (``add_origin``).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{partial_suffix()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # transformers saves several chat templates in a folder of their own, and a checkpoint holds files alone
        in_one_file = isinstance(tokenizer.chat_template, dict)
        tokenizer.save_pretrained(partial, save_jinja_files=not in_one_file)
        eos_id, bos_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        assert isinstance(eos_id, int) and (bos_id is None or isinstance(bos_id, int))
        digest = xxhash.xxh3_64(f"{hash_file(partial / 'tokenizer.json')}/{eos_id}".encode()).hexdigest()
        info = TokenizerInfo(eos_id, count_ids(tokenizer), digest, _folder_named(origin), bos_id)
        (partial / INFO).write_text(json.dumps(asdict(info)) + "\n")
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if not folder.is_dir():  # another process may have finished the same one
            partial.rename(folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def add_origin(folder: Path, origin: str) -> None:
    """Records in the tokenizer's directory that it is a copy of the folder ``origin``, which may then be removed."""
    info = read_info(folder)
    more = [each for each in _folder_named(origin) if each not in info.origins]
    if not more:
        return
    partial = folder / f"{INFO}.{partial_suffix()}"
    try:
        partial.write_text(json.dumps(asdict(replace(info, origins=[*info.origins, *more]))) + "\n")
        partial.replace(folder / INFO)
    finally:
        partial.unlink(missing_ok=True)


def _folder_named(origin: str | None) -> list[str]:
    """The absolute path of ``origin`` in a list, if it is a folder; else an empty list."""
    named = Path(expand_path(origin)) if origin is not None else None
    return [os.path.abspath(named)] if named is not None and named.is_dir() else []


def read_info(folder: Path) -> TokenizerInfo:
    """The info that ``save_tokenizer`` wrote. Raises DataError where it is damaged."""
    try:
        return _read_info(folder)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = f"cannot be read ({reason_of(error)})"
        raise refuse(f"{folder / INFO}", reason, f"remove {folder} and prepare again") from error


def _read_info(folder: Path) -> TokenizerInfo:
    info = TokenizerInfo(**json.loads((folder / INFO).read_bytes()))
    if not (type(info.eos_id) is type(info.n_ids) is int and 0 <= info.eos_id < info.n_ids):
        raise ValueError(f"eos_id={info.eos_id!r:.50} must be a token's id, below n_ids={info.n_ids!r:.50}")
    if not (info.bos_id is None or (type(info.bos_id) is int and 0 <= info.bos_id < info.n_ids)):
        raise ValueError(f"bos_id={info.bos_id!r:.50} must be a token's id, below n_ids={info.n_ids!r:.50}, or null")
    if not (isinstance(info.origins, list) and all(isinstance(each, str) for each in info.origins)):
        raise ValueError(f"origins={info.origins!r:.50} must be paths")
    return info


def check_kept(folder: Path, found: str, vocab_size: int, remedy: str) -> None:
    """Raises DataError where a folder that ``save_tokenizer`` wrote can no longer tokenize for this vocabulary.

    It may be a copy from an untrusted place, such as a checkpoint. ``found`` is what the user named, for errors.
    """
    vocab = read_vocab(folder, found, remedy)
    try:
        n_ids = max([_read_info(folder).n_ids, *(each + 1 for each in vocab.values())])
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise refuse(f"{found}: {folder / INFO}", f"cannot be read ({reason_of(error)})", remedy) from error
    if n_ids > vocab_size:
        raise refuse(found, f"has {n_ids} ids, but model.vocab_size={vocab_size} is smaller", remedy)


def read_vocab(folder: Path, found: str, remedy: str) -> dict[str, int]:
    """Token -> id. Raises DataError where the folder, which may be untrusted, holds no usable tokenizer.json."""
    check_files(folder, found)
    try:
        return load_fast(folder).get_vocab()
    except Exception as error:  # the library raises no other
        raise refuse(f"{found}: {folder / 'tokenizer.json'}", f"cannot be read ({reason_of(error)})", remedy) from error


def load_fast(folder: Path) -> "Tokenizer":
    """The directory's tokenizer without ``transformers``. A special token's name inside a document is plain text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


@contextlib.contextmanager
def making_tokens(found: str) -> Iterator[None]:
    """A context for calls of a tokenizer that raises DataError where a text has a part without a token.

    That happens in tokenizers of words or unigram pieces without an unk_token. ``found`` is what errors call the text.
    """
    try:
        yield
    except Exception as error:  # the library raises no other
        rule = f"holds text that the tokenizer has no token for ({reason_of(error)})"
        raise refuse(found, rule, "take it out, or give the tokenizer an unk_token") from error


def load_origin(name: str) -> "PreTrainedTokenizerFast":
    """The tokenizer of this folder or hub name. Raises DataError where ``transformers`` cannot load it."""
    folder = Path(expand_path(name))
    return load_folder(folder if folder.is_dir() else fetch_tokenizer(name), f"data.tokenizer={name!r}")


def _hash_origin(origin: Path) -> str:
    paths = sorted({path for pattern in TOKENIZER_FILES for path in origin.glob(pattern) if path.is_file()})
    return json.dumps([[path.name, hash_file(path)] for path in paths])
