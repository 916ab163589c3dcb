"""`train --dry-run`: every check, the sizes that follow from the config, and nothing created or changed."""

import json
from pathlib import Path

import numpy as np
import pytest

import saved_runs
from data.prepare import prepare
from data.tokenwriter import TokenFileWriter
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.training import newest
from launcher.training.start import checkpoint_gib, start_checks
from modeling.counts import count_parameters, flops_per_token
from parallel.checkpoint import retention
from saved_runs import save_run
from small_models import build

CONFIG = """
name: small
model: {vocab_size: 300, d_model: 32, n_layers: 4, n_heads: 4, n_kv_heads: 2, family: glm4_moe, d_ff: 64,
        moe: {n_experts: 4, top_k: 2, d_ff: 32, n_shared_experts: 1, n_dense_layers: 1, score: sigmoid}}
data: {seq_len: 16, sources: [{path: a, weight: 3}, {path: b}]}
train: {steps: 50, global_batch_size: 8, precision: fp32}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a config and the token files of its two sources: 1601 and 3201 tokens."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "c.yaml").write_text(CONFIG)
    for name, n_tokens in (("a", 1601), ("b", 3201)):
        writer = TokenFileWriter(tmp_path / name, np.dtype(np.uint16))
        writer.add(np.arange(n_tokens) % 300)
        writer.finish()
    return tmp_path


def tree(folder: Path) -> dict[str, tuple]:
    """Every path with its kind, content, and times of change."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        stats = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = (stats.st_mode, stats.st_ino, stats.st_mtime_ns, stats.st_ctime_ns, content)
    return found


def dry_run(capsys, *arguments: str, code: int = 0) -> dict:
    assert main(["train", "c.yaml", "--dry-run", "--json", *arguments]) == code
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    told = dict.fromkeys(line for check in found["checks"] for line in check["problems"])
    assert captured.err.splitlines() == list(told)
    assert found["can_start"] == (code == 0)
    return found


def test_init_from_is_looked_at_as_a_start_does(place, capsys):
    config = load_config("c.yaml")
    save_run(place / "source", config, build(config.model, 1), 1)
    assert dry_run(capsys, "init_from=source")["checks"][-1] == {"name": "init_from", "problems": []}
    told = dry_run(capsys, "init_from=source", "model.rope_theta=500.0", code=2)["checks"][-1]["problems"]
    assert told[0].startswith("model.rope_theta=500.0 must be 10000.0, as in init_from=source; ")
    assert "holds no checkpoint" in dry_run(capsys, "init_from=.", code=2)["checks"][-1]["problems"][0]


def test_the_sizes_are_those_of_the_functions_that_know(place, capsys):
    found = dry_run(capsys, "--ranks", "4", "parallel.ep=2")
    config = load_config("c.yaml", ["parallel.ep=2"])
    counts = count_parameters(config.model)
    assert found["model"] == {
        "parameters": counts.total,
        "active_parameters": counts.active,
        "flops_per_token": flops_per_token(config.model, 16),
    }
    assert found["disk"]["checkpoint_bytes"] == round(checkpoint_gib(config) * 2**30) == 3 * 4 * counts.total
    assert found["disk"]["most_at_once"] == 2
    layout = {"ranks": 4, "pp": 1, "dp": 4, "cp": 1, "tp": 1, "ep": 2, "edp": 2, "zero": 1, "micro_batches_per_rank": 2}
    assert found["layout"] == layout | {"recompute": "none in 0-3"}
    assert found["data"]["tokens"] == 50 * 8 * 16
    first, second = found["data"]["sources"]
    assert first == {"path": "a", "share": 0.75, "samples": 100, "steps_to_an_epoch": 100 / 6, "epochs": 3.0}
    assert second == {"path": "b", "share": 0.25, "samples": 200, "steps_to_an_epoch": 100.0, "epochs": 0.5}
    assert found["resume"] == {"step": 0, "steps": 50, "damaged": []}
    assert {check["name"] for check in found["checks"]} >= {*start_checks(), "token files", "config and sources"}


