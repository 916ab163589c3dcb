"""What a plan draws, and what it says of money: the picture of a step, energy, cost, and wrong options."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from launcher.cli import main
from launcher.estimate.order import Passes, simulate
from launcher.plan.costs import costs_line, run_costs
from launcher.plan.report import bars_of
from launcher.plan.timeline import COLORS, draw_timeline, save_timeline
from launcher.trace.hardware import FOLDER, known_hardware, read_hardware
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB

PLAN = {"name": "small", "gpus": 8, "gpu": "H100", "micro_batches": 8, "bubble_share": 0.1}
CONFIG = "configs/quickstart.yaml"


def step_of(pipeline, pp: int = 4):
    """A plan's JSON as far as the picture reads it, and its bars."""
    order = simulate(pipeline, [Passes(0.1, 0.2, hop=0.01)] * pp, 8)
    rows = bars_of(order, [0.05] * pp)
    return PLAN | {"step_seconds": max(order.ends) + 0.05, "bubble_share": order.bubble}, rows


@pytest.mark.parametrize(
    ("pipeline", "pp"), [(OneFOneB(), 1), (OneFOneB(), 4), (Interleaved(), 4), (ZBV(), 4), (DualPipeV(), 4)]
)
def test_the_picture_has_every_pass_at_its_place(tmp_path, pipeline, pp):
    plan, rows = step_of(pipeline, pp)
    figure = draw_timeline(plan, rows)
    (axes,) = figure.axes
    shapes = [path.get_extents() for each in axes.collections for path in each.get_paths()]
    wanted = sorted((begin, end, place) for place, row in enumerate(rows) for *_, begin, end in row)
    drawn = sorted((shape.x0, shape.x1, round((shape.y0 + shape.y1) / 2)) for shape in shapes)
    scale = 1.0 if plan["step_seconds"] >= 1 else 1e3
    assert drawn == pytest.approx([(begin * scale, end * scale, place) for begin, end, place in wanted])
    assert max(end for *_, end in (bar for row in rows for bar in row)) == pytest.approx(plan["step_seconds"])
    target = tmp_path / "step.svg"
    save_timeline(plan, rows, target)
    text = target.read_text()
    ElementTree.fromstring(text)
    kinds = {bar[0] for row in rows for bar in row}
    assert all((COLORS[kind] in text.lower()) == (kind in kinds) for kind in COLORS)


def test_planted_a_pass_that_is_left_out_is_seen(tmp_path):
    plan, rows = step_of(OneFOneB())
    complete = sum(len(each.get_paths()) for each in draw_timeline(plan, rows).axes[0].collections)
    rows[2].pop(3)
    assert sum(len(each.get_paths()) for each in draw_timeline(plan, rows).axes[0].collections) == complete - 1


def test_hours_energy_and_cost_follow_from_the_speed():
    found = run_costs(tokens=36_000_000, tokens_per_second=10_000, n_gpus=8, watts=700, price=2.5)
    assert found == {
        "hours": 1.0, "gpu_hours": 8.0, "watts_per_gpu": 700, "energy_kwh": 5.6, "price_per_gpu_hour": 2.5, "cost": 20.0
    }  # fmt: skip
    line = costs_line(found, 36_000_000)
    assert line == "36,000,000 tokens: 1.00 hours, 8.0 GPU-hours, 5.6 kWh at the boards' 700 W, 20.00 at 2.5 a GPU-hour, without restarts"  # fmt: skip # noqa: E501
    unknown = run_costs(36_000_000, 10_000, 8, None, None)
    assert unknown["energy_kwh"] is None and unknown["cost"] is None and "kWh" not in costs_line(unknown, 1)


@pytest.mark.parametrize("name", known_hardware())
def test_each_gpus_board_power_is_in_its_file_with_a_source(name):
    assert 100 < (read_hardware(name).watts or 0) < 3000
    text = (FOLDER / f"{name}.yaml").read_text()
    assert "watts:" in text and "datasheet" in text


def test_a_search_says_what_each_layout_costs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert (
        main(["plan", CONFIG, "--search", "--gpus", "2", "--traces", "0", "--price-per-gpu-hour", "3", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    for each in found["layouts"]:
        speed = each["tokens_per_second_per_gpu"] * 2
        assert each["hours"] == pytest.approx(found["tokens"] / speed / 3600)
        assert each["cost"] == pytest.approx(3 * each["gpu_hours"]) == pytest.approx(6 * each["hours"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([CONFIG, "--price-per-gpu-hour", "-1"], "--price-per-gpu-hour=-1 must be a number of at least 0"),
        ([CONFIG, "--price-per-gpu-hour", "nan"], "--price-per-gpu-hour=nan must be a number of at least 0"),
        ([CONFIG, "--search", "--price-per-gpu-hour", "inf"], "--price-per-gpu-hour=inf must be a number"),
        ([CONFIG, "--timeline", "step.txt"], "--timeline=step.txt must end in .png, .svg or .pdf; try step.svg"),
        ([CONFIG, "--timeline", "none/step.svg"], "--timeline=none/step.svg must lie in a folder that is there"),
        ([CONFIG, "--search", "--timeline", "step.svg"], "--timeline=step.svg draws the step of one layout"),
        ([CONFIG, "slurm.gpu=H9"], "slurm.gpu=H9 must be one of A100-40GB"),
    ],
)
def test_wrong_options_are_told_in_a_line(capsys, arguments, line):
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(line) and said.err.count("\n") == 1 and not said.out
