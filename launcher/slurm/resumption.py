"""Finds the checkpoint that a run would resume from, without reading its tensors."""

from dataclasses import dataclass

from launcher.config.tree import RunConfig
from launcher.training.newest import lost_line
from parallel.checkpoint.manifest import DamagedCheckpoint, Manifest, differences, whole_manifest
from parallel.checkpoint.places import open_store


@dataclass(frozen=True)
class Resumption:
    """The checkpoint that a start of the run would resume from, and what is wrong with it and newer ones."""

    step: int | None  # of the newest whole checkpoint; None: there is none
    damaged: tuple[str, ...]  # a line for each newer, damaged one, which the start would set aside
    problems: tuple[str, ...]  # why the run cannot resume from it


def look_for_checkpoint(config: RunConfig) -> Resumption:
    """Finds the newest whole checkpoint of the run by manifests, certificates and file sizes.

    The manifest certifies that every element of every tensor is there once, and loading reads boxes of them, so a
    whole checkpoint of this model loads under any layout that the config may have. Raises OSError where the
    checkpoints' location cannot be read.
    """
    store = open_store(config.checkpoint_location)
    names, damaged = store.names(), []
    for name in reversed(names):
        try:
            manifest = whole_manifest(store.folder(name))
        except DamagedCheckpoint as error:
            damaged.append(f"{name} is damaged: {error}")
            continue
        return Resumption(manifest.step, tuple(damaged), misfit(config, name, manifest))
    if not names:
        return Resumption(None, (), ())
    problem = lost_line(config.run_path, config.checkpoint_location, damaged)
    return Resumption(None, tuple(damaged), (problem,))


def misfit(config: RunConfig, name: str, manifest: Manifest) -> tuple[str, ...]:
    """A line where the checkpoint's tensors are not those of the config's model; empty where they are."""
    from modeling.logical import logical_shapes

    found = differences(manifest, logical_shapes(config.model))
    if not found:
        return ()
    more = f" (and {len(found) - 1} more differ)" if len(found) > 1 else ""
    return (
        f"run_dir={config.run_path} must hold checkpoints of this config's model, and {name} in "
        f"{config.checkpoint_location} has {found[0]}{more}; "
        "set model back, or choose another run_dir or checkpoint.dir",
    )
