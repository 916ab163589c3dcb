"""`roundtable checkpoint verify` and `show`, through the real command line (one test through a real process)."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launcher.commands.trained as trained_module
import parallel.checkpoint.manifest as manifest_module
from launcher.cli import main
from launcher.commands import checkpoint
from launcher.config.dump import dump_config
from launcher.config.tree import CheckpointConfig, MetricsConfig, WandbConfig
from launcher.training.start import start_training
from layout_runs import MOE_MODEL, run_config, write_tokens
from modeling.counts import count_parameters
from modeling.moe_config import BiasBalance
from modeling.optimizers.config import AdamWConfig
from parallel.checkpoint.manifest import hash_file, read_manifest, write_manifest
from parallel.checkpoint.places import open_store
from parallel.checkpoint.read import open_checkpoint
from parallel.checkpoint.store import step_name
from parallel.config import ParallelConfig

pytestmark = pytest.mark.xdist_group("checkpoint command")  # what its tests share takes long to make

MODEL = dataclasses.replace(MOE_MODEL, moe=dataclasses.replace(MOE_MODEL.moe, balance=BiasBalance(rate=0.01)))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run directory with checkpoints at steps 2 and 4, written by two ranks of tp and ep, in bf16."""
    folder = tmp_path_factory.mktemp("run")
    tokens = write_tokens(folder)
    config = run_config(
        tokens,
        model=MODEL,
        optimizer=AdamWConfig(lr=1e-3),
        parallel=ParallelConfig(tp=2, ep=2),
        steps=4,
        precision="bf16",
        eval_every_steps=2,
    )
    config = dataclasses.replace(
        config,
        name="run",
        data=dataclasses.replace(config.data, heldout_path=tokens),
        run_dir=str(folder / "run"),
        checkpoint=CheckpointConfig(every_steps=2),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )
    (folder / "run.yaml").write_text(dump_config(config))
    assert start_training(folder / "run.yaml", [], 2) == 0
    return folder / "run"


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@dataclasses.dataclass
class Answer:
    code: int
    output: str
    errors: str


@pytest.fixture
def ask(capsys):
    """Runs one command line; returns exit code, standard output and standard error."""

    def run(*arguments: str | Path) -> Answer:
        code = main(["checkpoint", *map(str, arguments)])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


def step(run_dir: Path, number: int) -> Path:
    return run_dir / "checkpoints" / f"step-{number:08d}"


def test_whole_ones_pass_and_nothing_changes(run_dir):
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    command = [sys.executable, "-m", "launcher", "checkpoint", "verify", str(run_dir)]
    answer = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [str(step(run_dir, 2)), str(step(run_dir, 4))]
    assert all("intact (step" in line and "3 files" in line for line in lines)
    assert answer.stderr.splitlines()[0] == "checking step-00000002 (1 of 2)"
    assert before == {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}


def test_every_planted_damage_is_listed_and_the_exit_code_is_1(ask, run_dir):
    """Three kinds in one checkpoint: each file has its line; the other checkpoint stays whole."""
    victim = step(run_dir, 4)
    first, second = victim / "shard-00000.safetensors", victim / "shard-00001.safetensors"
    content = bytearray(first.read_bytes())
    content[len(content) // 3] ^= 4
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-1])
    answer = ask("verify", run_dir, "--json")
    assert answer.code == 1
    result = json.loads(answer.output)
    assert result["whole"] is False
    good, bad = result["checkpoints"]
    assert (good["whole"], good["problems"], bad["whole"]) == (True, [], False)
    assert len(bad["problems"]) == 2
    assert str(first) in bad["problems"][0] and "does not match its hash" in bad["problems"][0]
    assert str(second) in bad["problems"][1] and "bytes, the manifest says" in bad["problems"][1]
    first.unlink()
    answer = ask("verify", victim)
    assert answer.code == 1
    assert answer.output.splitlines()[:2] == [f"{victim}: DAMAGED", f"  {first} is missing"]


@pytest.mark.parametrize("damage", ["missing", "flipped", "of another step"])
def test_planted_damage_of_a_manifest_is_listed(ask, run_dir, damage):
    manifest = step(run_dir, 4) / "manifest.json"
    match damage:
        case "missing":
            manifest.unlink()
        case "flipped":
            manifest.write_text(manifest.read_text().replace("embed.weight", "embed.weighs"))
        case _:
            shutil.copyfile(step(run_dir, 2) / "manifest.json", manifest)
    answer = ask("verify", step(run_dir, 4))
    assert answer.code == 1
    assert str(manifest) in answer.output


def test_a_shard_that_its_manifest_describes_wrongly_is_seen(ask, run_dir):
    """The manifest holds by itself, and the shard's hash is right: only a look into the shard's table shows it."""
    directory = step(run_dir, 4)
    manifest = read_manifest(directory)
    shards = [directory / file for file in manifest.files if file.startswith("shard-")]
    shutil.copyfile(shards[0], shards[1])
    for shard in shards:
        manifest.files[shard.name] = {"bytes": shard.stat().st_size, "xxh3_128": hash_file(shard)}
    write_manifest(manifest, directory)
    answer = ask("verify", directory)
    assert answer.code == 1
    assert f"{shards[1]} lacks weight of" in answer.output


