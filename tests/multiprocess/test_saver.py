"""Saving beside training: what is written is what was, whatever fails is told on every rank, nothing hangs."""

import dataclasses
import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from launcher.config.dump import dump_config
from launcher.config.tree import CheckpointConfig, MetricsConfig, WandbConfig
from launcher.watch.metrics import read_metrics
from layout_runs import MOE_MODEL, run_config, write_tokens
from modeling.optimizers.config import AdamWConfig
from parallel.checkpoint.boxes import Box
from parallel.checkpoint.places import list_checkpoints
from parallel.checkpoint.read import open_checkpoint
from parallel.checkpoint.saver import Hooks, Saver
from parallel.config import ParallelConfig
from parallel.processes.start import run_ranks
from rotating import some_fast
from save_runs import (
    FAULTS,
    Witness,
    raise_fence_when_taken,
    save_beside_a_hanging_rank,
    save_beside_a_step,
    save_faulty,
    save_slowly,
    save_whole,
    save_with_failing_disk,
    write_on_after_losing_the_fence,
)

TIMEOUT_SECONDS = 280


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    tokens = write_tokens(tmp_path_factory.mktemp("tokens"))
    return run_config(tokens, model=MOE_MODEL, optimizer=AdamWConfig(lr=1e-3), parallel=ParallelConfig(ep=2, zero=1))


def on_ranks(function, *arguments, ranks=2):
    return run_ranks(function, ranks, *arguments, timeout_seconds=TIMEOUT_SECONDS, threads=1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_written_is_the_state_at_the_call(config, tmp_path, asynchronous):
    witnesses: list[Witness] = on_ranks(save_whole, config, str(tmp_path), asynchronous)
    for witness in witnesses:
        assert [(saved.step, saved.error, saved.warning) for saved in witness.saves] == [
            (1, None, None),
            (2, None, None),
        ]
    assert witnesses[0].events == ["synced", "committed"] * 2
    assert witnesses[1].events == []
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    first, second = map(open_checkpoint, list_checkpoints(tmp_path))
    assert first.manifest.scalars["consumed"] == 8
    assert strangers(first, witnesses) == []
    assert strangers(second, witnesses, sign=-1) == []


def strangers(checkpoint, witnesses, sign=1) -> list[str]:
    """The weights on disk that are not those of the witnesses, times ``sign``; with sign 1, the states too."""
    return [
        f"{kind} {name}"
        for witness in witnesses
        for (kind, name, start), values in witness.state.items()
        if (kind == "weight" or sign == 1)
        and not torch.equal(checkpoint.read_box(name, Box(start, tuple(values.shape)), kind), sign * values)
    ]


def test_the_state_changes_only_once_the_copy_is_taken(config, tmp_path):
    witnesses = on_ranks(save_slowly, config, str(tmp_path), True)
    assert strangers(open_checkpoint(tmp_path / "step-00000001"), witnesses) == []
    assert all(witness.saves[0].hold_seconds > 0.4 for witness in witnesses)


def test_a_change_that_does_not_wait_is_seen(config, tmp_path):
    witnesses = on_ranks(save_slowly, config, str(tmp_path), False)
    assert strangers(open_checkpoint(tmp_path / "step-00000001"), witnesses)
    assert all(witness.saves[0].hold_seconds < 0.4 for witness in witnesses)


@pytest.mark.parametrize("zero", some_fast([0, 1, 2, 3], 1, 3))
def test_an_update_waits_for_the_copy(config, tmp_path, zero):
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, zero=zero))
    witnesses = on_ranks(save_beside_a_step, config, str(tmp_path), True)
    assert strangers(open_checkpoint(tmp_path / "step-00000001"), witnesses) == []


def test_an_update_that_does_not_wait_is_seen(config, tmp_path):
    witnesses = on_ranks(save_beside_a_step, config, str(tmp_path), False)
    assert strangers(open_checkpoint(tmp_path / "step-00000001"), witnesses)


