"""metrics.jsonl: what is written is read back, and a resumed file holds each step once, in order."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import UserError
from launcher.watch import metrics
from launcher.watch.metrics import MetricsFile, encode_row, read_metrics


def write_rows(path: Path, rows: list[dict]) -> None:
    with MetricsFile(path) as file:
        for row in rows:
            file.write(row)


def update(step: int) -> dict:
    return {"step": step, "loss": 1 / step, "mfu": None}


@settings(max_examples=200)
@given(st.floats(allow_nan=False), st.lists(st.floats(allow_nan=False), max_size=4))
def test_numbers_come_back_as_the_same_doubles(number: float, numbers: list[float]) -> None:
    row = json.loads(encode_row({"step": 1, "loss": number, "moe/layer_00/load": numbers}))
    back = [float(value) for value in (row["loss"], *row["moe/layer_00/load"])]
    assert [value.hex() for value in back] == [value.hex() for value in (number, *numbers)]


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [{"step": 1, "loss": math.nan, "grad_norm": math.inf, "load": [-math.inf, 0.5], "mfu": None}])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (row,) = read_metrics(path)
    assert math.isnan(row["loss"])
    assert row["grad_norm"] == math.inf
    assert row["load"] == [-math.inf, 0.5]
    assert row["mfu"] is None


def test_tensors_and_numpy_values_are_written_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [{"step": 1, "a": torch.tensor(0.1), "b": np.float32(0.1), "c": np.arange(2), "d": np.int64(3)}])
    single = float(np.float32(0.1))
    assert read_metrics(path) == [{"step": 1, "a": single, "b": single, "c": [0, 1], "d": 3}]


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError):
        encode_row({"step": 1, "event": object()})


@pytest.mark.parametrize("tail", [b"", b'{"step": 4, "lo', b"\0\0\0\0", b"\0\0\n", b'{"loss": 2.0}\n', b"12"])
def test_a_torn_last_line_is_ignored_and_removed(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [update(step) for step in (1, 2, 3)])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    MetricsFile.resume(path, 3).close()
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_row_after_the_end_changes_nothing(tmp_path: Path) -> None:
    file = MetricsFile.resume(tmp_path / "metrics.jsonl", 0)
    file.write(update(1))
    file.close()
    file.write(update(2))
    file.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [update(1)]


def test_a_last_line_without_its_newline_is_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}')
    with MetricsFile.resume(path, 1) as file:
        file.write(update(2))
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_resuming_drops_every_kind_of_row_past_the_restored_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 0, "event": "started"}, update(1), update(2), {"step": 2, "eval_loss": 3.0}]
    later = [update(3), {"step": 3, "eval_loss": 2.9}, {"step": 3, "event": "checkpoint"}, update(4)]
    write_rows(path, rows + later)
    with MetricsFile.resume(path, 2) as file:
        file.write(update(3))
    assert read_metrics(path) == [*rows, update(3)]


def test_resuming_keeps_the_bytes_of_what_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"loss":2.50}\n{"step":2,"loss":2}\n')
    MetricsFile.resume(path, 1).close()
    assert path.read_text() == '{"step":1,"loss":2.50}\n'


def test_resuming_where_there_is_no_file_begins_one(tmp_path: Path) -> None:
    with MetricsFile.resume(tmp_path / "metrics.jsonl", 0) as file:
        file.write(update(1))
    assert read_metrics(tmp_path / "metrics.jsonl") == [update(1)]


def test_planted_damage_in_the_middle_is_named_and_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n'
    path.write_text(text)
    for read in (read_metrics, lambda path: MetricsFile.resume(path, 3)):
        with pytest.raises(UserError, match="line 2 is not a row"):
            read(path)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("second", [1, 0])
def test_planted_steps_out_of_order_are_named_and_nothing_changes(tmp_path: Path, second: int) -> None:
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{{"step": 1, "event": "a"}}\n{{"step": 0, "event": "b"}}\n{{"step": {second}}}\n'
    path.write_text(text)
    with pytest.raises(UserError, match=f"line 4 has step {second} after step 1"):
        MetricsFile.resume(path, 3)
    assert path.read_text() == text


def test_a_line_of_any_length_is_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LONGEST_LINE", 20)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a": "' + 90 * "x" + '"}')
    assert [row["step"] for row in read_metrics(path)] == [1]
    path.write_text(path.read_text() + '\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is not a row"):
        read_metrics(path)


def test_a_killed_process_loses_no_written_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys, json, os, signal; from pathlib import Path; from launcher.watch.metrics import MetricsFile\n"
        f"file = MetricsFile(Path({str(path)!r}))\n"
        "for step in range(1, 51): file.write({'step': step, 'loss': 1 / step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(path)] == list(range(1, 51))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_keeps_rows_waiting_and_says_so_at_a_sync_and_at_the_end(capsys):
    file = MetricsFile(Path("/dev/full"))
    file.write(update(1))
    file.write(update(2))
    with pytest.raises(OSError, match="No space left"):
        file.sync()
    file.close()
    line = "/dev/full: the last 2 rows found no room on a full disk and are lost; free some space there"
    assert capsys.readouterr().err == f"{line}\n"
    file.close()
    assert capsys.readouterr().err == ""


def test_rows_after_a_rewind_reach_the_disk_at_once(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        for step in (1, 2, 3):
            file.write(update(step))
        file.rewind(1)
        file.write(update(2))
        assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def fail_for_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_resuming_copies_nothing_where_nothing_is_dropped(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [update(1), {"step": 1, "event": "checkpoint"}])
    monkeypatch.setattr(metrics, "_copy_rows", fail_for_room)
    before = path.stat().st_ino
    with MetricsFile.resume(path, 1) as file:
        file.write(update(2))
    assert path.stat().st_ino == before
    assert [row["step"] for row in read_metrics(path)] == [1, 1, 2]


@pytest.mark.parametrize("n_whole", [1, 4])
def test_rows_are_dropped_in_place_where_a_copy_finds_no_room(tmp_path, monkeypatch, n_whole):
    """Of six rows the first are in the file, half of the next as well, and the others wait."""
    path = tmp_path / "metrics.jsonl"
    event = {"step": 2, "event": "spike"}
    rows = [
        update(1),
        event,
        update(2),
        {"step": 3, "event": "checkpoint_failed"},
        update(3),
        {"step": 3, "event": "c"},
    ]
    lines = [encode_row(row).encode() + b"\n" for row in rows]
    whole, rest = b"".join(lines[:n_whole]), b"".join(lines[n_whole:])
    path.write_bytes(whole + rest[:7])
    monkeypatch.setattr(metrics, "_copy_rows", fail_for_room)
    with MetricsFile(path) as file:
        file._waiting = rest[7:]
        with monkeypatch.context() as full:
            full.setattr(MetricsFile, "_drain", fail_for_room)
            file.rewind(1)
        file.write(update(2))
    assert read_metrics(path) == [rows[0], event, rows[3], rows[5], update(2)]
    MetricsFile.resume(path, 1).close()
    assert read_metrics(path) == [rows[0]]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
