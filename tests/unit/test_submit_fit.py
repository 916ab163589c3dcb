"""What `roundtable submit` says of a job whose GPUs are too small; the Slurm here only notes what it is given."""

import dataclasses
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from fake_programs import write_programs
from launcher.cli import main
from launcher.closed_form.budget import modes_of
from launcher.closed_form.memory import memory_of
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import TrainConfig
from launcher.plan import quick
from launcher.plan.quick import job_on, quick_plan, room_on
from launcher.plan.search import RECOMPUTE, overrides_of
from launcher.slurm.config import SlurmConfig
from launcher.slurm.fit import changes, check_fit, hardware_of, remedy, variants
from launcher.slurm.queue import gpu_types
from launcher.trace.hardware import hardware_called, read_hardware
from layout_runs import run_config, write_tokens
from modeling.config import ModelConfig

FAKES = {
    "sinfo": 'case "$*" in *%D*) echo "main*|64|gpu:a100:8|infinite";; *) echo "main*|$(cat types)";; esac',
    "squeue": ":",
    "sbatch": 'if [ "$1" = --test-only ]; then cat > /dev/null; else echo "$@" > submitted.txt; echo 7; fi',
}
PIPED = ("parallel.pp=4", "train.global_batch_size=16")
MODEL = ModelConfig(vocab_size=16384, d_model=512, n_layers=12, n_heads=8, n_kv_heads=8, d_ff=2048)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A config of 67 million parameters in a folder of its own, and a file of a GPU of 4.6 GiB."""
    write_programs(tmp_path / "bin", FAKES)
    (tmp_path / "types").write_text("(null)")
    h100 = (Path("configs/hardware") / "H100.yaml").read_text()
    (tmp_path / "small.yaml").write_text(h100.replace("memory_gb: 80", "memory_gb: 4.6"))
    slurm = SlurmConfig(gpus_per_node=4, notice_seconds=60)
    tokens = write_tokens(tmp_path, n_documents=200, longest=2000)
    batch = {"precision": "bf16", "global_batch_size": 32, "micro_batch_size": 8}
    config = run_config(tokens, model=MODEL, steps=2, **batch)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=1024))
    (tmp_path / "config.yaml").write_text(dump_config(dataclasses.replace(config, name="small", slurm=slurm)))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("SBATCH_EXPORT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(capsys, *arguments: str) -> tuple[int, str]:
    given = ["submit", "config.yaml", "metrics.wandb.mode=disabled", "slurm.gpu=small.yaml", *arguments]
    code = main(given)
    return code, capsys.readouterr().err


def test_what_will_not_fit_is_refused_in_a_line_whose_remedy_works(folder, capsys):
    before = sorted(folder.rglob("*"))
    code, said = submit(capsys)
    assert code == 2 and said.count("\n") == 1
    assert said.startswith("slurm.gpu=small must hold what a rank needs, ")
    assert "; the largest part is activations, " in said
    assert sorted(folder.rglob("*")) == before
    remedy = said.partition("the nearest that fits: ")[2].partition(", or --skip-plan")[0].split()
    assert remedy
    code, said = submit(capsys, *remedy)
    assert (code, said) == (0, "") and (folder / "submitted.txt").exists()


def test_the_check_can_be_left_out_and_a_dry_run_warns(folder, capsys):
    code, said = submit(capsys, "--dry-run")
    assert code == 0 and "warning: slurm.gpu=small must hold" in said
    code, _ = submit(capsys, "--skip-plan")
    assert code == 0 and (folder / "submitted.txt").exists()


def test_an_unknown_gpu_is_refused(folder, capsys):
    assert main(["submit", "config.yaml", "metrics.wandb.mode=disabled", "slurm.gpu=H9"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("slurm.gpu=H9 must be one of A100-40GB, ") and said.count("\n") == 1


def test_each_run_of_a_sweep_is_looked_at(folder, capsys):
    (folder / "sweep.yaml").write_text("runs:\n  - {name: a, train.micro_batch_size: 1}\n  - {name: b}\n")
    code, said = submit(capsys, "--sweep", "sweep.yaml")
    assert code == 2 and "b: slurm.gpu=small must hold" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("types", "expected"),
    [("gpu:h100:8(S:0-1)", "H100"), ("gpu:8", None), ("gpu:a100:4,gpu:h100:4", None), ("gpu:k80:2", None)],
)
def test_slurms_own_name_of_the_gpus_counts_where_there_is_no_other(folder, types, expected):
    (folder / "types").write_text(types)
    found = hardware_of(load_config(Path("config.yaml"), []))
    assert (found.name if found is not None else None) == expected


def test_nothing_is_asked_of_nodes_without_gpus(folder):
    assert check_fit(load_config(Path("config.yaml"), ["slurm.gpus_per_node=0", "slurm.gpu=small.yaml"])) == []


def test_names_of_gpus_are_those_of_tables(folder):
    assert hardware_called("a100_80GB").name == "A100-80GB" and hardware_called("GB300-nvl72").name == "GB300"  # type: ignore[union-attr]
    (folder / "types").write_text("gpu:gb200:4,gpu:gb200:2")
    assert gpu_types(None) == gpu_types("main") == ["gb200"] and gpu_types("other") == []


def test_changes_are_what_differs():
    config = load_config(Path("configs/quickstart.yaml"), [])
    other = load_config(Path("configs/quickstart.yaml"), ["parallel.zero=3", "train.recompute=full"])
    assert changes(config, other) == ["parallel.zero=3", "train.recompute=full"]


def test_planted_a_plan_without_activations_lets_a_job_pass_that_is_too_large(folder, monkeypatch):
    config = load_config(Path("config.yaml"), ["slurm.gpu=small.yaml"])
    assert len(check_fit(config)) == 1
    monkeypatch.setattr(quick, "own_activations", lambda *job: 0.0)
    assert check_fit(config) == []


CUT = ("parallel.tp=4", "parallel.zero=2", "data.seq_len=8192")
SPREAD = ("parallel.ep=8", "data.seq_len=4096")


@pytest.mark.parametrize(
    ("model", "overrides", "ranks", "traced"),
    [  # GB of `roundtable plan`'s traced peak on H100, 2026-11-23, ZeRO 2 a day later; the quick plan is within a tenth
        ("llama-3-8b", [*CUT, "train.recompute=none"], 16, 27.20),
        ("llama-3-8b", [*CUT, "train.recompute=selective"], 16, 25.05),
        ("llama-3-8b", [*CUT, "train.recompute=feed_forward"], 16, 19.81),
        ("llama-3-8b", [*CUT, "train.recompute=full"], 16, 16.65),
        ("llama-3-8b", [*CUT, "model.n_layers=8", "train.recompute=none"], 16, 10.08),
        ("llama-3-8b", ["data.seq_len=4096", "train.global_batch_size=16"], 8, 83.85),
        ("llama-3-8b", [*PIPED, "parallel.tp=2", "data.seq_len=4096", "train.recompute=full"], 16, 14.87),
        ("qwen3-30b-a3b", [*SPREAD, "train.global_batch_size=16"], 16, 86.88),
        ("qwen3-30b-a3b", [*SPREAD, "model.n_layers=6", "train.recompute=selective"], 8, 20.75),
        ("qwen3-30b-a3b", [*SPREAD, "model.n_layers=6", "train.recompute=feed_forward"], 8, 17.83),
        ("qwen3-30b-a3b", ["data.seq_len=4096", "model.n_layers=6"], 8, 38.79),
        ("qwen3-30b-a3b", [*SPREAD, "model.n_layers=6", "parallel.tp=2", "parallel.ep=4"], 8, 18.94),
    ],
)
def test_the_quick_plan_holds_what_the_traced_one_does(model, overrides, ranks, traced):
    config = load_config(Path(f"configs/models/{model}.yaml"), ["train.global_batch_size=64", *overrides])
    hardware = read_hardware("H100")
    plan = quick_plan(config, ranks, hardware, room_on(hardware))
    assert plan["tensor_bytes"] / 1e9 == pytest.approx(traced, rel=0.1)
    assert sum(plan["bytes_by_part"].values()) == pytest.approx(plan["tensor_bytes"])
    # What ranks layouts by the thousand counts the state without padding, and nothing else otherwise.
    job, _ = job_on(config, ranks, hardware)
    assert memory_of(job).tensors == pytest.approx(plan["tensor_bytes"], rel=1e-2)


SIX_OF_EXPERTS = ("qwen3-30b-a3b", [*SPREAD, "model.n_layers=6"], 8)
TWO_CHUNKS = (
    "parallel.pp=2",
    "parallel.tp=2",
    "parallel.pipeline.name=interleaved",
    "data.seq_len=4096",
    "train.global_batch_size=16",
)


@pytest.mark.parametrize(
    ("job", "gib", "traced"),
    [  # GB of `roundtable plan`'s traced peak on H100, 2026-11-24, under a budget: layers of up to three modes
        (("llama-3-8b", CUT, 16), 4.2, 19.55),
        (("llama-3-8b", CUT, 16), 7.4, 22.59),
        (("llama-3-8b", [*PIPED, "parallel.tp=2", "data.seq_len=4096"], 16), 3.6, 17.64),
        (("llama-3-8b", [*PIPED, "parallel.tp=2", "data.seq_len=4096"], 16), 6.2, 20.46),
        (("llama-3-8b", TWO_CHUNKS, 8), 4.6, 31.21),
        (SIX_OF_EXPERTS, 1.7, 18.29),
        (SIX_OF_EXPERTS, 2.6, 19.72),
    ],
)
def test_the_quick_plan_counts_each_layer_by_its_own_mode(job, gib, traced):
    model, overrides, ranks = job
    given = ["train.global_batch_size=64", *overrides, f"train.activation_gib={gib}"]
    config, hardware = load_config(Path(f"configs/models/{model}.yaml"), given), read_hardware("H100")
    assert not check(config, ranks) and len(set(modes_of(config, ranks))) > 1
    plan = quick_plan(config, ranks, hardware, room_on(hardware))
    assert plan["tensor_bytes"] / 1e9 == pytest.approx(traced, rel=0.05)
    assert plan["bytes_by_part"]["activations"] <= gib * 2**30


@pytest.mark.parametrize("given", ["grad_reduce=micro_batch", "offload_optimizer=true"])
def test_a_remedy_takes_back_what_its_stage_of_zero_cannot_do(folder, given):
    overrides = ["parallel.zero=2"] if given == "offload_optimizer=true" else []
    config = load_config(Path("config.yaml"), [*overrides, f"parallel.{given}"])
    of_stage_3 = [each for each in variants(config) if each.parallel.zero == 3]
    assert of_stage_3
    for each in of_stage_3:
        assert f"parallel.{given.partition('=')[0]}=" in " ".join(changes(config, each))
        assert load_config(Path("config.yaml"), [*overrides, f"parallel.{given}", *changes(config, each)]) == each


def test_gradients_reduced_by_micro_batch_are_a_remedy_and_so_are_states_on_the_host(folder):
    config = load_config(Path("config.yaml"), [])
    told = {word for each in variants(config) for word in changes(config, each)}
    assert {"parallel.grad_reduce=micro_batch", "parallel.offload_optimizer=true"} <= told


def test_a_budget_that_is_too_large_is_lowered(folder):
    config = load_config(Path("config.yaml"), ["slurm.gpu=small.yaml", "train.activation_gib=30"])
    (line,) = check_fit(config)
    found = line.partition("the nearest that fits: ")[2].partition(", or --skip-plan")[0].split()
    assert len(found) == 1  # the quickest of one change
    assert any("train.activation_gib=7.5" in overrides_of(each, config) for each in variants(config))
    assert check_fit(load_config(Path("config.yaml"), ["slurm.gpu=small.yaml", *found])) == []


@pytest.mark.parametrize("recompute", get_args(get_type_hints(TrainConfig)["recompute"]))
def test_a_remedy_is_found_from_each_way_to_recompute(folder, recompute):
    """One of them was not in the list of lighter ones, so its user saw a traceback."""
    config = load_config(Path("config.yaml"), ["slurm.gpu=small.yaml", f"train.recompute={recompute}"])
    remedies = [line.partition("the nearest that fits: ")[2] for line in check_fit(config)]
    assert all(remedies) and (remedies or recompute != "none")
    assert RECOMPUTE.index(recompute) >= 0
    assert remedy(config, config.slurm.world_size, read_hardware("small.yaml")).startswith("the nearest that fits")
