"""What a checkpoint holds besides tensors: how far the run is, in updates and in data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.checkpoint.read import load_state, open_latest
from parallel.checkpoint.retention import Retention
from parallel.checkpoint.write import save_checkpoint
from parallel.engine import Engine


@dataclass
class TrainState:
    """Together with the engine's tensors, exactly what a checkpoint holds."""

    step: int = 0  # updates made or skipped
    consumed: int = 0  # where the next sample lies in the order of samples
    skipped: list[tuple[int, int]] = field(default_factory=list)  # ranges of samples that are not to be trained on
    tokens: int = 0  # real tokens seen
    heldout: tuple[int, float] | None = None  # the latest held-out loss: after which update, and its value

    def scalars(self, engine: Engine) -> dict[str, Any]:
        """For the checkpoint's manifest."""
        return {
            "consumed": self.consumed,
            "skipped": self.skipped,
            "tokens": self.tokens,
            "heldout": self.heldout,
            "updates": engine.updates(),
            "loss_scaler": engine.loss_scaler_state(),
            "written_by": layout_of(engine),
        }


def layout_of(engine: Engine) -> dict[str, Any]:
    """The layout and precision, for whoever looks at a checkpoint: loading does not need them."""
    degrees = {name: getattr(engine.mesh, name).degree for name in ("pp", "dp", "cp", "tp", "ep")}
    return {"ranks": engine.mesh.world_size, **degrees, "zero": engine.zero, "precision": engine.precision}


def restore(checkpoints: Path, engine: Engine, seed: int) -> tuple[TrainState, list[str]]:
    """The state of the newest good checkpoint, or of step 0, loaded into the engine; and warnings.

    All ranks call it.
    """
    checkpoint, warnings = open_latest(checkpoints, engine.mesh)
    if checkpoint is None:
        engine.initialize_weights(seed)
        return TrainState(), warnings
    load_state(engine, checkpoint)
    scalars = checkpoint.manifest.scalars
    skipped = [(first, last) for first, last in scalars["skipped"]]
    heldout = tuple(scalars["heldout"]) if scalars["heldout"] is not None else None
    return TrainState(checkpoint.step, scalars["consumed"], skipped, scalars["tokens"], heldout), warnings


def save(checkpoints: Path, engine: Engine, state: TrainState, tokenizer: Path | None, retention: Retention) -> Path:
    """Writes a checkpoint of the state, then deletes those that no rule keeps. All ranks call it."""
    path = save_checkpoint(checkpoints, state.step, engine, state.scalars(engine), tokenizer=tokenizer)
    if engine.mesh.rank == 0:
        retention.apply(checkpoints)
    return path
