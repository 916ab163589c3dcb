"""Training never waits for W&B: a closed port, a refused key, a dead service, a bad folder, an odd value."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from launcher.config.tree import WandbConfig
from launcher.watch import wandb_run
from launcher.watch.metrics import read_metrics
from launcher.watch.wandb_read import is_whole, read_history, wandb_files
from launcher.watch.wandb_run import WandbRun, open_wandb
from small_disk import small_disk
from watched_runs import CLOSED_PORT, FAKE_KEY, assert_same, hide_account, train


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_account(monkeypatch, tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("wrong", ["a file", "a folder as run_id"])
def test_a_place_that_cannot_be_written_does_not_stop_training(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "wandb").touch() if wrong == "a file" else (tmp_path / "wandb/run_id").mkdir(parents=True)
    told: list[str] = []
    run = wandb_run.open_wandb(WandbConfig(mode="offline"), {}, tmp_path, "name", announce=told.append)
    assert isinstance(run, wandb_run.NullRun)
    (line,) = told
    assert line.startswith(f"W&B: {tmp_path}/wandb cannot be written: ")


def test_an_unreachable_server_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wandb_run.tear_down()  # settings are read once for each service
    monkeypatch.setenv("WANDB_BASE_URL", CLOSED_PORT)
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    monkeypatch.setattr(wandb_run, "INIT_SECONDS", 3.0)
    start = time.monotonic()
    train(tmp_path, "auto", 1, 5)
    assert time.monotonic() - start < 15
    written = read_metrics(tmp_path / "metrics.jsonl")
    assert len([row for row in written if "loss" in row]) == 5
    logged = [read_history(path) for path in wandb_files(tmp_path)]
    assert_same(logged[-1], written)
    out, err = capfd.readouterr()
    assert out.count("online does not work") == 1
    assert "connection refused" in out
    assert err == ""


class Refusing(BaseHTTPRequestHandler):
    """A server that knows no key; with ``delay`` it does not answer in time either."""

    delay = 0.0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.delay)
        with suppress(OSError):  # nobody waits any more
            self.send_response(403)  # 401 is asked again until the time is over
            self.end_headers()
            self.wfile.write(b'{"errors": [{"message": "invalid api key"}]}')

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(
    ("delay", "told"),
    [
        pytest.param(0.0, "error 403", id="refused"),
        pytest.param(8.0, "deadline exceeded", id="hanging", marks=pytest.mark.slow),
    ],
)
def test_a_refused_key_does_not_stop_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    delay: float,
    told: str,
) -> None:
    wandb_run.tear_down()  # settings are read once for each service
    monkeypatch.setattr(Refusing, "delay", delay)
    monkeypatch.setattr(wandb_run, "INIT_SECONDS", 3.0)
    monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        train(tmp_path, "auto", 1, 5)
        server.shutdown()
    (offline,) = (path for path in wandb_files(tmp_path) if "offline-run" in path.parent.name)
    assert_same(read_history(offline), read_metrics(tmp_path / "metrics.jsonl"))
    out, err = capfd.readouterr()
    assert out.count("online does not work") == 1 and told in out
    assert err == ""


def test_the_service_dying_does_not_stop_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    run = open_wandb(WandbConfig(mode="offline"), {}, tmp_path, "run", announce=lines.append)
    assert isinstance(run, WandbRun)
    for child in psutil.Process().children():
        if child.name() == "wandb-core":
            child.kill()
    time.sleep(0.3)
    for step in range(1, 4):
        run.log({"step": step, "loss": 1.0})
    run.finish()
    assert len(lines) == 2
    assert "logging stopped at step 1" in lines[1]
    assert "training goes on" in lines[1]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("n_rows", "told"), [(3000, "logging stopped at step "), (3, "not everything was uploaded")])
def test_a_stopped_service_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_rows: int, told: str
) -> None:
    """What is between it and the run takes some hundred rows; then, and at the end, the run would wait for it."""
    monkeypatch.setattr(wandb_run, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 0.5)
    lines: list[str] = []
    came_through: list[WandbRun] = []
    run = open_wandb(WandbConfig(mode="offline"), {}, tmp_path, "run", announce=lines.append)
    (service,) = services()
    service.suspend()
    begun = time.monotonic()
    try:
        with_rows = threading.Thread(target=log_all, args=(run, n_rows, came_through), daemon=True)
        with_rows.start()
        with_rows.join(20)
        assert len(came_through) == 1  # without an exit that wandb asks for, either
    finally:
        with suppress(psutil.NoSuchProcess):
            service.kill()
    assert time.monotonic() - begun < 15
    assert len(lines) == 2
    assert lines[1].startswith(f"W&B: {told}")
    assert "its service has not answered for" in lines[1] and "training goes on" in lines[1]
    assert services() == []


def test_an_exit_that_wandb_asks_for_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does with the code of its service, where that was killed."""
    monkeypatch.setattr(wandb_run.wandb, "teardown", lambda: sys.exit(-9))
    wandb_run.tear_down()


