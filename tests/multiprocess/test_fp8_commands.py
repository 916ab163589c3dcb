"""Every command on a run of 8 bits: those that compute as it does say what it said, and none calls it a run of 16.

Tolerances: another layout's steps lie within replay's own bounds. A loss is summed in another order, 1e-9.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from launcher.cli import main
from launcher.commands.trained import load_as_it_trains, open_trained
from launcher.errors import UserError
from launcher.profile.rates import product_rate
from launcher.trace.hardware import FOLDER
from launcher.watch.metrics import read_metrics
from modeling.kernels.cuts import E4M3
from task_runs import save_task_run

STEPS = 26  # what a calibration asks for, and one
CONFIG: dict[str, Any] = {
    "name": "small",
    "run_dir": "run",
    "model": {
        "family": "qwen3_moe",
        "vocab_size": 320,
        "d_model": 64,
        "n_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 4,
        "d_head": 16,
        "qk_norm": True,
        "moe": {"n_experts": 4, "top_k": 2, "d_ff": 32},
    },
    "data": {"seq_len": 64, "sources": [{"path": "text/*.txt"}], "heldout_fraction": 0.1},
    "train": {"steps": STEPS, "global_batch_size": 2, "micro_batch_size": 1, "precision": "fp8", "eval_sequences": 2},
    "checkpoint": {"every_steps": 8},
    "metrics": {"wandb": {"mode": "disabled"}},
}


def write_texts(folder: Path) -> None:
    draw = random.Random(0)
    (folder / "text").mkdir()
    for number in range(40):
        text = "".join(draw.choice("abcdefgh {}0123.") for _ in range(draw.randint(60, 200)))
        (folder / f"text/{number:02}.txt").write_text(text)


@pytest.mark.slow
def test_every_command_takes_a_run_of_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    write_texts(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(CONFIG))

    def said(*words: str) -> str:
        """What a command prints, which ends well."""
        capsys.readouterr()
        code, told = main([*words]), capsys.readouterr()
        assert code == 0, told
        return told.out

    assert main(["train", "small.yaml", "--ranks", "1", f"train.eval_every_steps={STEPS}"]) == 0
    (trained,) = [row["eval_loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl") if "eval_loss" in row]
    assert json.loads(said("eval", "run", "--json"))["eval_loss"] == pytest.approx(trained, rel=1e-9)
    assert "bits a byte" in said("eval", "run", "--text", "text/00.txt")
    assert "reproduced: 2 recorded steps, bit for bit" in said("replay", "run", "--step", "18")
    assert "reproduced: 2 recorded steps, bit for bit" in said("blame", "run", "--step", "18")
    said("branch", "run", "branched", "--step", "16")
    assert main(["train", "branched/config.yaml", "--ranks", "1"]) == 0
    assert losses_of(tmp_path / "branched") == losses_of(tmp_path / "run")[16:]  # bit for bit
    assert ", fp8" in said("checkpoint", "show", "run")
    assert "whole" in said("checkpoint", "verify", "run")
    assert "8 tokens" in said("inspect", "run", "--text", "text/00.txt", "--max-tokens", "8")
    assert said("generate", "run", "--prompt", "ab", "--max-new-tokens", "2").startswith("ab")
    said("export", "run", "exported", "--verify")
    assert "fp8" in Path(said("report", "run").strip()).read_text()
    assert "fp8" in said("profile", "small.yaml", "--steps", "1", "--warmup", "1", "--out", "profiled")
    assert "fp8" in said("plan", "small.yaml")
    card = (FOLDER / "H100.yaml").read_text().splitlines()
    own = [*(line for line in card if "torch_name" not in line), device_line(tmp_path / "run")]
    (tmp_path / "card.yaml").write_text("\n".join(own))
    assert "run" in said("plan", "--calibrate", "run", "--gpu", "card.yaml")
    assert main(["train", "small.yaml", "--ranks", "2", "parallel.tp=2", "parallel.ep=2", "train.steps=28"]) == 0
    assert len(losses_of(tmp_path / "run")) == 28
    assert "reproduced: 2 recorded steps" in said("replay", "run", "--step", "28", "--ranks", "1", *ONE)


ONE = ("parallel.tp=1", "parallel.ep=1")


def device_line(run: Path) -> str:
    """The line of a GPU's file that says that the machine which the run was on is one."""
    return next(f"torch_name: {row['device']}" for row in read_metrics(run / "metrics.jsonl") if "device" in row)


def losses_of(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def test_a_machine_s_rate_in_8_bits_is_measured() -> None:
    """On a GPU a profile asks for it; torch has no plain product of such matrices anywhere."""
    assert product_rate(torch.device("cpu"), E4M3, 64) > 0


def test_an_old_gpu_is_told_before_it_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = save_task_run(tmp_path, "llama", precision="fp8", d_ff=64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(UserError, match="not NVIDIA A100-SXM4-80GB; set CUDA_VISIBLE_DEVICES= to compute on the CPU"):
        load_as_it_trains(open_trained(run), "cuda")
