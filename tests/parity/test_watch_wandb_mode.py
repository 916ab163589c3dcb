"""Whether a run is followed by W&B online, offline or not at all, and what is said of it before a job is submitted."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launcher.config.tree import WandbConfig
from launcher.slurm.checks import check_wandb, wandb_notes
from launcher.watch import wandb_run
from launcher.watch.wandb_read import read_history, wandb_files
from launcher.watch.wandb_run import NullRun, choose_mode, open_wandb
from watched_runs import CLOSED_PORT, FAKE_KEY, config, hide_account


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_account(monkeypatch, tmp_path_factory.mktemp("home"))


def test_disabled_leaves_nothing(tmp_path: Path) -> None:
    assert isinstance(open_wandb(WandbConfig(mode="disabled"), {}, tmp_path, "none"), NullRun)
    assert not list(tmp_path.iterdir())


def test_auto_is_online_only_with_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert choose_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    assert choose_mode("auto") == "online"
    assert choose_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode("auto") == "disabled"
    assert choose_mode("online") == "online"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine wandb.example.com login user password {FAKE_KEY}\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert choose_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    wandb_run.tear_down()  # settings are read once for each service
    assert choose_mode("auto") == "online"
    wandb_run.tear_down()


def test_online_without_a_key_asks_nothing_and_goes_offline(tmp_path: Path) -> None:
    lines: list[str] = []
    run = open_wandb(WandbConfig(mode="online"), {}, tmp_path, "run", announce=lines.append)
    run.log({"step": 1, "loss": 1.0})
    run.finish()
    assert len(lines) == 2
    assert "no key" in lines[0]
    assert "offline" in lines[1]
    assert read_history(wandb_files(tmp_path)[0]) == [{"step": 1, "loss": 1.0}]


def test_an_unreachable_server_is_said_before_a_job_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers anything is reachable; a closed port is not."""
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", CLOSED_PORT)
    wandb_run.tear_down()  # settings are read once for each service
    first, second = wandb_notes(config("auto"), "runs/watched")
    assert first == "W&B: online"
    assert second.startswith(
        f"warning: W&B: no answer from {CLOSED_PORT} within 5 s ([Errno 111] Connection refused); "
    )
    assert "`wandb sync runs/watched/wandb/*run-*` uploads it" in second
    assert list(wandb_notes(config("disabled"), "runs/watched")) == []
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # which answers 501 to all
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        wandb_run.tear_down()
        assert list(wandb_notes(config("auto"), "runs/watched")) == ["W&B: online"]
        server.shutdown()
    wandb_run.tear_down()


def test_online_without_a_key_is_refused_before_a_job_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb_run.tear_down()
    (line,) = check_wandb(config("online"))
    assert line.startswith("metrics.wandb.mode=online must have a key, and none is here; run `wandb login`")
    assert list(check_wandb(config("auto"))) == []
    monkeypatch.setenv("WANDB_MODE", "online")
    (line,) = check_wandb(config("auto"))
    assert line.startswith("WANDB_MODE=online must have a key, and none is here; ")
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    assert list(check_wandb(config("online"))) == list(check_wandb(config("auto"))) == []
