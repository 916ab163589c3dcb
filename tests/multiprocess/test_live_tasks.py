"""Tasks on the weights as they train: the same under every layout, the same as `roundtable eval`, and no change to the
training.

Log-likelihoods agree to 1e-5 of themselves after one update, 1e-4 after two: they are sums of up to 32 fp32
log-probabilities, whose products and exchanges add in another order under each layout, and the second update is made
of weights that the first has moved apart by as much.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.cli import main
from live_task_runs import KINDS, a_config, answers_of, prepared_folder, trained
from parallel.processes.start import RankError

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2 ep2": (2, {"ep": 2}),
    "zero3": (2, {"zero": 3}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2}),
    "tp2 ep2 zero3": (2, {"tp": 2, "ep": 2, "zero": 3}),
    "cp2 tp2": (4, {"cp": 2, "tp": 2}),
    "zero0": (2, {"zero": 0}),
    "zero2": (2, {"zero": 2}),
}
pytestmark = pytest.mark.xdist_group("live tasks")  # the run that its tests share takes long to make


@pytest.fixture(scope="module")
def plain(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[dict[str, Any]], list[tuple[np.ndarray, np.ndarray]]]:
    """One process's run."""
    folder = prepared_folder(tmp_path_factory.mktemp("live"))
    config = a_config(folder, "plain")
    return folder, trained(config, 1), answers_of(config)


def evaluations(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("event") == "evaluated_tasks"]


def test_the_metrics_are_those_of_roundtable_eval(plain: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The last evaluation is of the last checkpoint's weights, whose context is the sequence of training."""
    folder, rows, answers = plain
    first, last = evaluations(rows)
    assert (first["step"], last["step"]) == (1, 2)
    names = ",".join(str(folder / "own" / f"{kind}.yaml") for kind in KINDS)
    assert main(["eval", str(folder / "plain"), "--tasks", names, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["max_length"] == 32 and told["n_cut"] > 0
    for name, task in told["tasks"].items():
        for metric, numbers in task["metrics"].items():
            assert last[f"eval/{name}/{metric}"] == pytest.approx(numbers["value"], rel=1e-5)
    assert first["eval/roll/bits_per_byte"] != last["eval/roll/bits_per_byte"]
    (start,) = [row for row in rows if row.get("event") == "eval_tasks"]
    assert start["tasks"] == list(KINDS) and start["cut"] == told["n_cut"]
    assert start["requests"] == 9 * (3 + 1 + 1) and 0 < start["sequences"] < len(answers[0][0])


def test_training_is_not_changed(plain: Any) -> None:
    """Losses and gradient norms are bit for bit those of a run without tasks."""
    folder, rows, _ = plain
    bare = trained(a_config(folder, "bare", tasks=False), 1)
    updates = [[(row["loss"], row["grad_norm"]) for row in each if "loss" in row] for each in (rows, bare)]
    assert updates[0] == updates[1] and len(updates[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_the_same(plain: Any, layout: str) -> None:
    folder, rows, answers = plain
    n_ranks, degrees = LAYOUTS[layout]
    config = a_config(folder, layout, **degrees)
    found = trained(config, n_ranks)
    for number, (ours, theirs) in enumerate(zip(answers_of(config), answers, strict=True)):
        np.testing.assert_allclose(ours[0][:, 0], theirs[0][:, 0], rtol=1e-5 * 10**number)
        assert (ours[1] == theirs[1]).all(), "the likeliest tokens"
        assert len(np.unique(theirs[1])) > 2
    for ours, theirs in zip(evaluations(found), evaluations(rows), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_planted_a_share_that_is_left_out_ends_the_run(plain: Any) -> None:
    """Rather than counting as nothing."""
    with pytest.raises(RankError, match="no rank has told the loss of"):
        trained(a_config(plain[0], "share"), 2, "share")


@pytest.mark.slow
def test_a_task_that_is_gone_when_ranks_start_ends_them_all(plain: Any) -> None:
    """What only rank 0 reads is nothing that the others wait for."""
    config = a_config(plain[0], "gone")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, eval_tasks=("gone.yaml",)))
    with pytest.raises(RankError, match=r"gone\.yaml is no file"):
        trained(config, 2)
