"""W&B, through the real package: the same numbers as metrics.jsonl, and training that never waits for it.

Nothing here needs the network: offline runs are read back from their files, and the online path talks to a small server
on this machine that answers as W&B's does, or to a closed port.
"""

import gzip
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.config.tree import MetricsConfig, RunConfig, TrainConfig, WandbConfig
from launcher.slurm.checks import check_wandb, wandb_notes
from launcher.watch import wandb_run
from launcher.watch.metrics import plain_row, read_metrics
from launcher.watch.moe import load_metrics
from launcher.watch.wandb_read import read_history, read_records, wandb_files
from launcher.watch.wandb_run import NullRun, WandbRun, choose_mode, open_wandb, saved_run_id
from launcher.watch.watchers import open_watchers

FAKE_KEY = "0123456789" * 4
CLOSED_PORT = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no settings and no home directory of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def rows(first: int, last: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a training loop says, with numbers that do not round: (method of Watchers, row)."""
    for step in range(first, last + 1):
        row: dict[str, Any] = {"step": step, "tokens": 2**40 + step, "loss": 9 / step, "lr": 1e-3 / 3, "grad_norm": 0.1}
        row |= {"tokens_per_second": 1e5 / 7, "mfu": None, "peak_gib": 1 / 3, "step_seconds": 1e-7 * step}
        counts = {layer: [step, 7, 3 * layer, 11] for layer in (1, 2)}
        row |= {"moe/layer_01/entropy": 0.5, "moe/layer_02/entropy": 1 / 7, "moe/balance_loss": 1.1, "moe/z_loss": 0.3}
        yield "update", row | load_metrics(counts, n_tokens=15, top_k=2)
        if step % 5 == 0:
            yield "eval", {"step": step, "eval_loss": 9.5 / step}
            yield "event", {"step": step, "event": "checkpoint", "path": f"checkpoints/step-{step:08d}"}
    yield "event", {"step": last, "event": "norm", "value": math.inf, "values": [math.nan, 0.5]}


def config(mode: Any) -> RunConfig:
    return RunConfig(name="watched", train=TrainConfig(steps=20), metrics=MetricsConfig(wandb=WandbConfig(mode=mode)))


def train(run_dir: Path, mode: Any, first: int, last: int) -> None:
    with open_watchers(config(mode), {"seed": 0, "train": {"steps": last}}, run_dir, first - 1, 0) as watchers:
        for method, row in rows(first, last):
            getattr(watchers, method)(row)


def exact(value: Any) -> str:
    """The value as text that tells one double from the next, and knows NaN.

    W&B writes 9.0 as 9, and sends NaN and infinities as text: those are the same numbers.
    """
    if isinstance(value, list):
        return str([exact(item) for item in value])
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    text = value if isinstance(value, str) else repr(value)
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)


def assert_same(logged: list[dict[str, Any]], written: list[dict[str, Any]]) -> None:
    """Equal row by row, key by key and number by number."""
    assert [{key: exact(row[key]) for key in sorted(row)} for row in logged] == [
        {key: exact(row[key]) for key in sorted(row)} for row in written
    ]


shares_the_run = pytest.mark.xdist_group("offline run")  # which takes long to make


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a key, stopped after step 12 and resumed from the checkpoint at step 10."""
    run_dir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("NETRC", os.devnull)
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


@pytest.mark.parametrize("wrong", ["a file", "a folder as run_id"])
def test_a_place_that_cannot_be_written_does_not_stop_training(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "wandb").touch() if wrong == "a file" else (tmp_path / "wandb/run_id").mkdir(parents=True)
    told: list[str] = []
    run = wandb_run.open_wandb(WandbConfig(mode="offline"), {}, tmp_path, "name", announce=told.append)
    assert isinstance(run, wandb_run.NullRun)
    (line,) = told
    assert line.startswith(f"W&B: {tmp_path}/wandb cannot be written: ")


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
    run = open_wandb(WandbConfig(mode="offline"), {}, tmp_path, "silent")
    run.log({"step": 1, "loss": 1.0})
    run.finish()
    run.finish()
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "wandb sync" in err


@pytest.mark.parametrize("mode", ["auto", "offline"])
@pytest.mark.parametrize("home", [None, "/proc", f"{__file__}/home"])
def test_a_user_without_a_home_hears_nothing_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], home: str | None, mode: str
) -> None:
    """Containers have such users. Root may make any folder, but none beneath a file."""
    wandb_run.tear_down()  # the service of an earlier test has a home
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # restored in the end, whatever the run sets
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    run = open_wandb(WandbConfig(mode=mode), {}, tmp_path, "run", announce=lambda line: None)
    run.log({"step": 1, "loss": 1.0})
    run.finish()
    assert capfd.readouterr() == ("", "")
    assert read_history(wandb_files(tmp_path)[0]) == [{"step": 1, "loss": 1.0}]


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


