"""Opening the trained model that the user names by a run directory or by one checkpoint's directory or URL."""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from data.errors import DataError, refuse
from data.tokenizer import bos_id_of, count_ids
from data.tokenizer_files import load_folder
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.console import tell
from launcher.errors import UserError
from launcher.importing.folder import CONFIG_JSON, GENERATION_JSON
from launcher.importing.generation import why_unfit
from launcher.importing.token_ids import TOKEN_IDS_JSON, parse_token_ids
from launcher.training.compiling import fuse_of
from launcher.training.low_precision import check_precision
from launcher.training.run_dir import checkpoints_of, refusing_unreachable, saved_config
from launcher.training.run_parts import CONFIG, STARTED_IN, check_parts
from modeling.decoder import Decoder, build_decoder
from modeling.dtypes import DTYPES
from modeling.families.config_json import SpecialTokens
from modeling.fused import fuse_chains
from modeling.logical import logical_shapes
from modeling.precision import multiply_by, products_of
from parallel.checkpoint.boxes import Box, whole
from parallel.checkpoint.manifest import BUFFER, WEIGHT, DamagedCheckpoint, differences, is_there
from parallel.checkpoint.places import is_remote, list_checkpoints, open_folder
from parallel.checkpoint.read import Checkpoint, open_checkpoint
from parallel.checkpoint.store import MANIFEST, Folder

OTHER_CHECKPOINT = "give another checkpoint"

Found = TypeVar("Found")


@dataclass
class Trained:
    """An opened checkpoint and the config of the run that wrote it."""

    checkpoint: Checkpoint
    config: RunConfig
    run: Path | None  # the run directory that it lies in; None on an object store

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's folder; None for a run on token files that named none."""
        return self.checkpoint.tokenizer

    def read(self, name: str) -> Tensor:
        """One logical tensor, weight or buffer, whole: fp32 on the CPU. Raises UserError where it has changed since."""
        return self.read_box(name, whole(self.checkpoint.shape(name)))

    def read_box(self, name: str, box: Box) -> Tensor:
        """The elements of ``box`` of a logical tensor: fp32 on the CPU. Raises UserError where it has changed since."""
        kind = BUFFER if name in self.checkpoint.names(BUFFER) else WEIGHT
        try:
            return self.checkpoint.read_box(name, box, kind)
        except DamagedCheckpoint as error:
            where = self.checkpoint.folder.location
            raise UserError([f"CHECKPOINT={where} must not change while it is read, and {error}; try again"]) from None


def load_tokenizer(trained: Trained) -> Any:
    """The checkpoint's tokenizer as ``transformers`` loads it. Raises UserError where it does not fit its model.

    The files are checked, since a checkpoint from somewhere else may hold anything.
    """
    folder, vocab_size = trained.tokenizer, trained.config.model.vocab_size
    assert folder is not None
    with naming_tokenizer(trained.checkpoint, "CHECKPOINT") as found:
        tokenizer = load_folder(folder, found, OTHER_CHECKPOINT)
        if not (folder / "tokenizer.json").is_file():
            raise refuse(found, "must have a tokenizer.json", OTHER_CHECKPOINT)
        n_ids = count_ids(tokenizer)
        if n_ids > vocab_size:
            raise refuse(found, f"has {n_ids} ids, but model.vocab_size={vocab_size} is smaller", OTHER_CHECKPOINT)
        return tokenizer


def bos_id(trained: Trained) -> int | None:
    """The id of the BOS token that begins each text of a run with data.add_bos, else None. Raises UserError.

    The checkpoint must have a tokenizer.
    """
    assert trained.tokenizer is not None
    with naming_tokenizer(trained.checkpoint, "CHECKPOINT") as found:
        return bos_id_of(trained.config.data, trained.tokenizer, found)


def load_generation_config(trained: Trained) -> bytes | None:
    """The content of an imported model's generation_config.json; None where there is none. Raises UserError."""
    path = trained.checkpoint.attached(GENERATION_JSON)
    if path is None:
        return None
    content = path.read_bytes() if path.is_file() else b""
    rule = why_unfit(content) if content else "must be a file that is not empty"
    if rule is not None:
        raise UserError(
            [f"CHECKPOINT={trained.checkpoint.folder.location}: its {path.name} {rule}; {OTHER_CHECKPOINT}"]
        )
    return content


