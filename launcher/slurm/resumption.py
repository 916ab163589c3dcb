"""Where a run would go on from: its newest whole checkpoint, looked at without reading what it holds."""

from dataclasses import dataclass

from launcher.config.tree import RunConfig
from launcher.training.newest import lost_line
from parallel.checkpoint.manifest import DamagedCheckpoint, Manifest, differences, whole_manifest
from parallel.checkpoint.places import open_store


@dataclass(frozen=True)
class Resumption:
    """What a start would find."""

    step: int | None  # of the newest whole checkpoint; None: there is none
    damaged: tuple[str, ...]  # a line for each newer one, which the start would set aside
    problems: tuple[str, ...]  # why it cannot go on from there


def look_for_checkpoint(config: RunConfig) -> Resumption:
    """Looks at manifests, certificates and files' sizes, from the newest checkpoint to the first whole one.

    The manifest certifies that every element of every tensor is there once, and loading reads boxes of them, so a
    whole checkpoint of this model loads under any layout that the config may have. Raises OSError where the place
    cannot be read.
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
    """The line of a checkpoint that is not of this model, or nothing."""
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
