"""``init_from``: a run's first weights are taken from another run's checkpoint, whatever parallel layout wrote it.

The process that starts the run checks the source before anything is created, and writes the one checkpoint that it
chose into the config, so that a restart, or a rollback to step 0, begins with the same weights.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.tokenizer import load_tokenizer, read_vocab, tokenizer_folder
from launcher.commands.trained import config_of, naming_tokenizer, newest_good
from launcher.config.tree import RunConfig
from launcher.config.words import show
from launcher.console import tell
from launcher.errors import UserError
from launcher.training.run_dir import changes, refusing_unreachable, saved_config
from modeling.config import DROPOUTS
from modeling.moe_config import Balance
from parallel.checkpoint.manifest import whole_manifest
from parallel.checkpoint.places import is_remote, open_store
from parallel.checkpoint.read import Checkpoint
from parallel.checkpoint.store import Folder

# Model keys that may differ from the source's: they affect training only, and the weights mean the same.
FREE_MODEL_KEYS = (
    *("model.init_std", "model.z_loss", "model.moe.z_loss"),
    *("model.init", "model.init.distribution"),
    *("model.init.base_d_model", "model.init.base_d_ff", "model.init.base_expert_d_ff"),
    *(f"model.{key}" for key in DROPOUTS),
    *("model.moe.balance.coefficient", "model.moe.balance.rate", "model.mtp.coefficient"),
)


def with_source(config: RunConfig) -> RunConfig:
    """The config with init_from replaced by the location of the one checkpoint that the run begins with. Reads only.

    A run that has a checkpoint resumes from that, and its init_from stays the recorded one, whatever the config says
    now. Raises UserError where the source is missing, damaged, of another model, or of another tokenizer.
    """
    saved = saved_config(config.run_path)
    kept = saved.init_from if saved is not None else None
    if config.init_from is None and kept is None:
        return config
    if has_begun(config):
        return dataclasses.replace(config, init_from=kept)
    if config.init_from is None:
        return config
    source, found = open_source(config.init_from)
    problems = [*model_problems(config, found), *tokenizer_problems(config, source)]
    if problems:
        raise UserError(problems)
    return dataclasses.replace(config, init_from=source.folder.location)


def has_begun(config: RunConfig) -> bool:
    """Whether the run has a checkpoint."""
    with refusing_unreachable("checkpoint.dir", config.checkpoint_location):
        return bool(open_store(config.checkpoint_location).names())


def open_source(path: str) -> tuple[Checkpoint, RunConfig]:
    """The newest whole checkpoint that ``path`` refers to, and its run's config. Hashes are checked only on loading."""

    def opened(run: Path | None, folder: Folder) -> tuple[Checkpoint, Path | None]:
        return Checkpoint(folder, whole_manifest(folder)), run

    checkpoint, run = newest_good(path, "init_from", opened, "name another checkpoint")
    return checkpoint, config_of(checkpoint, run, path, "init_from")


def warn_of_beginnings(config: RunConfig) -> None:
    """Prints a warning where data.add_bos differs between the run and the run of its init_from."""
    if config.init_from is None:
        return
    with suppress(UserError, OSError):  # gone since its weights were read: its run deletes old checkpoints
        theirs, ours = open_source(config.init_from)[1].data.add_bos, config.data.add_bos
        if theirs == ours:
            return
        told = f"data.add_bos={show(ours)}, and it was {show(theirs)} in the run of init_from={config.init_from}"
        tell(f"warning: {told}: documents begin differently from those that the weights were trained on")


def model_problems(config: RunConfig, found: RunConfig) -> Iterator[str]:
    """A refusal for each model key that differs from the source's and changes what the weights mean."""
    for key, theirs, ours in differing_keys(found, config):
        yield (
            f"{key}={told_value(ours)} must be {told_value(theirs)}, as in init_from={config.init_from}; set it so, "
            "or leave init_from=null to begin with new weights"
        )


def differing_keys(one: RunConfig, other: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value in ``one``, value in ``other``) of each differing model key that changes what the weights mean."""
    for key, before, after in changes(one.model, other.model, "model"):
        if key not in FREE_MODEL_KEYS and not all(map(_has_no_bias, (before, after))):
            yield key, before, after


def _has_no_bias(value: Any) -> bool:
    """Whether ``value`` is a balancing rule that leaves a router's weights as they are without any rule."""
    return isinstance(value, Balance) and not value.moves_bias


def told_value(value: Any) -> str:
    """A config value as messages show it, in one line."""
    return show(dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value)


def tokenizer_problems(config: RunConfig, source: Checkpoint) -> Iterator[str]:
    """The refusal of a tokenizer whose token ids differ from those that the source was trained with, if it has one."""
    theirs, where = source.tokenizer, source.folder.location
    folder = tokenizer_folder(config.data, config.model.vocab_size)
    if theirs is None or folder is None:
        return
    told = f"data.tokenizer={config.data.tokenizer or 'null'}"
    take = "a copy of its folder tokenizer" if is_remote(where) else source.folder.path("tokenizer")
    remedy = f"set data.tokenizer to {take}"
    if config.data.tokenizer is None and not folder.is_dir():
        yield f"{told} would train a tokenizer, and the weights of init_from={config.init_from} know another; {remedy}"
        return
    with naming_tokenizer(source, "init_from") as found:
        vocab = read_vocab(theirs, found, "name another checkpoint")
    ours = load_tokenizer(config.data, config.model.vocab_size)
    if ours is not None and ours.get_vocab() != vocab:
        yield f"{told} must have the ids that init_from={config.init_from} was trained with; {remedy}"
