"""The additions that docs/extending.md shows: their diffs apply, and what they add trains and is proven."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("data", "launcher", "modeling", "parallel")
# Section -> the files that its diff may touch.
SECTIONS = {
    "A metric": ["modeling/moe.py"],
    "An optimizer": ["modeling/optimizers/config.py", "modeling/optimizers/rmsprop.py"],
    "A schedule": ["modeling/schedules.py"],
    "A router's score": ["modeling/moe_config.py", "modeling/router.py"],
    "A norm": ["modeling/config.py", "modeling/norm.py"],
    "An architecture": [
        "modeling/attention.py",
        "modeling/config.py",
        "modeling/dims.py",
        "modeling/families/gated_llama.py",
    ],
}
CONFIG = """
name: extended
model:
  {family: mixtral, vocab_size: 300, d_model: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, d_head: 8,
  moe: {n_experts: 4, top_k: 2, d_ff: 16}}
data: {seq_len: 32, sources: [{path: "text/*.txt"}]}
train: {steps: 3, global_batch_size: 4, precision: fp32}
optimizer: {name: rmsprop, lr: 0.001, alpha: 0.9}
schedule: {name: inverse_root, warmup_steps: 1}
checkpoint: {every_steps: 2}
metrics: {wandb: {mode: disabled}}
"""
GATED = """
name: gated
model:
  {family: gated_llama, vocab_size: 300, d_model: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, d_ff: 48, gate_rank: 8}
data: {seq_len: 32, sources: [{path: "text/*.txt"}]}
train: {steps: 3, global_batch_size: 4, precision: fp32}
optimizer: {name: sgd, lr: 0.01}
metrics: {wandb: {mode: disabled}}
"""
ROUTE = """
import torch
from modeling.moe_config import MoEConfig
from modeling.router import build_router

router = build_router(MoEConfig(n_experts=4, score="sqrt_softplus"), 8)
torch.nn.init.normal_(router.weight)
hidden_TD = torch.randn(5, 8)
affinity_TE = router(hidden_TD).affinity_TE
torch.testing.assert_close(affinity_TE.sum(1), torch.ones(5))
scores_TE = torch.log1p((hidden_TD @ router.weight.T).exp()).sqrt()
torch.testing.assert_close(affinity_TE, scores_TE / scores_TE.sum(1, keepdim=True))
"""


def diff_of(section: str) -> str:
    """The one diff of a section of the page."""
    (text,) = re.findall(
        rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)",
        (ROOT / "docs" / "extending.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return diff


def apply(diff: str, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["git", "apply", "-p0", "-"]
    return subprocess.run(arguments, input=diff, cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the four packages with every diff of the page applied."""
    folder = tmp_path_factory.mktemp("extended")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for section in SECTIONS:
        run = subprocess.run(
            ["git", "apply", "-p0", "-"],
            input=diff_of(section),
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, f"docs/extending.md, {section}: {run.stderr}"
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "text").mkdir()
    for number in range(200):
        line = f"{number} seats are round the table, and every one of them is as good as the next.\n"
        (folder / "text" / f"{number}.txt").write_text(4 * line)
    return folder


def ended(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process in the copy; its own packages are imported, not this tree's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )


def run(folder: Path, *arguments: str) -> str:
    """What the copy prints."""
    done = ended(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("section", SECTIONS)
def test_an_addition_touches_few_files(section):
    assert sorted(re.findall(r"^\+\+\+ (\S+)$", diff_of(section), re.MULTILINE)) == SECTIONS[section]


@pytest.mark.slow
def test_what_is_added_trains_in_a_pipeline(extended):
    """Two stages: each rank lacks the other's layer, whose metric it gets; the state is saved and counted."""
    run(extended, "-m", "launcher", "train", "config.yaml", "--ranks", "2", "parallel.pp=2", "train.eval_every_steps=2")
    rows = [json.loads(line) for line in (extended / "runs/extended/metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "loss" in row]
    assert [row["lr"] for row in updates] == pytest.approx([0.001, 0.001 / 2**0.5, 0.001 / 3**0.5])
    assert all(row["moe/logit_max"] > 0 for row in updates)
    assert updates[0]["loss"] > updates[-1]["loss"]
    assert "square_avg" in (extended / "runs/extended/checkpoints/step-00000003/manifest.json").read_text()


@pytest.mark.slow
def test_what_is_added_is_proven(extended):
    """Under ep; the plain side has the new metric and the new optimizer."""
    out = run(extended, "-m", "launcher", "prove", "config.yaml", "parallel.ep=2", "--ranks", "2")
    assert "proven" in out


@pytest.mark.slow
def test_the_norm_is_proven(extended):
    """Its rows cut by tp, where its one number of all channels gets its sum over the ranks; layers by pp."""
    shape = ("model.family=none", "model.norm=tanh", "parallel.tp=2", "parallel.pp=2")
    assert "proven" in run(extended, "-m", "launcher", "prove", "config.yaml", *shape, "--ranks", "4")


@pytest.mark.slow
def test_the_architecture_is_proven(extended):
    """Heads and gates cut by tp, layers by pp; the narrow projection, which nothing cuts, gets its sum over tp."""
    (extended / "gated.yaml").write_text(GATED)
    out = run(extended, "-m", "launcher", "prove", "gated.yaml", "parallel.tp=2", "parallel.pp=2", "--ranks", "4")
    assert "proven" in out


def test_the_architecture_is_counted(extended):
    (extended / "gated.yaml").write_text(GATED)
    config = json.loads(run(extended, "-m", "launcher", "train", "gated.yaml", "--dry-run", "--json"))
    matrices = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 8 * 32 + 4 * 8)
    assert config["model"]["parameters"] == matrices + 2 * 300 * 32 + 5 * 32


def test_the_architecture_needs_its_gates(extended):
    (extended / "gated.yaml").write_text(GATED)
    done = ended(extended, "-m", "launcher", "train", "gated.yaml", "--dry-run", "model.gate_rank=null")
    assert done.returncode == 2
    assert "model.gate_rank=null is not possible" in done.stdout + done.stderr


def test_a_router_has_the_new_score(extended):
    run(extended, "-c", ROUTE)


def test_planted_diff_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "modeling").mkdir()
    (tmp_path / "modeling" / "schedules.py").write_text("another file\n")
    assert apply(diff_of("A schedule"), tmp_path).returncode != 0
