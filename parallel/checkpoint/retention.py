"""Deletes old checkpoints, and keeps the last ones, those of every m-th step, and the best by held-out loss."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parallel.checkpoint.manifest import DamagedCheckpoint, Location, Manifest, check_sizes, read_manifest
from parallel.checkpoint.places import open_store
from parallel.checkpoint.store import Folder, Store, try_each

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
    """The steps, oldest first, of the checkpoints that no rule keeps.

    Kept are the ``keep_last`` newest, those whose step is a multiple of ``keep_every_steps``, the ``keep_best`` with
    the lowest finite held-out loss (of equal ones the older), and always ``last_good``. ``losses``: held-out loss by
    step; steps may be missing there.
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
    """A run's retention rules, and the held-out losses that it has read from its checkpoints so far."""

    keep_last: int
    keep_every_steps: int | None = None
    keep_best: int = 0
    losses: dict[int, float | None] = field(default_factory=dict)  # step -> held-out loss in its manifest

    def apply(self, checkpoints: Path | str | Store) -> list[int]:
        """Deletes checkpoints that no rule keeps, and leftovers of interrupted saves. One rank calls it.

        Returns the steps of the deleted checkpoints. No checkpoint is deleted where none is whole; damaged ones that
        were set aside have other names and stay. If something cannot be deleted, the rest is deleted first, and then an
        OSError is raised that names it.
        """
        store = open_store(checkpoints) if isinstance(checkpoints, Path | str) else checkpoints
        deleted: list[int] = []
        try_each(lambda act: act(), (store.sweep, lambda: deleted.extend(self._delete(store))))
        return deleted

    def _delete(self, store: Store) -> list[int]:
        """Deletes the checkpoints that no rule keeps; returns their steps."""
        folders = {int(name.removeprefix("step-")): store.folder(name) for name in store.names()}
        last_good = next((step for step in reversed(folders) if looks_whole(folders[step])), None)
        if last_good is None:
            return []
        self.losses.pop(max(folders), None)  # newly saved, perhaps in place of a damaged one of the same step
        known = {step: self.loss_of(step, folder) for step, folder in folders.items()} if self.keep_best else {}
        deleted = steps_to_delete(
            folders,
            {step: loss for step, loss in known.items() if loss is not None},
            keep_last=self.keep_last,
            keep_every_steps=self.keep_every_steps,
            keep_best=self.keep_best,
            last_good=last_good,
        )
        try_each(store.remove, [folders[step].name for step in deleted])
        return deleted

    def loss_of(self, step: int, folder: Folder) -> float | None:
        """The held-out loss after the checkpoint's own step; None where it was not measured there. Read only once."""
        if step not in self.losses:
            self.losses[step] = heldout_loss_of(folder)
        return self.losses[step]


def heldout_loss_of(location: Location) -> float | None:
    """The held-out loss after the checkpoint's own step; None where it was not measured, or the manifest is damaged."""
    try:
        manifest = read_manifest(location)
    except DamagedCheckpoint:
        return None
    return heldout_loss(manifest)


def heldout_loss(manifest: Manifest) -> float | None:
    """The held-out loss after the checkpoint's own step, from its manifest; None where it was not measured there."""
    heldout = manifest.scalars[HELDOUT]
    return float(heldout[1]) if heldout is not None and heldout[0] == manifest.step else None


def looks_whole(location: Location) -> bool:
    """Whether the manifest is valid and every file has its size; hashes are not checked."""
    try:
        manifest = read_manifest(location)
    except DamagedCheckpoint:
        return False
    return not check_sizes(manifest, location, manifest.files)
