"""What `roundtable submit` says of the checkpoints that a run would go on from; damage is planted in real ones."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from command_runs import train, write_config
from launcher.cli import main
from launcher.config.load import load_config
from launcher.slurm.checks import notes
from launcher.slurm.resumption import look_for_checkpoint
from layout_runs import write_tokens
from parallel.checkpoint.store import step_name
from sealed import reseal


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The config of a run with checkpoints at steps 2 and 4 (router biases among them), of one process."""
    folder = tmp_path_factory.mktemp("run")
    path = write_config(folder, write_tokens(folder), "run", steps=4)
    train(path, 1)
    return path


@pytest.fixture
def run(trained, tmp_path) -> tuple[Path, str]:
    """The config, and the override that makes it one of a copy that a test may damage."""
    copy = shutil.copytree(trained.with_suffix(""), tmp_path / "copy")
    return trained, f"run_dir={copy}"


def warnings(capsys, path: Path, *overrides: str, about: str = "run_dir=") -> list[str]:
    """What a dry run says about the run directory, or another key, under two processes of tp."""
    job = ["slurm.gpus_per_node=2", "parallel.tp=2", "train.steps=8"]
    assert main(["submit", str(path), *job, *overrides, "--dry-run"]) == 0
    lines = [line.removeprefix("warning: ") for line in capsys.readouterr().err.splitlines()]
    return [line for line in lines if line.startswith(about) and "file system" not in line]


def shard(override: str, step: int) -> Path:
    return Path(override.removeprefix("run_dir=")) / "checkpoints" / step_name(step) / "shard-00000.safetensors"


def test_a_run_goes_on_from_its_newest_checkpoint_under_another_layout(run, capsys):
    path, run_dir = run
    assert warnings(capsys, path, run_dir) == []
    config = load_config(path, [run_dir, "train.steps=8"])
    assert list(notes(config)) == [f"{config.run_path} holds checkpoints: the run goes on from step 4"]
    done = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4))
    assert list(notes(done)) == [f"{config.run_path} is complete: step 4 of train.steps=4"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest"])
def test_planted_damage_is_named_and_the_checkpoint_before_counts(run, capsys, damage):
    path, run_dir = run
    victim = shard(run_dir, 4)
    match damage:
        case "truncated":
            victim.write_bytes(victim.read_bytes()[:-1])
        case "missing":
            victim.unlink()
        case _:
            victim = victim.with_name("manifest.json")
            victim.write_text(victim.read_text().replace("embed.weight", "embed.weighs"))
    assert warnings(capsys, path, run_dir) == []
    damaged, goes_on = notes(load_config(path, [run_dir, "train.steps=8"]))
    assert damaged.startswith(f"warning: step-00000004 is damaged: {victim} ")
    assert damaged.endswith("; it will be set aside")
    assert goes_on.endswith("holds checkpoints: the run goes on from step 2")


def test_planted_damage_of_all_is_refused(run, capsys):
    path, run_dir = run
    for step in (2, 4):
        shard(run_dir, step).unlink()
    (line,) = warnings(capsys, path, run_dir)
    assert line.startswith(f"{run_dir} must hold a whole checkpoint to go on from, and all 2 in ")
    assert f"step-00000004 is damaged: {shard(run_dir, 4)} is missing" in line
    assert line.endswith("; restore one, or choose another name or run_dir")
    assert look_for_checkpoint(load_config(path, [run_dir])).step is None


def test_planted_checkpoints_of_another_model_are_refused(run, tmp_path, capsys):
    """A new run over the folder of another's checkpoints: no saved config says that it is another model."""
    path, run_dir = run
    place = f"checkpoint.dir={shard(run_dir, 4).parents[1]}"
    model = ["run_dir=" + str(tmp_path / "new"), place, "model.d_ff=64"]
    copy = shard(run_dir, 4).with_name("config.yaml")
    (line,) = warnings(capsys, path, *model, about="model.")
    assert line.startswith(f"model.d_ff=64 must stay 48, as {copy} has it; ")
    (line,) = warnings(capsys, path, *model[:2], about="checkpoint.dir=")
    assert line.startswith(f"{place} must be this run's alone, and is kept by the run in {run_dir.partition('=')[2]}; ")
    assert warnings(capsys, path, *model[:2], about="model.") == []
    (line,) = warnings(capsys, path, *model[:2], "model.moe.balance={name: none}", about="model.")
    assert (
        line.startswith("model.moe.balance=") and f" must stay {{name: bias, rate: 0.01}}, as {copy} has it; " in line
    )


def test_planted_checkpoint_whose_tensors_are_another_models_is_refused(run, capsys):
    """Its config says that it is this model, and its manifest that it is not."""
    path, run_dir = run
    for step in (2, 4):
        reseal(shard(run_dir, step).parent, lambda body: rename(body, "final_norm.weight", "last_norm.weight"))
    (line,) = warnings(capsys, path, run_dir)
    assert line.startswith(f"{run_dir} must hold checkpoints of this config's model, and step-00000004 in ")
    assert " has no final_norm.weight where the model has 32 (and " in line


def rename(body: dict[str, Any], old: str, new: str) -> None:
    """Gives a tensor another name, wherever the manifest names it."""
    body["tensors"][new] = body["tensors"].pop(old)
    for names in body["kinds"].values():
        names[:] = [new if name == old else name for name in names]
    for part in body["pieces"] + body["cuts"]:
        part["name"] = new if part["name"] == old else part["name"]


def test_planted_place_that_cannot_be_listed_is_refused(run, capsys):
    path, run_dir = run
    assert main(["submit", str(path), run_dir, "checkpoint.dir=nowhere://x", "slurm.gpus_per_node=1", "--dry-run"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(
        line.startswith("warning: checkpoint.dir=nowhere://x must be a place that fsspec can list") for line in lines
    )
