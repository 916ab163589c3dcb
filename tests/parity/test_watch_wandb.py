"""An offline run of W&B's own package, read back from its files: the same numbers as metrics.jsonl."""

import math
import os
import pwd
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config.tree import WandbConfig
from launcher.watch import wandb_run
from launcher.watch.metrics import read_metrics
from launcher.watch.wandb_read import read_history, read_records, wandb_files
from launcher.watch.wandb_run import open_wandb, saved_run_id
from watched_runs import assert_same, hide_account, train


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_account(monkeypatch, tmp_path_factory.mktemp("home"))


shares_the_run = pytest.mark.xdist_group("offline run")  # which takes long to make


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a key, stopped after step 12 and resumed from the checkpoint at step 10."""
    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        hide_account(patch, tmp_path_factory.mktemp("home"))
        train(run_dir, "auto", 1, 12)
        train(run_dir, "auto", 11, 20)
    return run_dir


@shares_the_run
def test_an_offline_run_holds_the_numbers_of_metrics_jsonl(offline_run: Path) -> None:
    first, second = (read_history(path) for path in wandb_files(offline_run))
    written = read_metrics(offline_run / "metrics.jsonl")
    assert [row["step"] for row in written if "loss" in row] == list(range(1, 21))
    kept = [row for row in first if row["step"] <= 10]
    assert_same(kept + second, written)
    assert len(first) > len(kept)
    assert {"moe/layer_01/load", "moe/dropped", "moe/balance_loss"} <= set(kept[0])


@shares_the_run
def test_planted_change_of_one_value_is_seen(offline_run: Path) -> None:
    (_, path), written = wandb_files(offline_run), read_metrics(offline_run / "metrics.jsonl")
    second = [row for row in written if row["step"] > 10]
    assert_same(read_history(path), second)
    second[3]["loss"] = math.nextafter(second[3]["loss"], 0.0)
    with pytest.raises(AssertionError):
        assert_same(read_history(path), second)


@shares_the_run
def test_planted_lost_row_is_seen(offline_run: Path) -> None:
    (_, path), written = wandb_files(offline_run), read_metrics(offline_run / "metrics.jsonl")
    with pytest.raises(AssertionError):
        assert_same(read_history(path), [row for row in written if row["step"] > 10][:-1])


@shares_the_run
def test_a_resumed_run_keeps_its_id_and_its_name(offline_run: Path) -> None:
    runs = [
        next(r.run for r in read_records(path) if r.WhichOneof("record_type") == "run")
        for path in wandb_files(offline_run)
    ]
    assert [(run.run_id, run.display_name, run.project) for run in runs] == [
        (saved_run_id(offline_run), "watched", "roundtable")
    ] * 2
    assert {item.key for item in runs[0].config.update} >= {"seed", "train"}


@shares_the_run
def test_everything_lies_in_the_run_directory(offline_run: Path) -> None:
    assert sorted(path.name for path in offline_run.iterdir()) == ["ledger.jsonl", "metrics.jsonl", "wandb"]
    assert len(list((offline_run / "wandb").glob("offline-run-*"))) == 2


LEAVES_NOTHING = """
import os, sys; from pathlib import Path
from launcher.config.tree import WandbConfig
from launcher.watch.wandb_run import open_wandb
if sys.argv[1] == "ended":
    run = open_wandb(WandbConfig(mode="offline"), {}, Path("run"), "name")
    run.log({"step": 1, "loss": 2.0})
    run.finish()
os._exit(0)  # as a rank ends, and one that is killed: without the interpreter's own end
"""


@pytest.mark.parametrize("when", ["imported", "ended"])
def test_no_temporary_folder_stays(tmp_path: Path, when: str) -> None:
    for name in ("temporary", "run/wandb/offline-run-20200101_000000-killed/tmp/code"):
        (tmp_path / name).mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    subprocess.run([sys.executable, "-c", LEAVES_NOTHING, when], cwd=tmp_path, env=environment, check=True)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert len(list((tmp_path / "run/wandb").glob("*run-*/tmp"))) == (1 if when == "imported" else 0)


@shares_the_run
def test_a_torn_file_gives_the_rows_before(offline_run: Path, tmp_path: Path) -> None:
    path = wandb_files(offline_run)[0]
    whole = read_history(path)
    torn = tmp_path / "torn.wandb"
    torn.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    rows_before = read_history(torn)
    assert 0 < len(rows_before) < len(whole)
    assert_same(rows_before, whole[: len(rows_before)])


@shares_the_run
def test_planted_damage_and_foreign_files_are_refused(offline_run: Path, tmp_path: Path) -> None:
    data = bytearray(wandb_files(offline_run)[0].read_bytes())
    data[len(data) // 2] ^= 1
    damaged, foreign = tmp_path / "damaged.wandb", tmp_path / "foreign.wandb"
    damaged.write_bytes(data)
    foreign.write_text("hello, world")
    with pytest.raises(ValueError, match="does not match its checksum"):
        read_history(damaged)
    with pytest.raises(ValueError, match="not a W&B file"):
        read_history(foreign)


def test_records_that_cross_blocks_are_put_together(tmp_path: Path) -> None:
    row = {"step": 1, "loss": 1.0, "moe/layer_00/load": [1 / (3 + expert) for expert in range(9000)]}
    run = open_wandb(WandbConfig(mode="offline"), {}, tmp_path, "large")
    run.log(row)
    run.finish()
    (path,) = wandb_files(tmp_path)
    assert path.stat().st_size > 4 * 32 * 1024
    assert_same(read_history(path), [row])


def test_nothing_is_printed_but_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "a run's"
    run_dir.mkdir()
    run = open_wandb(WandbConfig(mode="offline"), {}, run_dir, "silent")
    run.log({"step": 1, "loss": 1.0})
    run.finish()
    run.finish()
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert f"`wandb sync {shlex.quote(str(run_dir / 'wandb'))}/offline-run-*` uploads it" in err


@pytest.mark.parametrize("mode", ["auto", "offline"])
@pytest.mark.parametrize("home", [None, "unlisted", "/proc", f"{__file__}/home"])
def test_a_user_without_a_home_hears_nothing_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], home: str | None, mode: str
) -> None:
    """Containers have such users, and ids that /etc/passwd does not list. Root may make any folder, but none beneath a
    file."""
    wandb_run.tear_down()  # the service of an earlier test has a home
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # restored in the end, whatever the run sets
    monkeypatch.setenv("WANDB_CONFIG_DIR", "")
    monkeypatch.delenv("WANDB_CONFIG_DIR")
    if home == "unlisted":
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    if home in (None, "unlisted"):
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    run = open_wandb(WandbConfig(mode=mode), {}, tmp_path, "run", announce=lambda line: None)
    run.log({"step": 1, "loss": 1.0})
    run.finish()
    assert capfd.readouterr() == ("", "")
    assert read_history(wandb_files(tmp_path)[0]) == [{"step": 1, "loss": 1.0}]
