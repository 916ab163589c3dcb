"""What `train` says of its own plan: at its start, after ten updates, in the report; and that training is the same."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from command_runs import ENVIRONMENT, command, numbers, train, updates, write_config
from launcher.config.load import load_config
from launcher.report.gather import gather
from launcher.training.planned import MISS_AFTER
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens
from modeling.kernels.expert_turns import is_built_by_rows
from parallel.config import ParallelConfig


@pytest.mark.slow
def test_the_plan_and_its_miss_are_told_and_change_nothing(tmp_path):
    tokens = write_tokens(tmp_path)
    told = write_config(tmp_path, tokens, "told", steps=MISS_AFTER + 1, parallel=ParallelConfig(ep=2))
    silent = write_config(tmp_path, tokens, "silent", steps=3, parallel=ParallelConfig(ep=2))
    done = subprocess.run(command(told, 2), env=ENVIRONMENT, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0
    out, rows = done.stdout, updates(told)
    assert "step 0: planned for a rank: weights " in out
    assert re.search(rf"step {MISS_AFTER}: measured, beside the plan: [0-9.e-]+ s a step, ", out)
    assert numbers(train(silent, 2, "metrics.plan=false")) == numbers(rows)[:3]
    events = [row for row in read_metrics(tmp_path / "told" / "metrics.jsonl") if "event" in row]
    (plan,) = (row for row in events if row["event"] == "plan")
    (miss,) = (row for row in events if row["event"] == "plan_miss")
    assert 0 <= plan["chance_not_to_fit"] < 0.01 and plan["needs_low_gib"] < plan["needs_gib"] < plan["needs_high_gib"]
    assert miss["step"] == MISS_AFTER and miss["peak_gib_planned"] == plan["peak_gib"]
    measured = [row["peak_gib"] for row in rows[1:MISS_AFTER]]
    assert miss["peak_gib"] == max(measured)
    assert miss["peak_gib_miss"] == pytest.approx(max(measured) / plan["peak_gib"] - 1)
    assert miss["loader_wait_seconds"] >= 0 and miss["busiest_expert"] > 1
    assert "step_seconds" not in plan  # nobody knows this processor's rates
    said = [row["event"] for row in read_metrics(tmp_path / "silent" / "metrics.jsonl") if "event" in row]
    assert not {"plan", "plan_miss"} & set(said)
    (row,) = (row for row in gather(tmp_path / "told", "told").plan_rows if row[0] == "peak memory")
    assert row[1] and row[2] and "times the plan" in row[3]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpus_memory_is_within_the_plans_range(tmp_path, precision):
    """The quickstart's model. Of smaller ones libraries take less than what is planned for them."""
    if precision == "bf16" and not is_built_by_rows(torch.bfloat16):
        pytest.skip("this processor has no products of its own in bf16, and a step takes minutes")
    model = load_config(Path("configs/quickstart.yaml"), []).model
    tokens = write_tokens(tmp_path, n_documents=2000)
    config = write_config(tmp_path, tokens, "told", model=model, steps=MISS_AFTER, global_batch_size=16)
    overrides = ["data.seq_len=256", "train.micro_batch_size=8", f"train.precision={precision}"]
    assert subprocess.run(command(config, 1, *overrides), env=ENVIRONMENT, timeout=300).returncode == 0
    rows = read_metrics(tmp_path / "told" / "metrics.jsonl")
    (plan,) = (row for row in rows if row.get("event") == "plan")
    (miss,) = (row for row in rows if row.get("event") == "plan_miss")
    assert plan["needs_low_gib"] < miss["peak_gib"] < plan["needs_high_gib"]