def end_ids(trained: Trained, tokenizer: Any) -> list[int]:
    """The ids of tokens that end a text: the tokenizer's EOS, and those of an imported generation_config.json."""
    content = load_generation_config(trained)
    told = None if content is None else json.loads(content).get("eos_token_id")
    further = told if isinstance(told, list) else [told]
    return list(dict.fromkeys([tokenizer.eos_token_id, *(each for each in further if type(each) is int)]))


def load_token_ids(trained: Trained) -> SpecialTokens:
    """The special tokens' ids from the config.json of a model imported without a tokenizer. Raises UserError."""
    path = trained.checkpoint.attached(TOKEN_IDS_JSON)
    if path is None:
        return SpecialTokens()
    try:
        return parse_token_ids(path.read_bytes() if path.is_file() else b"")
    except ValueError as error:
        where = trained.checkpoint.folder.location
        raise UserError([f"CHECKPOINT={where}: its {path.name} {error}; {OTHER_CHECKPOINT}"]) from None


@contextmanager
def naming_tokenizer(checkpoint: Checkpoint, key: str) -> Iterator[str]:
    """Yields the tokenizer's name for messages; turns DataErrors about its local copy into UserErrors that name it.

    ``key`` is the argument or option by which the user gave the checkpoint.
    """
    try:
        yield f"{key}={checkpoint.folder.location}: its tokenizer"
    except DataError as error:
        raise UserError([line.replace(f"{checkpoint.tokenizer}/", "") for line in error.problems]) from None


@contextmanager
def refusing_spoiled_weights(trained: Trained) -> Iterator[None]:
    """Turns FloatingPointError, raised where logits are not finite, into a UserError that names the checkpoint."""
    try:
        yield
    except FloatingPointError as error:
        where = trained.checkpoint.folder.location
        rule = f"must have weights that a text can be made with, and {error}"
        raise UserError([f"CHECKPOINT={where} {rule}; give an earlier checkpoint"]) from None


def open_trained(path: Path | str) -> Trained:
    """Opens ``path``: a checkpoint's directory, or a run directory, of which the latest good checkpoint is taken.

    On an object store ``path`` is a URL: a checkpoint's, or that of the run's checkpoint.dir. All hashes are compared.
    Nothing is changed: a damaged checkpoint stays where it is, and is named on stderr where an older one is taken
    instead. Raises UserError where there is no good one, or it is not of the config's model.
    """
    opened = partial(open_one, path)
    trained = newest_good(path, "CHECKPOINT", opened, "give another one, or train on to write one")
    if trained.run is not None:
        check_parts(trained.run, STARTED_IN)  # so that all commands report it, also those that read no relative path
    return trained


def open_one(path: Path | str, run: Path | None, folder: Folder) -> Trained:
    """Opens the checkpoint in ``folder``, found at the user's ``path``, and compares every hash.

    ``run`` is its run directory; None on an object store. Raises DamagedCheckpoint, and UserError for a wrong config.
    """
    checkpoint = open_checkpoint(folder, verify=False)
    config = config_of(checkpoint, run, path)
    check_model(checkpoint, config, run)
    checkpoint.verify()
    return Trained(checkpoint, config, run)


def newest_good(path: Path | str, key: str, opened: Callable[[Path | None, Folder], Found], remedy: str) -> Found:
    """The result of ``opened`` for the newest checkpoint at ``path`` that is not damaged.

    ``opened`` is called with the run directory (None on an object store) and the checkpoint's folder, and raises
    DamagedCheckpoint. Damaged checkpoints are named on stderr where an older one is taken instead. Raises UserError
    where there is no good one; ``key`` is the argument or option by which the user gave ``path``.
    """
    damaged = []
    for run, folder in newest_first(path, key):
        try:
            found = opened(run, folder)
        except DamagedCheckpoint as error:
            if folder.files():  # else its run has deleted it
                damaged.append(f"{key}={folder.location} is damaged ({error}); {remedy}")
            continue
        for line in damaged:
            tell(f"{line}; taking {folder.name}")
        return found
    raise UserError(damaged or [no_checkpoint(key, path)])


def no_checkpoint(key: str, path: Path | str) -> str:
    """The problem of a place without checkpoints, in a line; for a model folder of transformers, how to import it."""
    if not is_remote(path) and os.path.isfile(os.path.join(path, CONFIG_JSON)):
        how = f"`roundtable import {shlex.quote(str(path))} RUN_DIR`"
        return f"{key}={path} is a model folder of transformers, not a run; make a run directory of it by {how}"
    return f"{key}={path} holds no checkpoint; give a run directory with checkpoints/step-N"


