"""`roundtable plot`: what is drawn of several runs, and what is refused."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from launcher.cli import main
from launcher.commands.plot import MOST_POINTS, draw_runs, labels_of, read_curves, short, short_names
from launcher.console import escaped
from launcher.watch.plot import smooth


def row(step: int, moe: bool = True, lacks: tuple[str, ...] = ()) -> dict:
    row = {"step": step, "tokens": 100 * step, "loss": 9.0 - step / 100, "lr": 1e-3 / step}
    row |= {"grad_norm": 1.0 + 1 / step, "tokens_per_second": 1000.0 + step}
    if moe:
        for layer, load in ((0, 1.5), (1, 1.25 + step / 1000)):
            row |= {f"moe/layer_{layer:02d}/load": [0.5, 0.5], f"moe/layer_{layer:02d}/load_max": load}
    return {key: value for key, value in row.items() if key not in lacks}


def write_run(path: Path, rows: list[dict], tail: str = "") -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path / "metrics.jsonl"


def panels(figure: Figure) -> dict[str, list[np.ndarray]]:
    """What was drawn: title -> [x, y] of each line, the faint ones first among a run's."""
    drawn = {}
    for axes in figure.axes:
        if axes.get_visible():
            drawn[axes.get_title(loc="left").split(" (")[0]] = [np.array(line.get_data()) for line in axes.lines]
    return drawn


def test_the_lines_are_the_runs_numbers(tmp_path):
    rows = [row(step) for step in range(1, 201)]
    moe = read_curves(write_run(tmp_path / "moe", [*rows, {"step": 200, "eval_loss": 7.5}]), "moe")
    dense = read_curves(write_run(tmp_path / "dense", [row(step, moe=False) for step in range(1, 21)]), "dense")
    drawn = panels(draw_runs([moe, dense], "steps"))
    loss = np.array([row["loss"] for row in rows])
    assert list(drawn) == [
        "training loss",
        "held-out loss",
        "gradient norm",
        "learning rate",
        "tokens per second",
        "busiest expert's load",
    ]
    faint, strong, short_run = drawn["training loss"]
    np.testing.assert_array_equal(faint, [np.arange(1, 201), loss])
    np.testing.assert_array_equal(strong[1], smooth(loss, 4, steady_end=True))
    assert short_run.shape == (2, 20)
    np.testing.assert_array_equal(drawn["held-out loss"], [[[200], [7.5]]])
    np.testing.assert_array_equal(drawn["learning rate"][0][1], [row["lr"] for row in rows])
    faint, _ = drawn["busiest expert's load"]  # the dense run has none
    np.testing.assert_allclose(faint[1], [max(1.5, 1.25 + step / 1000) for step in range(1, 201)])
    assert labels_of([moe, dense])[0] == f"moe: step 200, loss {np.mean(loss[-3:]):.3f}, held out 7.500"


def test_the_busiest_load_needs_no_shares(tmp_path):
    rows = [row(step, lacks=("moe/layer_00/load", "moe/layer_01/load")) for step in range(1, 10)]
    curves = read_curves(write_run(tmp_path / "many", rows), "many")
    np.testing.assert_array_equal(curves.updates["load"], [1.5] * 9)


@pytest.mark.parametrize("largest", [20.0, 2e6])
def test_numbers_of_a_logarithmic_axis_do_not_lie_on_each_other(tmp_path, largest):
    rows = [row(step) | {"grad_norm": largest if step == 3 else 0.5} for step in range(1, 9)]
    figure = draw_runs([read_curves(write_run(tmp_path / "run", rows), "run")], "steps")
    figure.draw_without_rendering()
    (axes,) = [axes for axes in figure.axes if axes.get_title(loc="left") == "gradient norm"]
    boxes = [label.get_window_extent() for label in axes.get_yticklabels(which="both") if label.get_text()]
    inside = sorted(box.y0 for box in boxes if axes.bbox.y0 <= (box.y0 + box.y1) / 2 <= axes.bbox.y1)
    assert len(inside) > 3
    assert min(np.diff(inside)) > boxes[0].height


def test_tokens_can_be_the_axis_of_everything(tmp_path):
    rows = [row(1), row(2), {"step": 2, "eval_loss": 8.0}, row(3, lacks=("tokens",))]
    drawn = panels(draw_runs([read_curves(write_run(tmp_path / "a", rows), "a")], "tokens"))
    np.testing.assert_array_equal(drawn["training loss"][0], [[100, 200, math.nan], [8.99, 8.98, 8.97]])
    np.testing.assert_array_equal(drawn["held-out loss"][0], [[200], [8.0]])


def test_a_batch_that_grows_has_a_panel(tmp_path):
    rows = [row(step, moe=False) | {"batch_size": 4 * step} for step in range(1, 9)]
    drawn = panels(draw_runs([read_curves(write_run(tmp_path / "run", rows), "run")], "steps"))
    np.testing.assert_array_equal(drawn["batch size"], [[np.arange(1, 9), 4 * np.arange(1, 9)]])


