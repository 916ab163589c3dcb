"""A run whose mixture changes in stages: what its ranks are given, and what a resumption may change of the stages."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from data.config import SourceConfig, StageConfig
from data.dataset import open_dataset
from data_reference import write_token_file
from data_runs import given_rows, run_recorded
from health_runs import Plan
from launcher.cli import main
from launcher.commands.data_run import open_run
from launcher.config.tree import CheckpointConfig, MetricsConfig, RunConfig, WandbConfig
from launcher.errors import UserError
from launcher.training.run_dir import check_resume
from launcher.training.start import check_tokens
from launcher.watch.metrics import read_metrics
from layout_runs import DENSE_MODEL, VOCAB_SIZE, run_config

SEQ_LEN = 24
BATCH = 8 * SEQ_LEN


def a_config(folder: Path, steps: int, *stages: tuple[int, tuple[float, ...]], name: str = "run") -> RunConfig:
    config = run_config(str(folder / "a"), model=DENSE_MODEL, micro_batch_size=2, steps=steps, global_batch_size=8)
    sources = (SourceConfig(path=str(folder / "a"), weight=3.0), SourceConfig(path=str(folder / "b")))
    listed = tuple(StageConfig(from_tokens=first, weights=weights) for first, weights in stages)
    return dataclasses.replace(
        config,
        name=name,
        run_dir=str(folder / name),
        data=dataclasses.replace(config.data, sources=sources, stages=listed),
        checkpoint=CheckpointConfig(every_steps=2),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of two sources whose ids tell them apart: those of the second are above half the vocabulary."""
    folder, draw = tmp_path_factory.mktemp("stages"), np.random.default_rng(0)
    for name, low in (("a", 1), ("b", VOCAB_SIZE // 2)):
        lengths = draw.integers(5, 40, 60)
        documents = [draw.integers(low, low + VOCAB_SIZE // 2 - 1, int(n)).tolist() for n in lengths]
        write_token_file(folder / name, documents)
    return folder


def test_stages_are_trained_on_and_changed_only_ahead(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3:1, from step 3 on 1:3; resumed at step 4 by other ranks with a stage more, from step 6 on the second alone."""
    begun = ((2 * BATCH, (1.0, 3.0)),)
    (folder / "given").mkdir()
    assert run_recorded(folder / "given", Plan(), a_config(folder, 4, *begun), 2) == [0, 0]
    late = (4 * BATCH - SEQ_LEN, (0.0, 1.0))
    for stages in ([(3 * BATCH, (1.0, 3.0))], [], [(2 * BATCH, (1.0, 2.0))], [*begun, late]):
        with pytest.raises(UserError, match="would change the data from token"):
            check_resume(a_config(folder, 7, *stages))
    resumed = a_config(folder, 7, *begun, (5 * BATCH, (0.0, 1.0)))
    changed = check_resume(resumed)
    assert [key for key, *_ in changed] == ["train.steps", "data.stages"]
    assert run_recorded(folder / "given", Plan(), resumed, 1, changed) == [0]
    given = given_rows(folder / "given")
    from_b = [sum(max(row) >= VOCAB_SIZE // 2 for row in given[step]) for step in range(1, 8)]
    assert from_b == [2, 2, 6, 6, 6, 8, 8]
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    assert [row["data/stage"] for row in rows if "loss" in row] == [1, 1, 2, 2, 2, 3, 3]
    (event,) = [row for row in rows if row.get("key") == "data.stages"]
    assert (event["event"], event["from_tokens"], event["consumed_tokens"]) == ("config_change", 5 * BATCH, 4 * BATCH)
    check_against_show(folder, given)
    assert main(["data", "diff", str(folder / "run"), str(folder / "run")]) == 0


def check_against_show(folder: Path, given: dict[int, list[list[int]]]) -> None:
    """The samples of each step, as the dataset of the saved config has them, are those that ranks were given."""
    run = open_run(str(folder / "run"))
    for step in run.steps():
        read = run.dataset.read(step.samples()).tokens_BS.tolist()
        assert sorted(read) == sorted(given[step.step])


def test_a_run_longer_than_its_caps_is_refused(folder: Path) -> None:
    config = a_config(folder, 1000, name="long")
    capped = tuple(dataclasses.replace(source, max_epochs=2.0) for source in config.data.sources)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=capped))
    with pytest.raises(UserError, match=r"data.sources.max_epochs leaves \d+ sequences in all, and train.steps=1000"):
        check_tokens(config)


def test_data_left_are_those_after_the_newest_checkpoint(folder: Path) -> None:
    """A run of batches of 8 goes on with others: to the last step that they suffice for, and no further."""
    config = a_config(folder, 4, name="capped")
    capped = tuple(dataclasses.replace(source, max_epochs=1.0) for source in config.data.sources)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=capped))
    end = open_dataset(config.data, seed=config.seed, vocab_size=VOCAB_SIZE, split="train").stages.end
    assert end is not None and end > 64
    (folder / "capped given").mkdir()
    assert run_recorded(folder / "capped given", Plan(), config, 2) == [0, 0]
    for size in (4, 16):
        last = 4 + (end - 32) // size
        train = dataclasses.replace(config.train, global_batch_size=size, steps=last)
        check_tokens(dataclasses.replace(config, train=train))
        train = dataclasses.replace(train, steps=last + 1)
        with pytest.raises(
            UserError, match=f"come to 32 in step 4, and train.steps={last + 1} takes .*; lower train.st"
        ):
            check_tokens(dataclasses.replace(config, train=train))
