"""Each source's held-out text is evaluated by itself, the same under every layout, and by `roundtable eval`."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data.config import SourceConfig
from data.dataset import open_dataset
from data.prepare import prepare
from data_runs import run_recorded
from health_runs import Plan
from launcher.cli import main
from launcher.config.tree import MetricsConfig, RunConfig, WandbConfig
from launcher.watch.metrics import read_metrics
from layout_runs import DENSE_MODEL, run_config
from parallel.config import ParallelConfig

VOCAB = 300
LAYOUTS = {"dp": (2, {}), "cp": (2, {"cp": 2}), "tp": (2, {"tp": 2}), "pp": (2, {"pp": 2})}


def a_config(folder: Path, name: str, degrees: dict[str, int]) -> RunConfig:
    model = dataclasses.replace(DENSE_MODEL, vocab_size=VOCAB)
    options = {"eval_every_steps": 2, "eval_sequences": 5, "eval_by_source": True}
    config = run_config("", model=model, steps=2, **options)
    sources = tuple(SourceConfig(path=str(folder / source)) for source in ("words", "digits"))
    data = dataclasses.replace(config.data, sources=sources, token_dir=str(folder / "t"), heldout_fraction=0.3)
    metrics = MetricsConfig(wandb=WandbConfig(mode="disabled"))
    degrees = ParallelConfig(zero=1, **degrees)
    return dataclasses.replace(
        config, name=name, run_dir=str(folder / name), parallel=degrees, data=data, metrics=metrics
    )


def evaluations(run: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "eval_loss" in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Two sources of text that is nothing alike; the second has fewer held-out sequences than are asked for."""
    folder, draw = tmp_path_factory.mktemp("eval"), np.random.default_rng(0)
    for name, letters, n in (("words", "abcdefgh ", 60), ("digits", "0123456789", 12)):
        (folder / name).mkdir()
        for number in range(n):
            text = "".join(draw.choice(list(letters), int(draw.integers(20, 60))))
            (folder / name / f"{number:02}.txt").write_text(text)
    config = a_config(folder, "plain", {})
    prepare(config.data, vocab_size=VOCAB)
    assert run_recorded(folder, Plan(), config, 1) == [0]
    (row,) = evaluations(folder / "plain")
    return folder, row


def test_each_source_has_its_loss(plain, capsys: pytest.CaptureFixture[str]) -> None:
    """That of its own samples: of ``eval``, and, put together by their targets, that of all held-out text."""
    folder, row = plain
    assert sorted(row) == ["eval_loss", "eval_loss/digits", "eval_loss/words", "step"]
    config = a_config(folder, "plain", {})
    heldout = open_dataset(config.data, seed=config.seed, vocab_size=VOCAB, split="heldout")
    ranges = heldout.ranges(5)
    assert row["eval_loss"] == row["eval_loss/words"] != row["eval_loss/digits"]
    assert ranges["words"] == (0, 5) and ranges["digits"][0] == heldout.source_samples[0]
    assert main(["eval", str(folder / "plain"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["sources"]
    assert {name: each["sequences"] for name, each in told.items()} == {name: n for name, (_, n) in ranges.items()}
    for name, each in told.items():
        assert each["eval_loss"] == pytest.approx(row[f"eval_loss/{name}"], rel=1e-5)
    everything = dataclasses.replace(config, train=dataclasses.replace(config.train, eval_sequences=1000))
    assert run_recorded(folder, Plan(), dataclasses.replace(everything, run_dir=str(folder / "all")), 1) == [0]
    (row,) = evaluations(folder / "all")
    ranges = heldout.ranges(1000)
    targets = {name: heldout.count(np.arange(first, first + n))[0] for name, (first, n) in ranges.items()}
    mean = sum(row[f"eval_loss/{name}"] * n for name, n in targets.items()) / sum(targets.values())
    assert row["eval_loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp", "cp", "tp", "pp"])
def test_every_layout_finds_the_same(plain, layout: str) -> None:
    folder, row = plain
    n_ranks, degrees = LAYOUTS[layout]
    assert run_recorded(folder, Plan(), a_config(folder, layout, degrees), n_ranks) == [0] * n_ranks
    assert evaluations(folder / layout)[0] == pytest.approx(row, rel=1e-5)