def test_an_unreachable_server_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_a_value_that_wandb_cannot_take_does_not_stop_training(tmp_path: Path) -> None:
    lines: list[str] = []
    run = open_wandb(WandbConfig(mode="offline"), {}, tmp_path, "run", announce=lines.append)
    run.log({"step": 1, "event": object()})
    run.finish()
    assert len(lines) == 2
    assert lines[1].startswith("W&B: logging stopped at step 1")


class Server(BaseHTTPRequestHandler):
    """As much of W&B's server as one run needs; keeps the history lines it is sent."""

    protocol_version = "HTTP/1.1"
    history: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/graphql":
            self.reply({"data": self.answer(json.loads(body))})
            return
        if self.path.endswith("/file_stream"):
            lines = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history.extend(json.loads(line) for line in lines)
        self.reply({})

    do_PUT = do_POST

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "1", "name": "roundtable", "entity": {"id": "2", "name": "someone"}}
        match question["operationName"]:
            case "RunResumeStatus":
                return {"model": project | {"bucket": None}}
            case "UpsertBucket":
                name = question["variables"]["name"]
                bucket = {"id": "3", "name": name, "displayName": name, "historyLineCount": 0, "project": project}
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "CreateRunFiles":
                url = f"http://127.0.0.1:{self.server.server_address[1]}/upload"
                files = [{"name": name, "uploadUrl": url} for name in question["variables"]["files"]]
                return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}
            case _:
                return {}

    def reply(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """The service drops its connections when it ends; that is no news."""


@contextmanager
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[QuietServer]:
    Server.history = []
    with QuietServer(("127.0.0.1", 0), Server) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listening.server_address[1]}")
        monkeypatch.setenv("WANDB_API_KEY", FAKE_KEY)
        try:
            yield listening
        finally:
            listening.shutdown()
            thread.join()


def test_an_online_run_sends_the_numbers_of_metrics_jsonl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with server(monkeypatch):
        train(tmp_path, "auto", 1, 12)
    sent = [{key: value for key, value in row.items() if not key.startswith("_")} for row in Server.history]
    assert_same(sent, read_metrics(tmp_path / "metrics.jsonl"))
    out, err = capfd.readouterr()
    assert f"/someone/roundtable/runs/{saved_run_id(tmp_path)}" in out
    assert err == ""


@pytest.mark.slow
def test_a_server_lost_during_the_run_does_not_hold_up_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 3.0)
    lines: list[str] = []
    with server(monkeypatch):
        run = open_wandb(WandbConfig(), {}, tmp_path, "run", announce=lines.append)
        run.log({"step": 1, "loss": 1.0})
    start = time.monotonic()
    run.log(plain_row({"step": 2, "loss": 2.0}))
    run.finish()
    assert time.monotonic() - start < 12
    assert len(lines) == 2
    assert "not everything was uploaded" in lines[1]
    (path,) = wandb_files(tmp_path)
    assert [row["step"] for row in read_history(path)] == [1, 2]  # on disk, for wandb sync
    assert capfd.readouterr() == ("", "")


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