def test_a_batch_that_grows_is_counted(place, capsys):
    """4 updates of 2 sequences, 2 of 4 and one of 6 make 22 of the 50 updates' 366; source a has three quarters."""
    ramp = ("train.batch_ramp.start=2", "train.batch_ramp.increment=2", "train.batch_ramp.samples=22")
    found = dry_run(capsys, "--ranks", "2", *ramp)["data"]
    assert found["tokens"] == 366 * 16 and found["tokens_per_step"] == 8 * 16
    assert found["ramp"] == {"tokens_per_step": 2 * 16, "steps": 7, "tokens": 22 * 16}
    (first, _) = found["sources"]
    assert first["epochs"] == 366 * 0.75 / 100
    assert first["steps_to_an_epoch"] == pytest.approx(7 + (100 / 0.75 - 22) / 8)


def test_nothing_is_created_or_changed(place, capsys):
    run = place / "runs" / "small"
    (run / "checkpoints" / ".step-00000010.1-1.partial").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(load_config("c.yaml")))
    (run / ".lock").write_text("{}")
    before = tree(place)
    dry_run(capsys, "--ranks", "2")
    dry_run(capsys, "seed=1", code=2)
    dry_run(capsys, "train.steps=0", code=2)
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    assert tree(place) == before


def test_stages_of_a_pipeline_hold_different_amounts(place, capsys):
    found = dry_run(capsys, "--ranks", "2", "parallel.pp=2")
    first, second = found["memory"]
    assert (first["ranks"], second["ranks"]) == ([0, 0], [1, 1])
    assert "embedding" in first["holds"] and "head" in second["holds"]
    assert first["masters_bytes"] + second["masters_bytes"] >= 4 * found["model"]["parameters"]
    assert main(["train", "c.yaml", "--dry-run", "--ranks", "2", "parallel.pp=2"]) == 0
    output = capsys.readouterr().out
    assert "The run can start." in output
    assert "Not counted: activations" in output


TOO_MANY = ["checkpoint.keep_last=1000000", "train.steps=100000000"]
PROBLEMS = [
    (["train.steps=0"], "config and sources", "train.steps=0 must be at least 1; try 1000"),
    (["parallel.tp=3", "--ranks", "3"], "config and sources", "parallel.tp=3 must divide"),
    (["run_dir=c.yaml/x"], "run directory", "run_dir=c.yaml/x must be a folder that can be written to"),
    (["seed=1"], "config of the run's last start", "seed=1 must stay 0"),
    (["model.vocab_size=299"], "token files not prepared here", "model.vocab_size=299 is smaller than"),
    (["checkpoint.dir=memory://x"], "checkpoint.dir", "checkpoint.dir=memory://x must outlive the process"),
    (["checkpoint.every_steps=1", *TOO_MANY], "room for checkpoints", "must have room"),
]


@pytest.mark.parametrize(("arguments", "name", "line"), PROBLEMS, ids=[case[1].replace(" ", "_") for case in PROBLEMS])
def test_what_is_wrong_is_told_and_exit_code_2(place, capsys, arguments, name, line):
    if name.startswith("config of"):
        (place / "runs" / "small").mkdir(parents=True)
        (place / "runs/small/config.yaml").write_text(dump_config(load_config("c.yaml")))
    before = tree(place)
    found = dry_run(capsys, *arguments, code=2)
    lines = {check["name"]: check["problems"] for check in found["checks"]}
    assert any(line in told for told in lines[name])
    assert [name for name, told in lines.items() if told] == [name]
    assert ("model" in found) == (name != "config and sources")
    assert tree(place) == before


def test_a_damaged_file_that_two_checks_find_is_told_once(place, capsys):
    (place / "a.bin").write_bytes((place / "a.bin").read_bytes()[:-2])
    found = dry_run(capsys, code=2)
    first, second = (check["problems"] for check in found["checks"] if check["problems"])
    assert first == second and len(first) == 1


