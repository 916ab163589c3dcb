"""Stopping and going on: the real command, the real files. Equality here is bit for bit (one layout, fp32 and bf16,
CPU)."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import launcher.training.start as start
from command_runs import BIAS_MODEL, ENVIRONMENT, command, ledger, numbers, train, updates, wait_for_step, write_config
from faults import train_with_fault
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.errors import UserError
from launcher.report.starts import starts_of
from launcher.training.run_dir import check_resume, claim
from launcher.training.start import start_training
from launcher.watch.metrics import read_metrics
from layout_runs import MOE_MODEL, run_config, run_reference, write_tokens
from modeling.mtp_config import MTPConfig
from parallel.processes.start import run_ranks


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.slow  # in `make test` ZeRO 1 in fp32 is the killed run below, and in bf16 the copied one
@pytest.mark.parametrize(
    ("zero", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "fp16")]
)
def test_resumed_run_is_bit_identical(tmp_path, tokens, zero, precision):
    whole = write_config(tmp_path, tokens, "whole", zero=zero, precision=precision)
    parts = write_config(tmp_path, tokens, "parts", zero=zero, precision=precision)
    uninterrupted = train(whole, 2)
    train(parts, 2, "train.steps=4")
    resumed = train(parts, 2)
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    assert numbers(resumed) == numbers(uninterrupted)


@pytest.fixture(scope="module")
def halfway(tmp_path_factory, tokens) -> tuple[Path, list[dict]]:
    """The config of a bf16 run that stopped after 4 of 6 steps, and the rows of one that did not."""
    folder = tmp_path_factory.mktemp("halfway")
    whole = write_config(folder, tokens, "whole", precision="bf16")
    parts = write_config(folder, tokens, "parts", precision="bf16")
    uninterrupted = train(whole, 2)
    train(parts, 2, "train.steps=4")
    return parts, uninterrupted


def resume_with(fault: str | None, halfway: Path, folder: Path) -> list[dict]:
    """Goes on with a copy of the run that stopped halfway, its code broken in the named way; returns its rows."""
    shutil.copytree(halfway.with_suffix(""), folder / "copy")
    config = dataclasses.replace(load_config(halfway), run_dir=str(folder / "copy"))
    changed = check_resume(config)
    with claim(config):
        run_ranks(train_with_fault, 2, fault, config, changed, timeout_seconds=240, threads=1)
    return updates(folder / "copy.yaml")


@pytest.mark.slow
def test_copied_run_resumes_bit_identical(tmp_path, halfway):
    config, uninterrupted = halfway
    assert numbers(resume_with(None, config, tmp_path)) == numbers(uninterrupted)


@pytest.mark.parametrize(
    "fault",
    [
        "second moment forgotten at load",
        pytest.param("optimizer step count not restored", marks=pytest.mark.slow),
        pytest.param("stale low-precision weights after load", marks=pytest.mark.slow),
        "data position not restored",
    ],
)
def test_planted_fault_in_resuming_is_seen(tmp_path, halfway, fault):
    config, uninterrupted = halfway
    resumed = resume_with(fault, config, tmp_path)
    assert numbers(resumed)[:4] == numbers(uninterrupted)[:4]
    assert len(resumed) == 6
    assert numbers(resumed)[4:] != numbers(uninterrupted)[4:]


DROPPING = dataclasses.replace(  # masks follow from the step, and further tokens are predicted
    BIAS_MODEL,
    family="none",
    embedding_dropout=0.1,
    residual_dropout=0.2,
    attention_dropout=0.1,
    mtp=MTPConfig(),
)


def test_killed_run_resumes_bit_identical(tmp_path, tokens):
    whole = write_config(tmp_path, tokens, "whole", model=DROPPING)
    killed = write_config(tmp_path, tokens, "killed", model=DROPPING)
    uninterrupted = train(whole, 2)
    process = subprocess.Popen(command(killed, 2), env=ENVIRONMENT, stderr=subprocess.PIPE, start_new_session=True)
    wait_for_step(killed, 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.read()  # ends when the last rank has ended
    process.stderr.close()
    assert numbers(train(killed, 2)) == numbers(uninterrupted)
    assert ledger(killed) == ledger(whole)
    assert [(row["first_sample"], row["last_sample"]) for row in ledger(killed)] == [
        (8 * step, 8 * step + 7) for step in range(6)
    ]


@pytest.mark.slow
def test_masks_that_begin_anew_after_a_kill_are_seen(tmp_path, tokens):
    """Planted: dropout's masks follow from the updates since the process's start instead of since step 0."""
    config = write_config(tmp_path, tokens, "parts", model=DROPPING)
    whole = write_config(tmp_path, tokens, "whole", model=DROPPING)
    uninterrupted = train(whole, 2)
    train(config, 2, "train.steps=4")
    assert numbers(resume_with(None, config, tmp_path / "sound")) == numbers(uninterrupted)
    resumed = resume_with("dropout's masks counted from the start of the process", config, tmp_path)
    assert numbers(resumed)[:4] == numbers(uninterrupted)[:4]
    assert numbers(resumed)[4:] != numbers(uninterrupted)[4:]


@pytest.fixture
def saved(tmp_path, halfway) -> Path:
    """The config of a copy of the run that stopped halfway, which a test may damage."""
    config = load_config(halfway[0])
    shutil.copytree(config.run_path, tmp_path / "copy")
    path = tmp_path / "copy.yaml"
    path.write_text(dump_config(dataclasses.replace(config, run_dir=str(tmp_path / "copy"))))
    return path


def flip_bytes(run: Path) -> str:
    """Damages each checkpoint in a way that only loading sees."""
    for shard in run.glob("checkpoints/step-*/shard-00000.safetensors"):
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    return ""


LOSSES: dict[str, Callable[[Path], str]] = {  # what is done to the run; the override of the start that follows
    "another checkpoint.dir": lambda run: f"checkpoint.dir={run.with_name('elsewhere')}",
    "moved away": lambda run: (run / "checkpoints").rename(run.with_name("kept")) and "",
    "each shard damaged": flip_bytes,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_whose_checkpoints_are_lost_does_not_begin_again(saved, loss):
    run = saved.with_suffix("")
    overrides = filter(None, [LOSSES[loss](run)])
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "ledger.jsonl")}
    names = sorted(path.name for path in run.glob("checkpoints/*"))
    done = subprocess.run(command(saved, 2, *overrides), env=ENVIRONMENT, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.partition(",")[0]) == (2, f"run_dir={run} must hold a whole checkpoint to go on from")
    assert (
        "step-00000004 is damaged: " if loss == "each shard damaged" else "since it has saved step-00000004"
    ) in line
    assert line.endswith(", or choose another name or run_dir")
    assert {name: (run / name).read_bytes() for name in before} == before
    assert sorted(path.name for path in run.glob("checkpoints/*")) == names


@pytest.mark.slow  # the kill drill does the same with a real kill
def test_a_run_that_never_saved_begins_again(saved, halfway):
    run = saved.with_suffix("")
    shutil.rmtree(run / "checkpoints")
    (run / ".newest_checkpoint").unlink()
    assert numbers(train(saved, 2)) == numbers(halfway[1])


def test_a_new_run_does_not_take_another_s_checkpoints(saved, tmp_path):
    """Unless it is told that they are its own, by the config of the run directory that was lost."""
    place = tmp_path / "copy/checkpoints"
    overrides = [f"run_dir={tmp_path}/new", f"checkpoint.dir={place}", "train.steps=5"]
    with pytest.raises(UserError) as refused:
        start_training(saved, overrides, 1)
    assert str(refused.value).startswith(f"checkpoint.dir={place} must be this run's alone, and is kept by the run in ")
    (saved.with_suffix("") / "config.yaml").unlink()  # the run directory was lost
    (saved.with_suffix("") / ".run_id").unlink()
    with pytest.raises(UserError) as refused:
        start_training(saved, overrides, 1)
    assert str(refused.value).startswith(
        f"checkpoint.dir={place} must be this run's alone, and holds step-00000004 of "
    )
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    shutil.copy(place / "step-00000004/config.yaml", tmp_path / "new")
    assert start_training(saved, overrides, 1) == 0
    assert (tmp_path / "new/.newest_checkpoint").read_text() == f"step-00000005\n{place}\n"


CHAINS = {
    "zero and ranks": [
        (2, ["parallel.zero=1"]),
        (1, ["parallel.zero=3", "train.micro_batch_size=4"]),
        (2, ["parallel.zero=2"]),
    ],
    "tp and ep": [
        (4, ["parallel.zero=1", "parallel.tp=2", "parallel.ep=2"]),
        (2, ["parallel.zero=3", "parallel.ep=2"]),
        (2, ["parallel.zero=2", "parallel.tp=2", "train.activation_gib=1.36e-4"]),
    ],
    "to one and back": [
        (4, ["parallel.zero=3", "parallel.tp=2", "parallel.ep=4"]),
        (1, ["parallel.zero=0"]),
        (4, ["parallel.zero=0", "parallel.tp=2", "parallel.ep=2"]),
    ],
}


@pytest.mark.parametrize(
    "chain", [pytest.param(chain, marks=[] if chain == "tp and ep" else pytest.mark.slow) for chain in CHAINS]
)
def test_other_layout_goes_on_as_one_process_would(tmp_path, tokens, chain):
    """Two steps under each of three layouts, SGD with momentum: losses and norms within 1e-6 of one plain process."""
    config = write_config(tmp_path, tokens, "moving", model=MOE_MODEL, optimizer=None)
    for number, (ranks, overrides) in enumerate(CHAINS[chain], 1):
        rows = train(config, ranks, f"train.steps={2 * number}", *overrides)
    reference = run_reference(run_config(tokens, steps=6))
    for row, expected in zip(rows, reference.rows, strict=True):
        assert abs(row["loss"] - expected["loss"]) <= 1e-6 * expected["loss"]
        assert abs(row["grad_norm"] - expected["grad_norm"]) <= 1e-6 * expected["grad_norm"]
    events = [
        row for row in read_metrics(config.with_suffix("") / "metrics.jsonl") if row.get("event") == "config_change"
    ]
    assert {"parallel.zero", "train.steps"} <= {row["key"] for row in events}


def test_finished_run_stays_as_it_is(tmp_path, tokens):
    config = write_config(tmp_path, tokens, "done", steps=2)
    first = train(config, 1)
    assert numbers(train(config, 1)) == numbers(first)


def fails_once(marker: Path, *arguments: Any) -> int:
    """A rank of a start that ends before it has told of itself, as where a layout wants more memory than there is."""
    if not marker.exists():
        marker.touch()
        raise RuntimeError("no memory")
    return start.train_rank(*arguments)


def test_what_a_start_changes_is_told_by_the_first_start_that_trains(tmp_path, tokens, monkeypatch):
    """Of three that change the learning rate one finds the run finished, one fails at once and is started again."""
    config = write_config(tmp_path, tokens, "changed", steps=2)
    train(config, 1)
    train(config, 1, "optimizer.lr=5e-4")
    assert load_config(tmp_path / "changed/config.yaml").optimizer.lr == 1e-3
    monkeypatch.setattr(start, "train_rank", partial(fails_once, tmp_path / "marker"))
    overrides = ["optimizer.lr=5e-4", "train.micro_batch_size=4", "train.steps=3"]
    assert start_training(config, overrides, 1, max_restarts=1) == 0
    rows = read_metrics(tmp_path / "changed/metrics.jsonl")
    told = {row["key"]: (row["from"], row["to"]) for row in rows if row.get("event") == "config_change"}
    expected = {"optimizer.lr": ("0.001", "0.0005"), "train.micro_batch_size": ("2", "4"), "train.steps": ("2", "3")}
    assert told == expected
    first, second = starts_of([row for row in rows if "event" in row], load_config(tmp_path / "changed/config.yaml"))
    assert [each.values["train.micro_batch_size"] for each in (first, second)] == ["2", "4"]


@pytest.mark.parametrize(
    "damage",
    ["flipped bit", "truncated", "missing", "manifest"],
)
@pytest.mark.slow  # test_damage.py has a kind of damage in `make test`
def test_planted_damage_is_refused_and_the_checkpoint_before_is_used(tmp_path, tokens, damage):
    whole = write_config(tmp_path, tokens, "whole")
    config = write_config(tmp_path, tokens, "damaged")
    uninterrupted = train(whole, 2)
    train(config, 2, "train.steps=4")
    checkpoint = config.with_suffix("") / "checkpoints" / "step-00000004"
    victim = checkpoint / ("manifest.json" if damage == "manifest" else "shard-00001.safetensors")
    content = bytearray(victim.read_bytes())
    match damage:
        case "truncated":
            victim.write_bytes(content[: len(content) // 2])
        case "missing":
            victim.unlink()
        case _:
            content[len(content) // 2] ^= 1
            victim.write_bytes(content)
    assert numbers(train(config, 2)) == numbers(uninterrupted)
    assert checkpoint.with_name("step-00000004.damaged").is_dir()
    rows = read_metrics(config.with_suffix("") / "metrics.jsonl")
    (event,) = [row for row in rows if row.get("event") == "damaged_checkpoint"]
    assert victim.name in event["message"]


def test_another_model_is_refused_and_nothing_changes(tmp_path, tokens):
    config = write_config(tmp_path, tokens, "kept", steps=2)
    train(config, 1)
    before = {path: path.stat().st_mtime_ns for path in config.with_suffix("").rglob("*")}
    overrides = ["model.n_layers=2", "seed=5", "data.seq_len=12", "optimizer={name: sgd, lr: 0.1}"]
    refused = subprocess.run(
        command(config, 1, *overrides), env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert refused.returncode == 2, refused.stderr
    lines = refused.stderr.splitlines()
    assert len(lines) == 4, lines
    assert [
        any(key in line for line in lines)
        for key in ("model.n_layers=2", "seed=5", "data.seq_len=12", "optimizer.name=sgd")
    ]
    assert before == {path: path.stat().st_mtime_ns for path in config.with_suffix("").rglob("*")}
    assert json.loads((config.with_suffix("") / "checkpoints/step-00000002/manifest.json").read_text())["step"] == 2
