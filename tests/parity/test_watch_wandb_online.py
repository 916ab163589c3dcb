"""W&B online, with a small server on this machine that answers as W&B's does: what it is sent, and its loss."""

import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher.config.tree import WandbConfig
from launcher.watch import wandb_run
from launcher.watch.metrics import plain_row, read_metrics
from launcher.watch.wandb_read import read_history, wandb_files
from launcher.watch.wandb_run import open_wandb, saved_run_id
from watched_runs import FAKE_KEY, assert_same, hide_account, train


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_account(monkeypatch, tmp_path_factory.mktemp("home"))


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
    wandb_run.tear_down()  # settings are read once for each service
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
