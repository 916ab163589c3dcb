"""A run that was begun before dims had names, its checkpoint kept as it was, goes on to the numbers that it had.

tests/data/run_2026_11 was trained under tp=2, ep=2 and ZeRO 1 with AdamW, router biases moving, up to step 2; the code
that wrote it then made the steps 3 and 4 below.
"""

import shutil
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens

KEPT = Path(__file__).parents[1] / "data" / "run_2026_11"
WENT_ON = {3: (4.5606643824287545, 0.7068997621536255), 4: (4.5794106115841995, 0.6853099465370178)}  # loss, norm
# Sums over tp are made at another place since then. AdamW's second step on such a gradient moves the loss by less.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, [], id="as it was"),
        pytest.param(1, ["parallel.tp=1", "parallel.ep=1"], id="on one process", marks=pytest.mark.slow),
    ],
)
def test_an_earlier_run_goes_on(tmp_path, monkeypatch, ranks, layout):
    write_tokens(tmp_path)
    shutil.copytree(KEPT, tmp_path / "old")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "old/config.yaml", *layout, "--ranks", str(ranks)]) == 0
    rows = read_metrics(tmp_path / "old/metrics.jsonl")
    assert [row["step"] for row in rows if row.get("event") == "resume"] == [2]
    seen = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row and row["step"] > 2}
    assert seen.keys() == WENT_ON.keys()
    for step, expected in WENT_ON.items():
        assert seen[step] == pytest.approx(expected, rel=TOLERANCE)