def test_show_says_what_a_checkpoint_holds(ask, run_dir):
    answer = ask("show", step(run_dir, 4), "--json")
    assert answer.code == 0, answer.errors
    about = json.loads(answer.output)
    assert (about["step"], about["samples"]) == (4, 32)
    degrees = {"pp": 1, "dp": 1, "cp": 1, "tp": 2, "ep": 2}
    assert about["written_by"] == {"ranks": 2, **degrees, "zero": 1, "precision": "bf16"}
    n_parameters = count_parameters(MODEL).total
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert about["kinds"][kind]["bytes"] == 4 * n_parameters
    assert about["tensors"]["embed.weight"]["shape"] == [MODEL.vocab_size, MODEL.d_model]
    assert about["tensors"]["embed.weight"]["kinds"] == ["weight", "exp_avg", "exp_avg_sq"]
    assert about["kinds"]["buffer"]["tensors"] == 2
    assert set(about["files"]) == {"shard-00000.safetensors", "shard-00001.safetensors", "config.yaml"}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert about["eval_loss"] == [row["eval_loss"] for row in rows if "eval_loss" in row][-1]
    assert about["tokens"] == [row["tokens"] for row in rows if "tokens" in row][-1]
    table = ask("show", step(run_dir, 4)).output
    for part in (
        "step 4, 32 samples",
        "2 processes, tp 2, ep 2, ZeRO 1, bf16",
        "embed.weight",
        "96 x 32",
        "exp_avg_sq",
    ):
        assert part in table


def test_show_lists_a_runs_checkpoints(ask, run_dir):
    (step(run_dir, 2) / "shard-00001.safetensors").unlink()
    shutil.copytree(step(run_dir, 4), run_dir / "checkpoints" / "step-00000003.damaged")
    (run_dir / "checkpoints" / ".step-00000005.partial").mkdir()
    listed = json.loads(ask("show", run_dir, "--json").output)
    assert [(row["step"], row["looks_whole"]) for row in listed["checkpoints"]] == [(2, False), (4, True)]
    assert [Path(path).name for path in listed["set_aside"]] == ["step-00000003.damaged"]
    assert [Path(path).name for path in listed["partial"]] == [".step-00000005.partial"]
    table = ask("show", run_dir).output
    rows = {words[0]: words for line in table.splitlines() if (words := line.split())}
    assert rows["step-00000002"][1] == "DAMAGED"
    assert rows["step-00000004"][1] == "intact"
    assert "step-00000003.damaged" in rows and ".step-00000005.partial" in rows


@pytest.mark.parametrize("command", ["verify", "show"])
@pytest.mark.parametrize("what", ["nothing", "file", "folder", "run without checkpoints", "no DIR"])
def test_what_is_no_checkpoint_is_refused_in_one_line(ask, tmp_path, command, what):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "run without checkpoints" / "checkpoints").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    answer = ask(command, *([] if what == "no DIR" else [tmp_path / what]))
    assert (answer.code, answer.output) == (2, "")
    (line,) = answer.errors.splitlines()
    assert "DIR" in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", [("checkpoint", "show"), ("checkpoint", "verify"), ("eval",)])
def test_a_url_that_cannot_be_listed_is_one_line(capsys, command):
    assert main([*command, "nowhere://bucket"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "=nowhere://bucket must be a place that fsspec can list, and it says: " in line


def deleting(run_dir: Path, step: int, function: Callable[..., Any], brought: Path | None = None) -> Callable[..., Any]:
    """The function, before whose first call the run deletes a checkpoint, after it has saved ``brought``."""
    waiting = [step]

    def then(*arguments: Any, **options: Any) -> Any:
        while waiting:
            store = open_store(run_dir / "checkpoints")
            if brought is not None:
                brought.rename(run_dir / "checkpoints" / brought.name)
            store.remove(step_name(waiting.pop()))
        return function(*arguments, **options)

    return then


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_damaged(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "examine", deleting(run_dir, 2, checkpoint.examine))
    assert main(["checkpoint", "verify", str(run_dir), "--json"]) == 0
    told = capsys.readouterr()
    assert [Path(row["checkpoint"]).name for row in json.loads(told.out)["checkpoints"]] == ["step-00000004"]
    assert told.err.splitlines()[-1].endswith("step-00000002 was deleted while it was looked at; left out")
    monkeypatch.setattr(checkpoint, "read_manifest", deleting(run_dir, 4, checkpoint.read_manifest))
    assert main(["checkpoint", "show", str(run_dir)]) == 2
    assert "must keep a checkpoint while it is looked at" in capsys.readouterr().err


def test_what_comes_while_others_are_deleted_is_taken(run_dir, tmp_path, monkeypatch, capsys):
    newer = (run_dir / "checkpoints" / "step-00000004").rename(tmp_path / "step-00000004")
    monkeypatch.setattr(trained_module, "open_checkpoint", deleting(run_dir, 2, open_checkpoint, newer))
    assert trained_module.open_trained(run_dir).checkpoint.step == 4
    assert capsys.readouterr().err == ""


def test_a_file_that_is_deleted_before_it_is_read_is_missing(run_dir, monkeypatch):
    folder = run_dir / "checkpoints" / "step-00000004"
    manifest = read_manifest(folder)
    monkeypatch.setattr(manifest_module, "hash_in", lambda *_: (folder / "gone").read_bytes())
    assert manifest_module.check_files(manifest, folder, ["config.yaml"]) == [f"{folder}/config.yaml is missing"]


def test_the_names_are_of_one_look(run_dir, monkeypatch):
    """Of a run that keeps one checkpoint, each may be gone by a second look, and another there."""
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    assert open_store(run_dir / "checkpoints").names() == ["step-00000002", "step-00000004"]
