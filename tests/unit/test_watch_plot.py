"""The picture of a run: written for dense and MoE runs, with the numbers in the right places."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from launcher.errors import UserError
from launcher.watch.metrics import MetricsFile
from launcher.watch.plot import average_columns, draw, plot_run, smooth


def rows(n_steps: int, n_layers: int, n_experts: int = 4) -> list[dict]:
    result = []
    for step in range(1, n_steps + 1):
        row = {"step": step, "tokens": 100 * step, "loss": 9 - step / n_steps, "lr": 1e-3 / step}
        shares = [(1 + (expert == step % n_experts)) / (n_experts + 1) for expert in range(n_experts)]
        row |= {f"moe/layer_{layer:02d}/load": shares for layer in range(n_layers)}
        result.append(row)
    return result


@pytest.mark.parametrize(("n_steps", "n_layers"), [(120, 3), (5, 0), (1, 1)])
def test_a_picture_is_written(tmp_path: Path, n_steps: int, n_layers: int) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        for row in rows(n_steps, n_layers):
            file.write(row)
        file.write({"step": n_steps, "eval_loss": 8.0})
    plot_run(str(tmp_path), str(tmp_path / "run.png"))
    pixels = imread(tmp_path / "run.png")
    assert pixels.shape[1] == 1500
    assert pixels[..., :3].std() > 0.05


def test_the_panels_show_the_rows() -> None:
    updates = rows(20, 5)
    figure = draw("run", updates, [{"step": 10, "eval_loss": 8.25}])
    loss_axes, rate_axes = figure.axes[:2]
    assert list(loss_axes.lines[0].get_ydata()) == [row["loss"] for row in updates]
    assert list(loss_axes.lines[-1].get_ydata()) == [8.25]
    assert list(rate_axes.lines[0].get_ydata()) == [row["lr"] for row in updates]
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert len(maps) == 5
    expected_EN = 4 * np.array([row["moe/layer_00/load"] for row in updates]).T
    np.testing.assert_allclose(maps[0], expected_EN)


def test_the_maps_show_the_rows_that_have_shares() -> None:
    """Of many experts only some rows tell; the last one need not."""
    updates = rows(20, 2)
    lacking = [{key: row[key] for key in row if "load" not in key or row["step"] % 5 == 0} for row in updates]
    maps = [axes.images[0].get_array() for axes in draw("run", [*lacking, {"step": 21, "loss": 8.0}], []).axes[2:4]]
    expected_EN = 4 * np.array([row["moe/layer_00/load"] for row in updates if row["step"] % 5 == 0]).T
    np.testing.assert_allclose(maps[0], expected_EN)
    assert len(draw("run", [lacking[0]], []).axes) == 2


def test_a_batch_that_grows_is_drawn_beside_the_learning_rate() -> None:
    updates = [row | {"batch_size": 4 + row["step"] // 3} for row in rows(9, 0)]
    *_, size_axes = draw("run", updates, []).axes
    assert list(size_axes.lines[0].get_ydata()) == [row["batch_size"] for row in updates]


def test_a_dense_run_has_no_expert_panels() -> None:
    assert len(draw("run", rows(5, 0), []).axes) == 2


def test_a_loss_that_is_not_finite_leaves_a_gap() -> None:
    updates = rows(200, 1)
    updates[50]["loss"] = math.nan
    draw("run", updates, []).canvas.draw()
    assert np.isfinite(smooth(np.array([1.0, math.nan, 3.0, 4.0, 5.0]), 3)[2:]).all()


def test_updates_that_lack_numbers_are_drawn_without_them() -> None:
    draw("run", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], []).canvas.draw()


def test_averaging_and_smoothing() -> None:
    values_NE = np.arange(12.0).reshape(6, 2)
    np.testing.assert_allclose(average_columns(values_NE, 3), [[1, 2], [5, 6], [9, 10]])
    np.testing.assert_allclose(average_columns(values_NE, 100), values_NE)
    straight_N = np.linspace(5.0, 1.0, 50)
    np.testing.assert_allclose(smooth(straight_N, 9), straight_N)  # a straight line stays what it is, to its ends


@pytest.mark.parametrize("content", [None, "", '{"step": 0, "event": "started"}\n'])
def test_a_run_without_an_update_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        plot_run(tmp_path, tmp_path / "run.png")
    assert not (tmp_path / "run.png").exists()
