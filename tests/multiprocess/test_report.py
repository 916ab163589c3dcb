"""The page that real runs leave when they have ended: after restarts with another layout and batch, and a sick end."""

import errno
import json
import re
from pathlib import Path

import pytest

from command_runs import train, write_config
from launcher.config.load import load_config
from launcher.training.health import UNHEALTHY
from launcher.training.run_dir import claim
from launcher.training.start import start_training
from layout_runs import write_tokens
from modeling.optimizers.config import SGDConfig
from parallel.processes.start import run_ranks


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])["runs"][0]


def test_a_run_of_two_layouts_leaves_a_page(tmp_path, tokens):
    config = write_config(tmp_path, tokens, "run")
    page = config.with_suffix("") / "report.html"
    rows = train(config, 2, "train.steps=4")
    first = page.read_text()
    assert data_of(first)["curves"]["loss"]["mean"] == pytest.approx([row["loss"] for row in rows], rel=1e-4)
    assert "<dd>finished</dd>" in first and "2 ranks: dp 2, ZeRO 1" in first
    again = page.stat().st_mtime_ns
    assert start_training(config, ["train.steps=4"], 2) == 0  # nothing is left to do
    assert page.stat().st_mtime_ns == again
    rows = train(config, 1, "train.steps=6", "train.global_batch_size=2")
    second, drawn = page.read_text(), data_of(page.read_text())
    assert len(rows) == drawn["updates"] == 6
    assert drawn["events"]["start"] == [0, 4] and drawn["events"]["config_change"] == [4]
    assert "1 rank: dp 1, ZeRO 1" in second and "2 ranks: dp 2, ZeRO 1" in second
    assert "train.global_batch_size: " in second and "Changed within the run" in second
    assert [layer["layer"] for layer in drawn["experts"]["layers"]] == drawn["layers"]["layers"]
    for name in ("python", "torch", "device", "cores", "training state of a rank"):
        assert f">{name}<" in second


def test_a_run_that_its_health_stops_leaves_a_page(tmp_path, tokens):
    config = write_config(tmp_path, tokens, "sick", optimizer=SGDConfig(lr=1e30, clip_norm=None))
    assert start_training(config, ["health.on_nonfinite=stop", "checkpoint.every_steps=null"], 1) == UNHEALTHY
    page = (config.with_suffix("") / "report.html").read_text()
    assert "stopped by health.on_nonfinite" in page
    assert data_of(page)["events"]["nonfinite"] == [2]


def train_without_room_for_the_page(config) -> tuple[int, list[str]]:
    """One rank, whose disk is full when the page is written: its exit code, and what it said."""
    import launcher.report.at_end as at_end
    from launcher.training.loop import train as train_to_the_end

    def refuse(target: Path, page: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[str] = []
    at_end.write_page, at_end.tell = refuse, told.append
    return train_to_the_end(config, []), told


def test_no_page_stops_no_run(tmp_path, tokens):
    config = load_config(write_config(tmp_path, tokens, "run", steps=1))
    with claim(config):
        (code, told), other = run_ranks(train_without_room_for_the_page, 2, config, preload=["launcher.training.loop"])
    assert (code, *other) == (0, 0, [])
    assert len(told) == 1 and "report.html was not written: [Errno 28] No space left on device" in told[0]
    assert not (config.run_path / "report.html").exists()