def services() -> list[psutil.Process]:
    """Those of this process that live; killed ones may not have been waited for yet."""
    found = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]


def log_all(run: WandbRun, n_rows: int, came_through: list[WandbRun]) -> None:
    for step in range(1, n_rows + 1):
        run.log({"step": step, "loss": 1.0, "words": "x" * 400})
    run.finish()
    came_through.append(run)


def test_a_value_that_wandb_cannot_take_does_not_stop_training(tmp_path: Path) -> None:
    lines: list[str] = []
    run = open_wandb(WandbConfig(mode="offline"), {}, tmp_path, "run", announce=lines.append)
    run.log({"step": 1, "event": object()})
    run.finish()
    assert len(lines) == 2
    assert lines[1].startswith("W&B: logging stopped at step 1")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    with small_disk(tmp_path / "disk", mib=2) as folder:
        yield folder
        wandb_run.tear_down()


@pytest.mark.parametrize("full", ["on the way", "from the start"])
def test_a_full_disk_is_told_of_at_the_end(
    disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], full: str
) -> None:
    """W&B's service drops what it cannot write, and ends as if it had written it; wandb's log would be tracebacks."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "wandb").symlink_to(disk)
    if full == "from the start":
        (disk / "filler").write_bytes(bytes(2**21 - 4096))
    lines: list[str] = []
    run = open_wandb(WandbConfig(mode="offline"), {}, run_dir, "run", announce=lines.append)
    for step in range(1, 401):
        run.log({"step": step, "loss": 1.0, "words": "x" * 6000})
    run.finish()
    assert capfd.readouterr() == ("", "")
    assert len(lines) == 2
    assert lines[1].startswith("W&B: ") and lines[1].endswith("metrics.jsonl has every number")
    if full == "on the way":
        (path,) = wandb_files(run_dir)
        assert f"{path} could not be written to its end and lacks rows" in lines[1]
        assert 0 < len(read_history(path)) < 400


@pytest.mark.parametrize("n_letters", [10, 40_000, 65_500])
def test_a_file_is_whole_where_its_last_record_is_the_end(tmp_path: Path, n_letters: int) -> None:
    """Wherever the last blocks begin; a row of 40,000 letters lies in three of them."""
    lines: list[str] = []
    run = open_wandb(WandbConfig(mode="offline"), {}, tmp_path, "run", announce=lines.append)
    for step in range(1, 4):
        run.log({"step": step, "loss": 1.0, "words": "x" * n_letters})
    run.finish()
    assert len(lines) == 1
    (path,) = wandb_files(tmp_path)
    assert is_whole(path)
    cut = tmp_path / "cut.wandb"
    cut.write_bytes(path.read_bytes()[:-10])
    assert not is_whole(cut)
