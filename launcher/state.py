"""What a checkpoint holds besides tensors: how far the run is, in updates and in data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.checkpoint.read import load_state, open_latest
from parallel.checkpoint.write import remove_old, save_checkpoint
from parallel.engine import Engine


@dataclass
class TrainState:
    """Together with the engine's tensors, exactly what a checkpoint holds."""

    step: int = 0  # updates made or skipped
    consumed: int = 0  # where the next sample lies in the order of samples
    skipped: list[tuple[int, int]] = field(default_factory=list)  # ranges of samples that are not to be trained on
    tokens: int = 0  # real tokens seen

    def scalars(self, engine: Engine) -> dict[str, Any]:
        """For the checkpoint's manifest."""
        return {
            "consumed": self.consumed,
            "skipped": self.skipped,
            "tokens": self.tokens,
            "updates": engine.updates(),
            "loss_scaler": engine.loss_scaler_state(),
        }


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
    return TrainState(checkpoint.step, scalars["consumed"], skipped, scalars["tokens"]), warnings


def save(checkpoints: Path, engine: Engine, state: TrainState, tokenizer: Path | None, keep_last: int) -> Path:
    """Writes a checkpoint of the state, then deletes those beyond ``keep_last``. All ranks call it."""
    path = save_checkpoint(checkpoints, state.step, engine, state.scalars(engine), tokenizer=tokenizer)
    if engine.mesh.rank == 0:
        remove_old(checkpoints, keep_last)
    return path
