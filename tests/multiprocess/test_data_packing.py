"""Packed documents in real runs: every layout reads the same tokens, resumed or not, and `data show` names them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.prepare import prepare
from data_reference import write_token_file
from data_runs import one_source_run, run_recorded, tokens_of_steps
from health_runs import Plan
from launcher.cli import main
from launcher.config.tree import RunConfig
from launcher.watch.metrics import read_metrics
from layout_runs import DENSE_MODEL, VOCAB_SIZE, run_config

SEQ_LEN = 24
LAYOUTS = {
    "dp": (2, {}, 1),
    "micro batches of 4": (1, {}, 1),
    "cp": (2, {"cp": 2}, 1),
    "tp": (2, {"tp": 2}, 2),
    "pp": (2, {"pp": 2}, 2),
}  # ranks, degrees, how many of them are given a sequence whole


def a_config(folder: Path, name: str, degrees: dict[str, int], **train: int) -> RunConfig:
    options = {"micro_batch_size": 2, "steps": 4, "global_batch_size": 8, **train}
    config = run_config(str(folder / "a"), model=DENSE_MODEL, **options)
    return one_source_run(config, folder, name, degrees, packing="best_fit")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One uninterrupted run on one rank, and what its steps were given."""
    folder, draw = tmp_path_factory.mktemp("packed"), np.random.default_rng(0)
    lengths = draw.integers(2, 40, 60)
    write_token_file(folder / "a", [draw.integers(1, VOCAB_SIZE, int(n)).tolist() for n in lengths])
    (folder / "given").mkdir()
    config = a_config(folder, "plain", {})
    prepare(config.data, vocab_size=VOCAB_SIZE)
    assert run_recorded(folder / "given", Plan(), config, 1) == [0]
    return folder, {"given": tokens_of_steps(folder / "given"), "losses": losses(folder / "plain")}


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize(
    "layout",
    ["dp", pytest.param("cp"), *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n not in ("dp", "cp"))],
)
def test_every_layout_is_given_the_same_tokens(runs, layout: str, tmp_path: Path) -> None:
    """Two steps, then two more after a resumption."""
    folder, plain = runs
    n_ranks, degrees, n_whole = LAYOUTS[layout]
    size = 4 if "4" in layout else 2
    for steps in (2, 4):
        config = a_config(folder, f"on {layout}", degrees, steps=steps, micro_batch_size=size)
        assert run_recorded(tmp_path, Plan(), config, n_ranks) == [0] * n_ranks
    expected = {
        step: Counter({token: n * n_whole for token, n in each.items()}) for step, each in plain["given"].items()
    }
    assert tokens_of_steps(tmp_path) == expected
    assert losses(folder / f"on {layout}") == pytest.approx(plain["losses"], rel=1e-4)


def test_a_packed_step_is_shown_as_it_was_given(runs, capsys: pytest.CaptureFixture[str]) -> None:
    folder, plain = runs
    (event,) = [row for row in read_metrics(folder / "plain" / "metrics.jsonl") if row.get("event") == "packing"]
    assert 0 < event["padding"] < 0.2 and 0 < event["cut"] < 0.6
    documents = dict(enumerate(np.split(*read_documents(folder / "a"))))
    for step in range(1, 5):
        assert main(["data", "show", str(folder / "plain"), "--step", str(step), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        found: Counter[int] = Counter()
        for span in shown["spans"]:
            document = documents[int(span["document"].rpartition(":")[2])]
            first, stop = span["tokens"]
            found.update(document[span["offset"] : span["offset"] + stop - first].tolist())
        assert found == plain["given"][step]
        assert shown["packing"]["packing"] == "best_fit"
        assert 1 - shown["packing"]["padding"] == pytest.approx(found.total() / (8 * SEQ_LEN))
        span = shown["spans"][0]
        assert main(["data", "where", str(folder / "plain"), "--document", span["document"], "--json"]) == 0
        (place,) = json.loads(capsys.readouterr().out)["places"]
        assert {"step": step, "sample": span["sample"], "tokens": span["tokens"], "trained": True} in place["seen"]
    assert main(["data", "diff", str(folder / "plain"), str(folder / "plain")]) == 0


def read_documents(prefix: Path) -> tuple[np.ndarray, np.ndarray]:
    """The file's tokens, and where all documents but the first begin."""
    from data.tokenfile import TokenFile

    file = TokenFile(prefix)
    return np.array(file.tokens), file.all_starts()[1:]
