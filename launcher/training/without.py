"""Checks that a run's config and its newest checkpoint agree on the documents left out by data.without."""

from pathlib import Path

from data.errors import DataError
from data.without import hash_of_file, hash_of_list, read_list
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.lineage import read_lineage
from launcher.training.run_parts import WITHOUT
from parallel.checkpoint.manifest import DamagedCheckpoint
from parallel.checkpoint.places import list_checkpoints
from parallel.checkpoint.read import Checkpoint, open_checkpoint


def hash_in(checkpoint: Checkpoint) -> str:
    """The hash of the list of documents saved with a checkpoint; "" without one. Raises DamagedCheckpoint."""
    copy = checkpoint.attached(WITHOUT)
    try:
        return "" if copy is None else hash_of_list(read_list(copy, WITHOUT))
    except DataError as error:
        raise DamagedCheckpoint(str(error)) from None


def check_documents(config: RunConfig) -> None:
    """Raises UserError where data.without lists other documents than those the newest checkpoint was trained without.

    A branched run begins with a checkpoint trained under its parent's list: there, the branch's own record says which
    list is right. Reads only.
    """
    for folder in reversed(list_checkpoints(config.checkpoint_location)):
        try:
            checkpoint = open_checkpoint(folder, verify=False)
            expected = expected_hash(config.run_path, checkpoint)
        except DamagedCheckpoint:
            continue
        check_list(config, expected, folder.location)
        return


def expected_hash(run_path: Path, checkpoint: Checkpoint) -> str:
    """The hash of the list of documents that a run must leave out when it resumes from ``checkpoint``; "" for none."""
    lineage = read_lineage(run_path)
    if lineage is not None and lineage.step == checkpoint.step:
        return lineage.without.sha256 if lineage.without is not None else ""
    return hash_in(checkpoint)


def check_list(config: RunConfig, expected: str, where: str) -> None:
    """Raises UserError where the hash of data.without is not ``expected``, that of the checkpoint at ``where``."""
    try:
        found = hash_of_file(config.data.without)
    except DataError as error:
        raise UserError(error.problems) from None
    if found == expected:
        return
    given = f"data.without={config.data.without if config.data.without is not None else 'null'}"
    rule = f"must list the documents that {where} was trained without" if expected else "must stay null"
    remedy = f"put the list back ({WITHOUT} in that folder)" if expected else "set it back"
    raise UserError([f"{given} {rule}; {remedy}, or give the list to `roundtable branch --without`"])
