"""Which checkpoints a real run leaves, over a restart: held-out losses are read from the checkpoints' own manifests."""

from dataclasses import replace
from pathlib import Path

from kill_drill import write_config
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.tree import CheckpointConfig
from launcher.training.start import start_training
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens
from modeling.optimizers.config import AdamWConfig
from parallel.checkpoint.local import LocalStore
from parallel.checkpoint.store import step_of


def test_milestones_and_the_best_stay_over_a_restart(tmp_path):
    tokens = write_tokens(tmp_path)
    path = write_config(tmp_path, "run", tokens, "dp2 zero1")
    config = load_config(path)
    config = replace(
        config,
        data=replace(config.data, heldout_path=tokens),
        train=replace(config.train, steps=7, eval_every_steps=1, eval_sequences=8),
        optimizer=AdamWConfig(lr=0.05),  # too much: the held-out loss rises again
        checkpoint=CheckpointConfig(every_steps=1, keep_last=1, keep_every_steps=3, keep_best=1),
    )
    path.write_text(dump_config(config))
    metrics = tmp_path / "run" / "metrics.jsonl"
    for steps in (4, 7):
        assert start_training(path, [f"train.steps={steps}", "train.micro_batch_size=8"], 1) == 0
    losses = {row["step"]: row["eval_loss"] for row in read_metrics(metrics) if "eval_loss" in row}
    assert sorted(losses) == [1, 2, 3, 4, 5, 6, 7]
    best = min(losses, key=lambda step: losses[step])
    assert best in (1, 2, 4, 5)  # neither a milestone nor the last, and before the restart or after it
    assert steps_left(tmp_path) == {3, 6, 7, best}
    metrics.unlink()  # not what the choice is made by
    assert start_training(path, ["train.steps=8", "train.micro_batch_size=8"], 1) == 0
    assert steps_left(tmp_path) == {3, 6, 8, best}


def steps_left(folder: Path) -> set[int | None]:
    return {step_of(name) for name in LocalStore(folder / "run" / "checkpoints").names()}