def test_who_waits_for_the_writer_says_so_each_second():
    """To the watchdog: a slow disk is no hang."""
    calls: list[str] = []
    alive = iter([True, True, False])
    writer = SimpleNamespace(join=lambda seconds: calls.append(f"{seconds:g} s"), is_alive=lambda: next(alive))
    saver = object.__new__(Saver)
    saver.thread, saver.broken, saver.hooks = writer, None, Hooks(while_waiting=lambda: calls.append("waits"))
    saver._join()
    assert calls == ["1 s", "waits"] * 3 and saver.thread is None


def test_shards_are_safetensors_files(config, tmp_path):
    witnesses = on_ranks(save_whole, config, str(tmp_path), True)
    checkpoint = open_checkpoint(tmp_path / "step-00000001")
    seen = 0
    for piece in checkpoint.manifest.every_piece():
        with safe_open(tmp_path / "step-00000001" / piece.file, framework="pt") as shard:
            owner = next(each.state for each in witnesses if (piece.kind, piece.name, piece.start) in each.state)
            assert torch.equal(shard.get_tensor(piece.key), owner[piece.kind, piece.name, piece.start])
            seen += 1
    assert seen == sum(len(witness.state) for witness in witnesses)


def test_planted_faults_of_the_saver_fail_the_certificate_at_save_time(config, tmp_path):
    """Nothing is committed, all ranks hear the same, and the saver goes on with the next save."""
    first, second = on_ranks(save_faulty, config, tmp_path)
    expected = {
        FAULTS[0]: ("experts", "overlap"),
        FAULTS[1]: ("exp_avg_sq", "missing"),
        FAULTS[2]: ("weight of", "overlap"),
        FAULTS[3]: ("of", "missing"),
    }
    for fault, parts in expected.items():
        error = first[fault].error
        assert error is not None and "the coverage certificate of step" in error, fault
        assert all(part in error for part in parts), (fault, error)
        assert second[fault].error == error
    assert first["none"].error is None
    assert names(tmp_path) == [f"step-{len(FAULTS) + 1:08d}"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_refuses_fails_one_save_on_all_ranks(config, tmp_path, asynchronous):
    for saves in on_ranks(save_with_failing_disk, config, tmp_path, asynchronous):
        assert [saved.error is None for saved in saves] == [True, False, True]
        assert "rank 1" in saves[1].error and "File too large" in saves[1].error
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert open_checkpoint(tmp_path / "step-00000003").step == 3


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_save_is_given_up(config, tmp_path):
    for said, seconds in on_ranks(save_beside_a_hanging_rank, config, tmp_path):
        assert "a rank is gone or did not answer in time" in said
        assert seconds < 60  # of a limit of 2 and a hang of 8, on a busy machine
    assert list_checkpoints(tmp_path) == []


@pytest.mark.slow
def test_a_run_whose_disk_refuses_every_save_trains_on_and_exits_1(config, tmp_path):
    """The real command, under a limit of 64 KiB for any file."""
    config = dataclasses.replace(
        config,
        run_dir=str(tmp_path / "run"),
        train=dataclasses.replace(config.train, steps=4),
        checkpoint=CheckpointConfig(every_steps=2),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )
    (tmp_path / "run.yaml").write_text(dump_config(config))
    command = ["bash", "-c", f"ulimit -f 64; exec {sys.executable} -m launcher train {tmp_path}/run.yaml --ranks 2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "the last checkpoint, step 4, was not written" in ended.stderr and "Traceback" not in ended.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    failed = [row for row in rows if row.get("event") == "checkpoint_failed"]
    assert [row["step"] for row in failed] == [2, 4] and all("File too large" in row["message"] for row in failed)
    assert not any(row.get("event") == "checkpoint" for row in rows)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_stale_process_neither_commits_nor_logs(config, tmp_path):
    """Two processes: the second starts the run again while the first, cut off, believes that it still has it."""
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"), parallel=ParallelConfig())
    taken, lost = tmp_path / "taken", tmp_path / "lost"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        other = pool.apply_async(raise_fence_when_taken, (tmp_path / "run", taken, lost))
        (said,) = on_ranks(write_on_after_losing_the_fence, config, taken, lost, ranks=1)
        assert other.get(60) == 2
    assert said["before"] == "None"
    for what in ("metrics", "commit"):
        assert "was started again (start 2) after this process's start 1" in said[what]
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000001"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1
