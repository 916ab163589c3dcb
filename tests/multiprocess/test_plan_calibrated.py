"""`plan --calibrate` on a real run of this machine's processor, traced and all, and the plan that it corrects."""

import json
from pathlib import Path

import pytest

from command_runs import train, write_config
from launcher.cli import main
from launcher.training.surroundings import processor
from launcher.watch.metrics import read_metrics
from layout_runs import DENSE_MODEL, write_tokens


@pytest.mark.slow
def test_a_real_run_corrects_its_own_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    h100 = (Path("configs/hardware") / "H100.yaml").read_text()
    cpu = tmp_path / "cpu.yaml"
    cpu.write_text(h100.replace("torch_name: NVIDIA H100 80GB HBM3", f"torch_name: {processor()}"))
    config = write_config(tmp_path, write_tokens(tmp_path), "run", model=DENSE_MODEL, steps=27)
    train(config, 1, "checkpoint.every_steps=27")
    capsys.readouterr()
    assert main(["plan", "--calibrate", str(tmp_path / "run"), "--gpu", str(cpu), "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert (
        kept["steps"] == 22 and kept["device"] == processor() and kept["planned"].keys() == {"closed_forms", "traced"}
    )
    slowest, quickest = (pick(row["step_seconds"] for row in rows[5:]) for pick in (max, min))
    assert quickest / 2 < kept["measured"]["step_seconds"] <= slowest
    assert main(["plan", str(config), "--gpus", "1", "--gpu", str(cpu), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step_seconds"] == pytest.approx(kept["measured"]["step_seconds"])
    assert plan["corrections"]["before"]["step_seconds"] == pytest.approx(kept["planned"]["traced"]["step_seconds"])
    assert plan["corrections"]["peak_bytes"] == 1 and kept["name"] in plan["corrections"]["from"][0]