@pytest.mark.parametrize(
    "rows",
    [
        [row(1)],
        [row(1, moe=False, lacks=("lr", "grad_norm", "tokens_per_second"))],
        [row(1), {"step": 2, "loss": "NaN"}, row(3)],
        [row(1), {"step": 1, "event": "start"}, row(2, moe=False), row(3, lacks=("grad_norm",))],
    ],
)
def test_any_rows_make_a_picture(tmp_path, monkeypatch, capsys, rows):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "_$x^{", rows, tail='{"step": 9, "lo')
    assert main(["plot", "_$x^{"]) == 0
    assert capsys.readouterr() == ("runs/_$x^{/plot.png\n", "")
    assert (tmp_path / "runs/_$x^{/plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_run_is_drawn_in_few_points_of_the_same_shape(tmp_path):
    rows = [row(step, moe=False) for step in range(1, 10 * MOST_POINTS + 1)]
    drawn = panels(draw_runs([read_curves(write_run(tmp_path / "a", rows), "a")], "steps"))
    for line in drawn["training loss"]:
        assert line.shape == (2, MOST_POINTS)
        at, loss = line[:, : -MOST_POINTS // 50]  # the end of the smoothed line lags
        np.testing.assert_allclose(loss, 9.0 - at / 100, atol=0.1)


@pytest.mark.parametrize(("ending", "magic"), [("SVG", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_chooses_the_format(tmp_path, monkeypatch, capsys, ending, magic):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / name, [row(1), row(2)])
    assert main(["plot", "a", "b", "--out", f"x.{ending}"]) == 0
    assert (tmp_path / f"x.{ending}").read_bytes().startswith(magic)


def test_a_notebook_s_own_backend_draws_nothing(tmp_path):
    """Jupyter has the processes that it starts inherit MPLBACKEND, whose module lies in the notebook's environment."""
    write_run(tmp_path / "a", [row(1), row(2)])
    environment = os.environ | {"MPLBACKEND": "of_a_notebook"}
    command = [sys.executable, "-m", "launcher", "plot", "a", "--out", "x.png"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x.png\n", "")


AWAY = "; move it away, or choose another name or run_dir"
ELSEWHERE = "; choose another place"
REFUSED = [
    (["none"], "RUN=none must be a run directory, or a run's name below runs; see `roundtable runs`"),
    (["a\0b"], "RUN=a\\x00b must be a run directory, or a run's name below runs; see `roundtable runs`"),
    (["empty"], "RUN=empty has no metrics.jsonl yet; name a run that has trained at least one step"),
    (["pipe"], "pipe/metrics.jsonl must be a file, and is a named pipe" + AWAY),
    (["dangling"], "runs/dangling/metrics.jsonl must be a file, and is a link to what does not exist" + AWAY),
    (["started"], "started/metrics.jsonl holds no update yet; plot the run after its first step"),
    (["good", "--x", "time"], "--x=time must be steps or tokens; leave it out for steps"),
    (["good", "--out", "x.jpg"], "--out=x.jpg must end in .png, .svg or .pdf; try plot.png"),
    (["good", "--out", "no/x.png"], "--out=no/x.png must lie in a folder that is there, and no is not" + ELSEWHERE),
    (["good", "--out", "dir.png"], "--out=dir.png must be a file that can be written to, and is not" + ELSEWHERE),
    (["nan"], "RUN=nan has no finite number to draw; see the events in its metrics.jsonl"),
]


@pytest.mark.parametrize(("arguments", "line"), REFUSED, ids=["_".join(case[0]) for case in REFUSED])
def test_what_cannot_be_drawn_is_one_line(tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "good", [row(1)])
    write_run(tmp_path / "started", [{"step": 0, "event": "start"}])
    write_run(tmp_path / "nan", [{"step": 1, "loss": "NaN", "grad_norm": None, "lr": "Infinity"}])
    for folder in ("empty", "dir.png", "pipe", "runs/dangling"):
        (tmp_path / folder).mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe/metrics.jsonl")
    (tmp_path / "runs/dangling/metrics.jsonl").symlink_to("gone")
    before = sorted(tmp_path.rglob("*"))
    assert main(["plot", *arguments]) == 2
    assert capsys.readouterr() == ("", line + "\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_whose_name_is_no_text_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"l\xe4uf")  # Latin-1
    write_run(tmp_path / name, [row(1)])
    assert main(["plot", name]) == 0
    assert capsys.readouterr() == (f"{escaped(name)}/plot.png\n", "")
    assert labels_of([read_curves(tmp_path / name / "metrics.jsonl", name)])[0].startswith("l\\udce4uf: step 1, ")


def test_names_are_as_long_as_they_must_be():
    paths = [Path(path) / "metrics.jsonl" for path in ("/x/a/run", "/x/b/run", "/x/b/other")]
    assert short_names(paths) == ["a/run", "b/run", "b/other"]
    assert short_names(paths[1:]) == ["run", "other"]
    assert short_names([paths[0], paths[0]]) == ["run", "run"]


def test_numbers_on_axes_are_short():
    assert [short(value) for value in (0, 3e-4, 12.5, 20_000, 1.2e9)] == ["0", "0.0003", "12.5", "20k", "1.2B"]
