"""Training on token files in an S3 bucket: the ranks of a machine share a cache, and see the tokens of local files."""

import dataclasses
import os
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest

from data.config import SourceConfig
from data.remote_index import _seen
from data.tokenwriter import TokenFileWriter
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.tree import CheckpointConfig, MetricsConfig, RunConfig, WandbConfig
from launcher.training.run_dir import claim
from launcher.training.start import start_checks, start_training
from launcher.watch.metrics import read_metrics
from layout_runs import DENSE_MODEL, VOCAB_SIZE, run_config, write_tokens
from object_store import s3_bucket


@pytest.fixture(scope="module")
def denied() -> list[str]:
    return []


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory, denied: list[str]):
    with s3_bucket(tmp_path_factory.mktemp("aws"), "tokens", denied) as url:
        yield url


def write_config(folder: Path, name: str, *sources: str, **data: object) -> tuple[Path, RunConfig]:
    config = run_config("x", model=DENSE_MODEL, steps=4)
    listed = tuple(SourceConfig(path=source) for source in sources)
    config = dataclasses.replace(
        config,
        name=name,
        run_dir=str(folder / name),
        data=dataclasses.replace(config.data, sources=listed, cache_dir=str(folder / "cache"), **data),
        checkpoint=CheckpointConfig(every_steps=2),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(config))
    return path, config


def numbers(folder: Path) -> list[tuple]:
    return [
        (row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(folder / "metrics.jsonl") if "loss" in row
    ]


@pytest.mark.slow
def test_a_run_reads_a_bucket_as_it_reads_files(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two ranks, resumed after two steps; `data show` and `data diff` work on it; a changed object ends it."""
    random = np.random.default_rng(0)
    for name, dtype in (("narrow", np.uint16), ("wide", np.int32)):
        writer = TokenFileWriter(tmp_path / name, np.dtype(dtype))
        for n in random.integers(1, 60, 80):
            writer.add(random.integers(1, VOCAB_SIZE, int(n)))
        writer.finish()
        for end in ("bin", "idx"):
            fsspec.filesystem("s3").put_file(str(tmp_path / f"{name}.{end}"), f"{bucket}/a/{name}.{end}")
    local, _ = write_config(
        tmp_path, "local", *(str(tmp_path / name) for name in ("narrow", "wide")), packing="best_fit"
    )
    urls = [f"{bucket}/a/{name}" for name in ("narrow", "wide")]
    remote, _ = write_config(tmp_path, "remote", *urls, packing="best_fit")
    assert start_training(local, [], 2) == 0
    assert start_training(remote, ["train.steps=2"], 2) == 0
    assert start_training(remote, [], 2) == 0
    assert numbers(tmp_path / "remote") == numbers(tmp_path / "local")
    blocks = [path for path in (tmp_path / "cache" / "blocks").glob("*/*") if path.is_file()]
    assert len(blocks) == 2 and not list(tmp_path.glob("cache/*/*.bin"))
    capsys.readouterr()
    assert main(["data", "show", str(tmp_path / "remote"), "--step", "3"]) == 0
    assert f"{bucket}/a/wide" in capsys.readouterr().out
    fsspec.filesystem("s3").put_file(str(tmp_path / "narrow.bin"), f"{bucket}/a/wide.bin")
    _seen.clear()
    assert main(["train", str(remote), "train.steps=6", "--ranks", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{bucket}/a/wide.bin has changed: it is ") and "begin another run" in line


def test_tokens_that_the_store_does_not_give_are_named_in_a_line(
    bucket: str, denied: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At a start, which reads them for the first time; a later start may do, so the exit code is 1."""
    prefix = write_tokens(tmp_path)
    for end in ("bin", "idx"):
        fsspec.filesystem("s3").put_file(f"{prefix}.{end}", f"{bucket}/denied/tokens.{end}")
    config, _ = write_config(tmp_path, "denied", f"{bucket}/denied/tokens")
    denied.append("tokens.bin")
    try:
        assert main(["train", str(config), "--ranks", "1"]) == 1
    finally:
        denied.clear()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{bucket}/denied/tokens.bin cannot be read (Access Denied); check the network")
    assert not (tmp_path / "denied").exists()


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{bucket}/none/a", "{bucket}/none/a.bin is not there; check the URL, and the keys that lead to it"),
        ("nosuch://x/a", "nosuch://x/a.bin is no URL that fsspec can open (Protocol not known: nosuch); check it"),
    ],
)
def test_the_command_tells_in_one_line(bucket: str, tmp_path: Path, capsys, source: str, line: str) -> None:
    path, _ = write_config(tmp_path, "run", source.format(bucket=bucket))
    for command in ("prepare", "train"):
        assert main([command, str(path)]) == 2
        assert capsys.readouterr().err.splitlines() == [line.format(bucket=bucket)]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.yaml"]


def test_a_machine_with_an_empty_cache_notices_a_changed_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the stores said at the first start is kept beside the run, and asked at each start before anything else."""
    writer = TokenFileWriter(tmp_path / "a", np.dtype(np.uint16))
    for n in range(2, 90):
        writer.add(np.arange(1, 1 + n) % VOCAB_SIZE)
    writer.finish()
    path, config = write_config(tmp_path, "run", f"file://{tmp_path / 'a'}")
    claim(config).close()
    for check in start_checks().values():
        check(config)
    shutil.rmtree(tmp_path / "cache")
    _seen.clear()
    for check in start_checks().values():  # the same object, brought anew
        check(config)
    shutil.rmtree(tmp_path / "cache")
    _seen.clear()
    os.utime(tmp_path / "a.bin", (1, 1))
    capsys.readouterr()
    assert main(["train", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"file://{tmp_path / 'a'}.bin has changed: it is "), line
    assert line.endswith(
        f"put the former one back, or delete {tmp_path / 'run/remote_tokens.json'} and begin another run"
    )
    (tmp_path / "run" / "remote_tokens.json").write_text("[]")
    assert main(["train", str(path)]) == 2
    assert "remote_tokens.json must hold what the stores said" in capsys.readouterr().err
