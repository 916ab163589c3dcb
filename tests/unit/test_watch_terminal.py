"""The terminal's two views: plain lines without escape codes, and a live frame that gives the terminal back."""

import io
import math
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from launcher.watch import terminal
from launcher.watch.drawing import ASCII_BARS, BARS, duration, load_bars, sparkline, split_evenly
from launcher.watch.event_words import WORDS
from launcher.watch.progress import TRACE_POINTS, RunProgress, Trace, event_text
from launcher.watch.terminal import LiveView, PlainView, open_view, render

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def update(step: int, n_layers: int = 2, n_experts: int = 8) -> dict:
    row = {"step": step, "tokens": step, "loss": 9.0 / step, "lr": 1e-3, "grad_norm": 2.0, "mfu": None}
    row |= {"tokens_per_second": 12345.6, "peak_gib": 1.25, "step_seconds": 0.1}
    for layer in range(n_layers):
        load = [(2.0 if expert == layer else 1.0) / (n_experts + 1) for expert in range(n_experts)]
        prefix = f"moe/layer_{layer:02d}"
        row |= {f"{prefix}/load": load, f"{prefix}/load_max": max(load) * n_experts}
        row |= {f"{prefix}/load_min": min(load) * n_experts}
    return row


def without_shares(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.endswith("/load")}


def frame(progress: RunProgress, width: int, height: int = 24, bars: str = BARS) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(render(progress, width, height, bars))
    return capture.get().splitlines()


def test_outside_a_terminal_lines_are_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with open_view(100, 1, "quickstart", Path("runs/quickstart")) as view:
        for step in range(1, 101):
            view.update(update(step))
        view.update({"step": 100, "eval_loss": 5.25})
        view.update({"step": 100, "event": "checkpoint", "path": "checkpoints/step-00000100"})
        view.event("W&B: offline")
    lines = capsys.readouterr().out.splitlines()
    assert not any("\x1b" in line for line in lines)
    steps = [line.split()[1] for line in lines if "  loss " in line]
    assert steps == ["1/100", *(f"{step}/100" for step in range(5, 101, 5))]
    assert lines[0] == "quickstart: steps 1 to 100 in runs/quickstart"
    assert "loss 0.0900  lr 1.00e-03  grad norm 2.00  tokens/s 12,346  peak GiB 1.25" in lines[-4]
    expected = ["step 100: eval_loss 5.2500", "step 100: checkpoint saved to checkpoints/step-00000100", "W&B: offline"]
    assert lines[-3:] == expected


@pytest.mark.parametrize("event", WORDS)
def test_words_for_an_event_tell_each_of_its_values(event: str) -> None:
    values = {key: f"<{key}>" for key in WORDS[event][1]}
    told = event_text({"step": 7, "event": event, **values, "other{}": "{x}", "documents": [1]})
    assert told.startswith(f"step 7: {WORDS[event][0]} ") and told.endswith("other{}={x}") and "documents=" not in told
    assert all(told.count(value) == 1 for value in values.values()) and "\n" not in told
    assert event_text({"step": 7, "event": event}) == f"step 7: {WORDS[event][0].rstrip(':')}"


def test_an_event_without_words_keeps_its_names() -> None:
    row = {"step": 7, "event": "straggler", "rank": 3, "ratio": 1.23456}
    assert event_text(row) == "step 7: straggler  rank=3  ratio=1.235"


def test_a_slow_run_prints_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    view = PlainView(RunProgress(100_000, 1, "long", Path("runs/long")), stream)
    for step in range(1, 31):
        now[0] = 4.0 * step
        view.update(update(step) | {"step_seconds": 4.0})
    steps = [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()[1:]]
    assert steps == [1, 4, 7, 10, 13, 16, 19, 22, 25, 28]
    assert "left 4d 15:" in stream.getvalue()