def test_raw_text_is_told_as_to_be_prepared(place, capsys):
    (place / "corpus.txt").write_text("some text\n" * 100)
    before = tree(place)
    found = dry_run(capsys, "data.sources=[{path: corpus.txt}]")
    assert found["data"]["to_prepare"] == [{"path": "corpus.txt", "files": 1, "text_bytes": 1000, "shards": 1}]
    assert found["data"]["sources"] is None
    assert tree(place) == before
    (place / "corpus.txt").write_text("")
    found = dry_run(capsys, "data.sources=[{path: corpus.txt}]", code=2)
    assert found["data"] is None
    (place / "corpus.txt").write_text("some text\n" * 100)
    config = load_config("c.yaml", ["data.sources=[{path: corpus.txt}]", "data.workers=1"])
    prepare(config.data, vocab_size=300)
    found = dry_run(capsys, "data.sources=[{path: corpus.txt}]", "data.workers=1")
    assert found["data"]["prepared"]


def test_a_checkpoint_to_go_on_from_is_named(place, capsys, monkeypatch):
    for step in (10, 20):
        (place / f"runs/small/checkpoints/step-{step:08d}").mkdir(parents=True)
    monkeypatch.setattr(retention, "looks_whole", lambda folder: folder.name.endswith("10"))
    monkeypatch.setattr(newest, "why_none_is_whole", lambda folders: [])
    assert dry_run(capsys)["resume"] == {"step": 10, "steps": 50, "damaged": ["step-00000020"]}
    assert main(["train", "c.yaml", "--dry-run", "train.steps=10"]) == 0
    assert "no step is left: the run is finished, at step 10 of 10" in capsys.readouterr().out


def test_a_run_that_goes_on_with_another_batch_counts_what_it_has_taken(place, capsys, monkeypatch):
    """10 steps of 4 sequences, beside 4 that a rollback left out, and 40 steps of 8."""
    monkeypatch.setattr(saved_runs, "SCALARS", {**saved_runs.SCALARS, "consumed": 44, "skipped": [(8, 12)]})
    config = load_config("c.yaml", ["train.global_batch_size=4"])
    save_run(place / "runs/small", config, build(config.model, 1), 10)
    found = dry_run(capsys)["data"]
    assert found["tokens"] == 360 * 16 and found["before"] == {"steps": 10, "tokens": 40 * 16}
    assert [row["epochs"] for row in found["sources"]] == [364 * 0.75 / 100, 364 * 0.25 / 200]
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    words = "5,760 in 50 steps, 640 of them in the first 10, with other batches; then steps of 128"
    assert words in capsys.readouterr().out
    found = dry_run(capsys, "train.global_batch_size=4")["data"]
    assert found["tokens"] == 200 * 16 and "before" not in found


JOBS = {
    "torchrun": {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "20000"},
    "srun": {"SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": "7"},
}


@pytest.mark.parametrize("launcher", JOBS)
def test_in_a_job_rank_0_speaks_and_data_must_be_there(place, capsys, monkeypatch, launcher):
    size, rank = {"torchrun": ("WORLD_SIZE", "RANK"), "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")}[launcher]
    monkeypatch.setenv(size, "2")
    monkeypatch.setenv(rank, "0")
    for name, value in JOBS[launcher].items():
        monkeypatch.setenv(name, value)
    assert dry_run(capsys)["layout"]["dp"] == 2
    assert main(["train", "c.yaml", "--dry-run", "--ranks", "3"]) == 2
    assert "--ranks=3 must equal the job's 2 processes" in capsys.readouterr().err
    (place / "corpus.txt").write_text("some text\n" * 100)
    found = dry_run(capsys, "data.sources=[{path: corpus.txt}]", code=2)
    assert "run `roundtable prepare c.yaml` first" in found["checks"][-1]["problems"][0]
    monkeypatch.setenv(rank, "1")
    assert main(["train", "c.yaml", "--dry-run"]) == 0
    assert capsys.readouterr() == ("", "")


def test_json_needs_a_dry_run(place, capsys):
    assert main(["train", "c.yaml", "--json"]) == 2
    assert capsys.readouterr().err.startswith("--json works with --dry-run only")
