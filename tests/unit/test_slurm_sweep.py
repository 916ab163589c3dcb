"""Sweeps: which runs a file makes of a config, what is refused, and the script of their job array."""

from pathlib import Path

import pytest

from launcher.cli import main
from launcher.errors import UserError
from launcher.slurm.follow import find_run
from launcher.slurm.queue import runs_of
from launcher.slurm.script import RUNS
from launcher.slurm.submit_sweep import check_room_of_all
from launcher.slurm.sweep import Sweep, load_sweep
from launcher.training.start import check_room, checkpoint_gib, room_free_gib, room_needed

CONFIG = """\
name: small
model: {n_layers: 2}
data: {sources: [{path: none.txt}]}
train: {global_batch_size: 16}
slurm: {nodes: 1, python: python3}
"""
SWEEP = """\
grid:
  optimizer.lr: [1e-3, 3e-4]
  seed: [0, 1]
runs:
  - {name: large, train.global_batch_size: 32, optimizer.name: sgd}
at_once: 2
"""
SETTINGS = """\
#SBATCH --job-name=small
#SBATCH --comment=roundtable:FOLDER/runs/small
#SBATCH --array=0-4%2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=1-00:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=runs/small/logs/job-%A_%a.log
#SBATCH --requeue
JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
SWEEP=runs/small
RUN_DIR=$SWEEP/$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$SWEEP/slurm/runs.txt")
PYTHON=python3
REQUEUE=yes
RESTARTS=3
PREFLIGHT=yes
SPARES=0
SRUN_OPTIONS=()
set -- "$RUN_DIR/slurm/config.yaml"
"""
RUNS_SHOWN = """\
# task 0: runs/small/lr=0.001,seed=0  optimizer.lr=0.001 seed=0
# task 1: runs/small/lr=0.001,seed=1  optimizer.lr=0.001 seed=1
# task 2: runs/small/lr=0.0003,seed=0  optimizer.lr=0.0003 seed=0
# task 3: runs/small/lr=0.0003,seed=1  optimizer.lr=0.0003 seed=1
# task 4: runs/small/large  train.global_batch_size=32 optimizer.name='sgd'
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a config, nothing prepared, on a machine without Slurm."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def load(text: str, *overrides: str) -> Sweep:
    Path("sweep.yaml").write_text(text)
    return load_sweep(Path("sweep.yaml"), Path("config.yaml"), overrides, {})


def test_each_run_is_the_config_with_its_own_values(folder):
    sweep = load(SWEEP, "train.steps=7")
    assert list(sweep.runs) == [line.split("/")[2].split()[0] for line in RUNS_SHOWN.splitlines()]
    assert [(run.optimizer.lr, run.seed) for run in sweep.runs.values()] == [
        (0.001, 0),
        (0.001, 1),
        (0.0003, 0),
        (0.0003, 1),
        (0.1, 0),
    ]
    large = sweep.runs["large"]
    assert (large.name, large.run_dir) == ("small-large", "runs/small/large")
    assert (large.train.global_batch_size, large.optimizer.name, large.train.steps) == (32, "sgd", 7)
    assert sweep.at_once == 2


def test_a_name_tells_keys_of_one_last_word_apart(folder):
    (name,) = load("grid: {parallel.pipeline.name: [1f1b], schedule.name: [cosine], parallel.tp: [1]}").runs
    assert name == "parallel.pipeline.name=1f1b,schedule.name=cosine,tp=1"


def test_a_run_directory_of_the_configs_own_holds_the_runs(folder):
    (run,) = load("grid: {seed: [3]}", "run_dir=elsewhere").runs.values()
    assert (run.name, run.run_dir) == ("small-seed=3", "elsewhere/seed=3")


WRONG = {
    "no runs": ("at_once: 1", "sweep.yaml: grid, runs must name at least one run between them; try "),
    "unknown section": ("base: x\ngrid: {seed: [1]}", "sweep.yaml: base must be one of grid, runs, at_once; "),
    "no list": ("grid: {seed: 1}", "sweep.yaml: grid.seed=1 must be a list of values; try [1]"),
    "empty list": ("grid: {seed: []}", "sweep.yaml: grid.seed=[] must be a list of values; try "),
    "no limit": (
        "grid: {seed: [1]}\nat_once: 0",
        "sweep.yaml: at_once=0 must be a number of runs, at least 1 and at most 1000; try ",
    ),
    "an absurd limit": (
        "grid: {seed: [1]}\nat_once: 1000000000000",
        "sweep.yaml: at_once=1000000000000 must be a number of ",
    ),
    "a run for every grain of sand": (
        "grid: {" + ", ".join(f"a.b{n}: [1, 2, 3, 4, 5, 6, 7, 8, 9]" for n in range(20)) + "}",
        "sweep.yaml: grid, runs make 12157665459056928801 runs, and must make at most 1000; leave out keys or values",
    ),
    "a run that is none": ("runs: [1]", "sweep.yaml: runs=[1] must be a list of runs, each with its keys; try "),
    "Slurm's": ("grid: {slurm.nodes: [1, 2]}", "sweep.yaml: grid.slurm.nodes must be the same for all runs, which "),
    "a directory": ("runs: [{run_dir: x}]", "sweep.yaml: runs[0].run_dir must not be set: a run's directory lies in "),
    "names in a grid": ("grid: {name: [a, b]}", "sweep.yaml: grid.name must not be set, since each of its runs is "),
    "a name that is no folder's": ("runs: [{name: a/b}]", "sweep.yaml: the run {} would be named 'a/b', which is no "),
    "values that name no folder": ("grid: {data.sources: [[{path: a}]]}", 'sweep.yaml: the run {"data.sources": '),
    "no name at all": ("runs: [{}]", "sweep.yaml: the run {} would be named '', which is no folder's name of letters"),
    "a folder of the sweep's": ("runs: [{name: logs}]", "sweep.yaml: name=logs must not be logs or slurm, folders "),
    "one name twice": ("grid: {seed: [1, 1]}", "sweep.yaml: name=seed=1 must be one run's only; give one of the two "),
    "unknown key": ("grid: {optimizer.rl: [1]}", "rl=1: optimizer.rl=1 is not a known key; optimizer has name, lr, "),
    "one bad value": ("grid: {train.steps: [5, 0]}", "steps=0: train.steps=0 must be at least 1"),
    "all bad": ("grid: {seed: [1, 2], train.steps: [0]}", "every run: train.steps=0 must be at least 1"),
    "batch for the job": (
        "grid: {train.global_batch_size: [16, 9]}",
        "global_batch_size=9: train.global_batch_size=9 ",
    ),
    "shared checkpoints": (
        "grid: {seed: [1, 2], checkpoint.dir: [same]}",
        "seed=2,dir=same: checkpoint.dir=same must be this run's alone, and is seed=1,dir=same's too; ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_that_names_the_run(folder, name):
    text, line = WRONG[name]
    with pytest.raises(UserError) as error:
        load(text)
    (said,) = error.value.problems
    assert said.startswith(line)


def test_a_chain_of_sweeps_is_refused(folder):
    with pytest.raises(UserError, match=r"slurm.chain=2 must be 1 with --sweep: "):
        load("grid: {seed: [1]}", "slurm.chain=2")


def test_dry_run_prints_this_script_and_the_runs(folder, capsys):
    (folder / "sweep.yaml").write_text(SWEEP)
    assert main(["submit", "config.yaml", "--sweep", "sweep.yaml", "--dry-run"]) == 0
    told = capsys.readouterr()
    settings = told.out.partition("# --- settings\n")[2].partition("# --- end of settings\n")[0]
    assert settings == SETTINGS.replace("FOLDER", str(folder))
    assert told.out.endswith("done\n" + RUNS_SHOWN)
    sources, slurm = told.err.splitlines()
    assert sources.startswith("warning: every run: data.sources[0].path='none.txt' does not exist")
    assert slurm.startswith("warning: sbatch must be on the PATH")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "sweep.yaml"]


def test_runs_and_sweeps_do_not_share_a_directory(folder, capsys):
    (folder / "sweep.yaml").write_text(SWEEP)
    run = folder / "runs/small"
    (run / "slurm").mkdir(parents=True)
    (run / "slurm/config.yaml").touch()
    assert main(["submit", "config.yaml", "--sweep", "sweep.yaml"]) == 2
    assert "run_dir=runs/small must not be a run's, since the sweep's runs lie in it; " in capsys.readouterr().err
    (run / "slurm/config.yaml").unlink()
    (run / RUNS).write_text("a\nb\n")
    assert main(["submit", "config.yaml"]) == 2
    assert "run_dir=runs/small must not be a sweep's, and holds one; choose another " in capsys.readouterr().err
    assert runs_of(find_run("small")) == [Path("runs/small/a"), Path("runs/small/b")]
    assert main(["logs", "small"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "RUN=small is a sweep of 2 runs; name one of them, e.g. runs/small/a"


def test_damaged_checkpoints_that_were_set_aside_leave_the_need_for_room_as_it_is(folder):
    config = load("grid: {seed: [1, 2]}", "train.steps=100", "checkpoint.every_steps=1").base
    n_wanted, needed_gib = room_needed(config)
    for step in range(n_wanted):
        (folder / config.checkpoint_location / f"step-{step:08d}.damaged").mkdir(parents=True)
    assert room_needed(config) == (n_wanted, needed_gib)
    (folder / config.checkpoint_location / "step-00000009").mkdir()
    assert room_needed(config)[1] == pytest.approx(needed_gib * (n_wanted - 1) / n_wanted)


def test_planted_sweep_that_only_together_is_too_large_for_the_disk(folder):
    """Each run's checkpoints take 0.6 of what is free."""
    sweep = load("grid: {seed: [1, 2]}", "train.steps=1000000000", "checkpoint.every_steps=1")
    one = checkpoint_gib(sweep.base)
    keep = f"checkpoint.keep_last={int(0.6 * room_free_gib(folder) / one)}"
    sweep = load("grid: {seed: [1, 2]}", "train.steps=1000000000", "checkpoint.every_steps=1", keep)
    for run in sweep.runs.values():
        check_room(run)
    (line,) = check_room_of_all(sweep)
    assert line.startswith("run_dir=runs/small must have room for the checkpoints of 2 runs, ")
    assert check_room_of_all(load("grid: {seed: [1, 2]}")) == []
