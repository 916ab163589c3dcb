"""Reading ahead in the real loop: the same batches and numbers at every depth, through resumes and rollbacks."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_runs import ENVIRONMENT, MOE_MODEL, ledger, numbers, write_config
from health_runs import Plan, run_planned
from launcher.config.load import load_config
from launcher.config.tree import HealthConfig
from launcher.training.run_dir import claim
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens
from modeling.optimizers.config import SGDConfig
from parallel.processes.start import run_ranks


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def train_hashed(config: Any) -> list[tuple[int, str]]:
    """One rank of the real loop: each micro-batch that it trains on, by its first sample."""
    import xxhash

    import launcher.training.loop as loop
    import launcher.training.step as step

    seen: list[tuple[int, str]] = []
    read = step.read_micro_batch

    def reading(dataset: Any, indices: Any, *rest: Any, **options: Any) -> Any:
        batch = read(dataset, indices, *rest, **options)
        tensors = (batch.tokens_BS, batch.targets_BS, batch.context.positions_BS, batch.context.documents_BS)
        digest = xxhash.xxh3_64(b"".join(tensor.numpy().tobytes() for tensor in tensors))
        seen.append((int(indices[0]), digest.hexdigest()))
        return batch

    step.read_micro_batch = reading
    assert loop.train(config, []) == 0
    return seen


def run_hashed(path: Path, *overrides: str) -> list[list[tuple[int, str]]]:
    """By rank, the micro-batches of a start of the run."""
    config = load_config(path, overrides)
    with claim(config):
        return run_ranks(train_hashed, 2, config, timeout_seconds=240, threads=1, preload=["launcher.training.loop"])


def rows_of(path: Path) -> list[dict]:
    return [row for row in read_metrics(path.with_suffix("") / "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
def test_batches_are_the_same_without_and_across_a_resume(tmp_path, tokens):
    """Six steps without a thread; four and two with one, three steps ahead."""
    whole, parts = (write_config(tmp_path, tokens, name) for name in ("whole", "parts"))
    expected = run_hashed(whole, "data.read_ahead=0")
    first, second = run_hashed(parts, "data.read_ahead=3", "train.steps=4"), run_hashed(parts, "data.read_ahead=3")
    assert [a + b for a, b in zip(first, second, strict=True)] == expected
    assert numbers(rows_of(parts)) == numbers(rows_of(whole))
    assert ledger(parts) == ledger(whole)
    assert all(row["loader_wait_seconds"] >= 0 and "loader_thrown_away" not in row for row in rows_of(parts))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 4])
def test_a_rollback_goes_on_with_the_same_batches(tmp_path, tokens, depth):
    """Sample 45 makes the loss of step 6 large: the run goes back to step 4 and leaves samples 32 to 47 out."""
    health = HealthConfig(on_spike="rollback", spike_window=4, spike_z=20.0)
    optimizer = SGDConfig(lr=0.5, momentum=0.9, clip_norm=0.5)
    found = []
    for name, ahead in (("plain", 0), ("ahead", depth)):
        path = write_config(tmp_path, tokens, name, model=MOE_MODEL, steps=8, optimizer=optimizer)
        config = dataclasses.replace(load_config(path, [f"data.read_ahead={ahead}"]), health=health)
        assert run_planned(Plan(spiked=45), config) == [0, 0]
        found.append((numbers(rows_of(path)), ledger(path)))
    assert found[0] == found[1]
    last, micro_batches = rows_of(path)[-1], 8 // (2 * 2)
    assert 0 < last["loader_thrown_away"] <= micro_batches * min(depth, 2)


UNSEEN = """
import sys
import data.foreign
from launcher.cli import main

data.foreign.check_foreign_files = lambda *given: None
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_id_that_the_vocabulary_lacks_is_told_with_its_step(tmp_path, tokens):
    """It lies where no look before the start comes; exit code 2, one line."""
    path = write_config(tmp_path, tokens, "foreign", steps=6)
    arguments = ["train", str(path), "--ranks", "1", "model.vocab_size=95"]
    command = [sys.executable, "-c", UNSEEN, *arguments]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=250, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert line.startswith("step ") and "model.vocab_size=95 is smaller than the largest token id, 95" in line