def newest_first(path: Path | str, key: str = "CHECKPOINT") -> Iterator[tuple[Path | None, Folder]]:
    """The run directory and each checkpoint at ``path``, the newest first, then those that were written meanwhile.

    A run that trains may delete checkpoints while they are tried, and write others.
    """
    tried: set[str] = set()
    while True:
        run, candidates = find_candidates(path, key)
        following = [folder for folder in reversed(candidates) if folder.name not in tried]
        if not following:
            return
        for folder in following:
            tried.add(folder.name)
            yield run, folder


def find_candidates(path: Path | str, key: str = "CHECKPOINT") -> tuple[Path | None, list[Folder]]:
    """The run directory, if there is one, and the checkpoints at ``path``, oldest first; ``path`` may itself be one.

    ``key`` is the argument or option by which the user gave it. Raises UserError where ``path`` is no folder.
    """
    if is_remote(path):
        with refusing_unreachable(key, path):
            folder = open_folder(path)
            return None, [folder] if is_there(folder) else list_checkpoints(path)
    path = Path(path)
    if not os.path.isdir(path):  # False also where the name is too long, or holds a NUL byte
        raise UserError([f"{key}={path} is not a folder; give a run directory, or one of its checkpoints/step-N"])
    if is_there(folder := open_folder(path)):
        return path.absolute().parent.parent, [folder]
    return path, list_checkpoints(checkpoints_of(path))


def check_model(checkpoint: Checkpoint, config: RunConfig, run: Path | None) -> None:
    """Raises DamagedCheckpoint where the checkpoint's tensors are not those of the config's model.

    Raises UserError instead where the run directory's config has another model than the checkpoint's copy of it.
    """
    found = differences(checkpoint.manifest, logical_shapes(config.model))
    if not found:
        return
    more = f" (and {len(found) - 1} more differ)" if len(found) > 1 else ""
    copy = checkpoint.attached(CONFIG)
    if run is not None and copy is not None and load_config(copy).model != config.model:
        has = f"{checkpoint.folder.location} has {found[0]}{more}"
        remedy = "put the run's own back; a copy is in each of its checkpoints"
        raise UserError(
            [f"{run / CONFIG} must be the config that the checkpoint was trained with, and {has}; {remedy}"]
        )
    raise DamagedCheckpoint(f"{checkpoint.folder.path(MANIFEST)} is not of its config's model: {found[0]}{more}")


def config_of(checkpoint: Checkpoint, run: Path | None, path: Path | str, key: str = "CHECKPOINT") -> RunConfig:
    """The config in the run directory, or else the copy in the checkpoint. Raises UserError where there is neither."""
    saved = run / CONFIG if run is not None and saved_config(run) is not None else checkpoint.attached(CONFIG)
    if saved is None:
        missing = "config.yaml" if run is None else run / CONFIG
        raise UserError([f"{key}={path} must lie in a run directory, and {missing} is missing; put it back"])
    return load_config(saved)


def load_decoder(trained: Trained, device: str | torch.device, dtype: torch.dtype) -> Decoder:
    """The whole model in evaluation mode on one device, with weights in ``dtype`` and buffers (router biases) in fp32.

    The modules of multi-token prediction are left out, since generation and evaluation do not use them.
    """
    with torch.device("meta"):
        model = build_decoder(replace(trained.config.model, mtp=None))
    state = {name: trained.read(name).to(device, dtype) for name, _ in model.named_parameters()}
    state |= {name: trained.read(name).to(device) for name, _ in model.named_buffers()}
    if trained.config.model.tie_embeddings:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def load_as_it_trains(trained: Trained, device: str | torch.device) -> Decoder:
    """The whole model on one device in the precision that its run trains in, fp8 included, without compiled kernels.

    Raises UserError where the GPU is too old for this precision.
    """
    train = trained.config.train
    check_precision(train.precision, torch.device(device), "set CUDA_VISIBLE_DEVICES= to compute on the CPU")
    model = load_decoder(trained, device, DTYPES[train.stored])
    multiply_by(model, products_of(train.precision))
    fuse_chains(model, fuse_of("off", torch.device(device).type))
    return model