@pytest.mark.parametrize(
    ("every_steps", "shown"), [(1, list(range(3, 31))), (10, [3, 10, 20, 30]), (7, [3, 7, 14, 21, 28, 30])]
)
def test_plain_lines_come_as_often_as_asked(
    monkeypatch: pytest.MonkeyPatch, every_steps: int, shown: list[int]
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    view = PlainView(RunProgress(30, 3, "run", Path("runs/run"), every_steps), stream)
    for step in range(3, 31):
        now[0] = 60.0 * step
        view.update(update(step))
    view.update({"step": 30, "eval_loss": 5.25})
    lines = stream.getvalue().splitlines()[1:]
    assert [int(line.split()[1].split("/")[0]) for line in lines[:-1]] == shown
    assert all(f"loss {9 / step:.4f}" in line for step, line in zip(shown, lines, strict=False))
    assert lines[-1] == "step 30: eval_loss 5.2500"


def test_the_live_view_shows_the_numbers_as_often_as_asked() -> None:
    progress = RunProgress(100, 1, "run", Path("runs/run"), 20)
    for step in range(1, 56):
        progress.observe(update(step))
    text = "\n".join(frame(progress, 80))
    assert "step 55/100" in text
    assert f"step 40  loss {9 / 40:.4f}" in text
    assert len(progress.losses.means) == 55


def test_a_reader_that_goes_away_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", io.StringIO())  # whose descriptor would be sent to nowhere: pytest's own
    view = PlainView(RunProgress(10, 1, "run", Path("runs/run")), Gone())
    view.update(update(1))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(("n_layers", "n_experts"), [(0, 8), (4, 8), (61, 256)])
def test_the_frame_fits_the_terminal(width: int, n_layers: int, n_experts: int) -> None:
    progress = RunProgress(200, 1, "quickstart", Path("runs/quickstart"))
    assert len(frame(progress, width)) <= 24
    for step in range(1, 101):
        progress.observe(update(step, n_layers, n_experts))
    for row in (
        {"step": 100, "eval_loss": 5.25},
        {"step": 100, "event": "checkpoint"},
        {"step": 9, "event": "x" * 200},
    ):
        progress.observe(row)
    lines = frame(progress, width)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "step 100/200" in text
    assert "50%" in text
    assert "loss 0.0900" in text
    assert "eval loss 5.2500 at step 100    checkpoint at step 100" in text
    assert ("least balanced of 61" in text) == (n_layers == 61)
    assert frame(progress, width, bars=ASCII_BARS)[3].isascii()


@pytest.mark.parametrize("width", [15, 20, 49])
def test_a_narrow_terminal_shows_the_step_and_wraps_nothing(width: int) -> None:
    progress = RunProgress(200, 1, "quickstart", Path("runs/quickstart"))
    for step in range(1, 101):
        progress.observe(update(step, n_layers=61))
    progress.observe({"step": 100, "eval_loss": 5.25})
    lines = frame(progress, width)
    assert lines[1].startswith("100/200  50%")
    assert max(map(len, lines)) <= width
    assert sum("least" in line or "balanced" in line or "layers" in line for line in lines) <= 1
    assert len(lines) <= 24


def test_a_layer_shows_its_experts_load() -> None:
    progress = RunProgress(2, 1, "run", Path("runs/run"))
    progress.observe(update(1, n_layers=1, n_experts=4))
    (line,) = [line for line in frame(progress, 80) if line.startswith("layer 0")]
    assert line.rstrip() == "layer 0   ▇ ▄ ▄ ▄   load 0.80 to 1.60"


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_live_view_gives_the_cursor_back(error: type[BaseException] | None) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    stdout = sys.stdout
    try:
        with LiveView(RunProgress(10, 1, "run", Path("runs/run")), console) as view:
            view.update(update(1))
            view.event("hello")
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.rindex(SHOW_CURSOR) > written.rindex(HIDE_CURSOR)
    assert "hello" in written
    assert sys.stdout is stdout
    view.close()
    assert console.file.getvalue() == written  # type: ignore[attr-defined]


@pytest.mark.parametrize("live", [False, True])
def test_what_is_told_after_the_end_goes_to_stderr(live: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """W&B's upload may fail after the view has ended."""
    stream, progress = io.StringIO(), RunProgress(10, 1, "run", Path("runs/run"))
    view = LiveView(progress, Console(file=stream, force_terminal=True)) if live else PlainView(progress, stream)
    view.event("before")
    view.close()
    view.event("after")
    assert "before" in stream.getvalue()
    assert "after" not in stream.getvalue()
    assert capsys.readouterr().err == "after\n"


def test_ctrl_c_on_a_real_terminal_gives_the_cursor_back() -> None:
    program = (
        "import signal, time; from pathlib import Path; from launcher.watch.terminal import open_view\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs inherit it ignored
        "view = open_view(10, 1, 'run', Path('runs/run'))\n"  # not closed on purpose: the exit hook must do it
        "view.update({'step': 1, 'loss': 2.5}); time.sleep(30)"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=slave, stdout=slave, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(slave)
    written = b""
    try:
        while b"2.5000" not in written:
            written += os.read(master, 4096)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=10)
        written += os.read(master, 65536)
    finally:
        process.kill()
        os.close(master)
    text = written.decode()
    assert text.rindex(SHOW_CURSOR) > text.rindex(HIDE_CURSOR)


def test_the_pace_gives_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = RunProgress(50, 11, "run", Path("runs/run"))
    assert progress.seconds_left() is None
    for step in (11, 12):
        now[0] += 3.0
        progress.observe(update(step) | {"step_seconds": 3.0})
    assert progress.seconds_left() == 38 * 3.0


def test_the_time_left_does_not_count_what_comes_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = RunProgress(3000, 1, "run", Path("runs/run"))
    now[0] = 60.0
    progress.observe({"step": 1, "loss": 1.0, "step_seconds": 0.5})
    assert progress.seconds_left() == 2999 * 0.5
    progress.rewind(0)
    assert progress.seconds_left() is None
    now[0] = 90.0
    progress.observe({"step": 1, "loss": 1.0, "step_seconds": 0.25})
    assert progress.seconds_left() == 2999 * 0.25


def test_a_run_that_goes_back_shows_no_evaluation_of_later_steps() -> None:
    progress = RunProgress(100, 1, "run", Path("runs/run"))
    for step in range(1, 13):
        progress.observe(update(step))
    progress.observe({"step": 10, "event": "checkpoint"})
    progress.observe({"step": 12, "eval_loss": 5.25})
    progress.rewind(12)
    assert any("eval loss 5.2500 at step 12" in line for line in frame(progress, 80))
    progress.rewind(10)
    assert not any("eval loss" in line for line in frame(progress, 80))
    assert any("checkpoint at step 10" in line for line in frame(progress, 80))


def test_a_trace_of_any_length_keeps_its_shape_in_few_points() -> None:
    trace = Trace()
    for value in range(100_000):
        trace.add(float(value))
    assert TRACE_POINTS / 2 <= len(trace.means) < TRACE_POINTS
    assert trace.first == 0.0
    assert trace.means == sorted(trace.means)
    assert trace.means[-1] == pytest.approx(100_000, rel=0.01)


def test_drawing() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == BARS
    assert sparkline([1, 1, 8, 8], 2) == "▁█"
    assert sparkline([1.0, math.nan, 2.0], 3) == "▁x█"
    assert sparkline([math.nan], 3) == "x"
    assert sparkline([2.0, 2.0], 3) == "▁▁"
    assert load_bars([0.25] * 4, 8) == [1.0] * 4
    assert load_bars([0.5, 0.125, 0.0, 0.375], 2) == [2.0, 0.0]
    assert [len(part) for part in split_evenly(range(10), 3)] == [3, 3, 4]
    assert [duration(seconds) for seconds in (0.4, 42, 723, 11220, 187200)] == [
        "0:00",
        "0:42",
        "12:03",
        "3:07:00",
        "2d 4:00:00",
    ]


def test_rows_of_many_experts_show_the_latest_shares_and_their_step() -> None:
    progress = RunProgress(1000, 1, "many", Path("runs/many"))
    progress.observe(without_shares(update(1)))
    assert not any("layer" in line for line in frame(progress, 80))
    progress.observe(update(2))
    assert not any("as at step" in line for line in frame(progress, 80))
    for step in (3, 4):
        progress.observe(without_shares(update(step)))
    lines = frame(progress, 80)
    assert sum(line.startswith("layer ") for line in lines) == 2
    assert "the experts as at step 2" in [line.strip() for line in lines]
    crowded = RunProgress(1000, 1, "many", Path("runs/many"))
    for row in (update(1, n_layers=30), without_shares(update(2, n_layers=30))):
        crowded.observe(row)
    lines = frame(crowded, 80, height=20)
    assert len(lines) <= 20
    assert "the 11 least balanced of 30 MoE layers, the experts as at step 1" in [line.strip() for line in lines]


@pytest.mark.parametrize(("seconds", "told"), [(0.0004, False), (0.025, True)])
def test_a_wait_for_data_is_told_where_it_counts(seconds: float, told: bool) -> None:
    progress = RunProgress(10, 1, "run", Path("runs/run"))
    progress.observe(update(3) | {"loader_wait_seconds": seconds})
    assert ("waited for data 25%" in terminal.update_line(progress)) is told
    assert any("waited for data 25%" in line for line in frame(progress, 120)) is told
