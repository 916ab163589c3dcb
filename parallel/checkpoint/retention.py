"""Which checkpoints stay: the last ones, every m-th step, and the best by held-out loss."""

import math
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parallel.checkpoint.manifest import DamagedCheckpoint, read_manifest
from parallel.checkpoint.write import list_checkpoints

HELDOUT = "heldout"  # the manifest's scalar: (step, held-out loss after that update), or None


def steps_to_delete(
    steps: Collection[int],
    losses: Mapping[int, float],
    *,
    keep_last: int,
    keep_every_steps: int | None = None,
    keep_best: int = 0,
    last_good: int | None = None,
) -> list[int]:
    """Of the checkpoints at ``steps``, those that no rule keeps, oldest first.

    Kept are the ``keep_last`` newest, those whose step is a multiple of ``keep_every_steps``, the ``keep_best`` of
    lowest finite held-out loss (of equal ones the older), and always ``last_good``. ``losses`` may lack steps.
    """
    newest_first = sorted(steps, reverse=True)
    kept = set(newest_first[:keep_last]) | {last_good}
    if keep_every_steps is not None:
        kept |= {step for step in steps if step % keep_every_steps == 0}
    ranked = sorted((losses[step], step) for step in steps if step in losses and math.isfinite(losses[step]))
    kept |= {step for _, step in ranked[:keep_best]}
    return [step for step in reversed(newest_first) if step not in kept]


@dataclass
class Retention:
    """The rules of a run, and what it has read of its checkpoints so far."""

    keep_last: int
    keep_every_steps: int | None = None
    keep_best: int = 0
    losses: dict[int, float | None] = field(default_factory=dict)  # step -> held-out loss in its manifest

    def apply(self, checkpoints: Path) -> list[int]:
        """Deletes what no rule keeps, and what interrupted saves left; returns the steps deleted. One rank calls it.

        Nothing is deleted where no checkpoint is whole; damaged ones that were set aside have other names and stay.
        """
        remove_partial(checkpoints)
        directories = {step_of(directory): directory for directory in list_checkpoints(checkpoints)}
        last_good = next((step for step in reversed(directories) if looks_whole(directories[step])), None)
        if last_good is None:
            return []
        known = {step: self.loss_of(directory) for step, directory in directories.items()} if self.keep_best else {}
        deleted = steps_to_delete(
            directories,
            {step: loss for step, loss in known.items() if loss is not None},
            keep_last=self.keep_last,
            keep_every_steps=self.keep_every_steps,
            keep_best=self.keep_best,
            last_good=last_good,
        )
        for step in deleted:
            remove_checkpoint(directories[step])
        return deleted

    def loss_of(self, directory: Path) -> float | None:
        """The held-out loss after the checkpoint's own step; None where none was taken there. Read once."""
        step = step_of(directory)
        if step not in self.losses:
            self.losses[step] = heldout_loss_of(directory)
        return self.losses[step]


def heldout_loss_of(directory: Path) -> float | None:
    """What the manifest says of the held-out loss at its step; None for a damaged one too."""
    try:
        manifest = read_manifest(directory)
    except DamagedCheckpoint:
        return None
    heldout = manifest.scalars.get(HELDOUT)
    return float(heldout[1]) if heldout is not None and heldout[0] == manifest.step else None


def looks_whole(directory: Path) -> bool:
    """Whether the manifest holds and every file has its size; hashes are not read."""
    try:
        manifest = read_manifest(directory)
    except DamagedCheckpoint:
        return False
    paths = {directory / file: expected["bytes"] for file, expected in manifest.files.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def step_of(directory: Path) -> int:
    """The update that a checkpoint's directory is named after."""
    return int(directory.name.removeprefix("step-"))


def remove_checkpoint(directory: Path) -> None:
    """Deletes a checkpoint: under a partial one's name first, so that a kill in between leaves no half of one."""
    doomed = directory.with_name(f".{directory.name}.partial")
    if doomed.exists():
        shutil.rmtree(doomed)
    shutil.rmtree(directory.rename(doomed))


def remove_partial(checkpoints: Path) -> list[str]:
    """Deletes what interrupted saves and deletions left; returns their names. Nobody may be saving meanwhile."""
    partial = sorted(checkpoints.glob(".step-*.partial"))
    for path in partial:
        shutil.rmtree(path)
    return [path.name for path in partial]
