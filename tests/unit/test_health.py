"""What counts as a bad step, and what is decided about it."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.config import DataConfig, SourceConfig
from data.dataset import open_dataset
from data.tokenwriter import TokenFileWriter
from launcher.config.tree import HealthConfig
from launcher.training.health import Health, examine, robust_z, stop_line
from launcher.training.worst import Held, add_up, held_sums, largest
from launcher.watch.metrics import MetricsFile, read_metrics
from launcher.watch.progress import TRACE_POINTS, RunProgress, event_text

LOSSES = [4.0, 4.1, 3.9, 4.05, 3.95]


def test_robust_z_is_in_deviations_above_the_median():
    noise = np.random.default_rng(0).normal(5.0, 0.2, size=10_000)
    assert robust_z(5.0 + 3 * 0.2, noise.tolist()) == pytest.approx(3, abs=0.15)
    assert robust_z(4.4, noise.tolist()) == pytest.approx(-3, abs=0.15)


def test_a_spike_among_the_losses_hides_no_second_one():
    assert robust_z(9.0, [*LOSSES, 9.0]) > 20


def test_losses_that_hardly_differ_make_no_spike_of_a_small_rise():
    assert robust_z(4.01, [4.0] * 50) < 3
    assert robust_z(5.0, [4.0] * 50) > 100


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_not_finite_is_no_spike(loss):
    health = Health(HealthConfig(spike_window=5, on_nonfinite="stop"))
    for pair in ((loss, 1.0), (4.0, loss)):
        problem = health.judge(*pair, LOSSES)
        assert problem is not None and (problem.kind, problem.action) == ("nonfinite", "stop")


def test_a_spike_is_judged_once_the_window_is_full():
    health = Health(HealthConfig(spike_window=5, spike_z=8.0, on_spike="skip"))
    assert health.judge(9.0, 1.0, LOSSES[:4]) is None
    problem = health.judge(9.0, 1.0, LOSSES)
    assert problem is not None and (problem.kind, problem.action) == ("spike", "skip")
    assert problem.z is not None and problem.z > 8
    assert health.judge(3.0, 1.0, LOSSES) is None


def test_a_run_that_goes_on_with_a_shorter_window_is_judged_by_that_alone():
    health = Health(HealthConfig(spike_window=5, spike_z=8.0))
    assert health.judge(9.1, 1.0, [*LOSSES, *[each + 5.0 for each in LOSSES]]) is None
    assert health.judge(9.1, 1.0, [*[each + 5.0 for each in LOSSES], *LOSSES]) is not None


def actions(health: Health, losses: list[float]) -> list[str | None]:
    found = [health.judge(loss, 1.0, LOSSES) for loss in losses]
    return [problem.action if problem else None for problem in found]


def test_skips_are_counted_in_a_row():
    health = Health(HealthConfig(max_skips=2))
    bad = math.nan
    assert actions(health, [bad, bad, 4.0, bad, bad, bad]) == ["skip", "skip", None, "skip", "skip", "stop"]


def test_the_update_of_a_reported_spike_ends_a_row_of_skips():
    health = Health(HealthConfig(spike_window=5, max_skips=2, on_spike="report"))
    bad, high = math.nan, 9.0
    expected = ["skip", "report", "skip", "report", "report", "skip", "skip", "stop"]
    assert actions(health, [bad, high, bad, high, high, bad, bad, bad]) == expected


def test_a_step_that_is_left_to_the_loss_scaler_neither_counts_nor_ends_a_row_of_skips():
    health = Health(HealthConfig(max_skips=1))
    overflown: Any = SimpleNamespace(measure=lambda: math.inf, can_lower_loss_scale=True)
    nothing: Any = None
    assert actions(health, [math.nan]) == ["skip"]
    for _ in range(3):
        assert examine(health, overflown, nothing, nothing, nothing, 4.0) is None
    assert actions(health, [math.nan]) == ["stop"]


def test_an_action_that_nothing_takes_is_an_error():
    with pytest.raises(AssertionError, match="clip"):
        Health(HealthConfig(on_nonfinite="clip")).judge(math.nan, 1.0, [])  # type: ignore[arg-type]


def test_rollbacks_are_counted_from_the_start():
    health = Health(HealthConfig(on_nonfinite="rollback", max_rollbacks=2))
    assert actions(health, [math.nan, 4.0, math.nan, 4.0, math.nan]) == ["rollback", None, "rollback", None, "stop"]


def test_the_line_of_a_stop_speaks_of_no_checkpoint_that_may_not_be():
    event = {"step": 2, "event": "nonfinite", "batch_loss": math.nan, "grad_norm": math.nan}
    line = stop_line({**event, "tensor": "head.weight", "place": "rank 0"})
    assert line.endswith("head.weight on rank 0; the step is not saved, and metrics.jsonl names its documents")


def held_of(*parts: tuple[list[float], float]) -> Held:
    """What one rank holds of a weight: parts of its gradient, each with the rank's share of it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    engine: Any = SimpleNamespace(
        model=SimpleNamespace(named_parameters=lambda: [("w", weight)]),
        gradients=lambda: [(weight, torch.tensor(part), share) for part, share in parts],
        gradient_scale=1.0,
        fragments=[],
    )
    return held_sums(engine)["w"]


@pytest.mark.parametrize("n_replicas", [1, 2, 3, 7])
def test_elements_that_are_not_finite_count_once_whoever_holds_them(n_replicas):
    one, bad = 1 / n_replicas, [math.nan, 1.0, math.inf, -math.inf, math.nan]
    replicas = [held_of((bad, one)) for _ in range(n_replicas)]
    assert add_up(replicas).n_nonfinite == 4
    copies = [held_of((bad, 0.0)) for _ in range(n_replicas)]  # on ranks of tp that do not count
    assert add_up(replicas + copies).n_nonfinite == 4
    assert add_up([held_of((bad, 1.0), ([math.nan], 1.0)) for _ in range(n_replicas)]).n_nonfinite == 5 * n_replicas


def test_an_element_that_only_a_copy_sees_is_told():
    """A copy that does not count, or one of several that have a share each."""
    sound, bad = [1.0, 2.0], [math.nan, 2.0]
    assert add_up([held_of((sound, 1.0)), held_of((bad, 0.0))]).n_nonfinite == 1
    assert add_up([held_of((sound, 0.25))] * 3 + [held_of((bad, 0.25))]).n_nonfinite == 1
    assert add_up([held_of((sound, 1.0)), held_of((sound, 0.0))]).n_nonfinite == 0


def test_a_bias_near_zero_is_not_the_worst_tensor_for_that():
    """Two matrices of 64 x 64 with weights of 0.02, and a bias of 64 after one small update."""
    sizes = {"first": 64 * 64, "second": 64 * 64, "bias": 64}
    weights = {"first": 4096 * 0.02**2, "second": 4096 * 0.02**2, "bias": 64 * 1e-6**2}
    gradients = {"first": 0.1, "second": 0.1, "bias": 0.003}  # squared: the bias's elements have 1.4 times theirs
    held = {name: Held(gradients[name], weights[name], 0) for name in sizes}
    held["second"].gradient *= 1e4
    assert largest(held, sizes) == "second"
    held["bias"].gradient *= 1e5
    assert largest(held, sizes) == "bias"
    assert largest({name: Held(gradients[name], 0.0, 0) for name in sizes}, sizes) == "first"


def test_documents_of_a_sample_are_those_its_input_tokens_lie_in(tmp_path):
    random = np.random.default_rng(1)
    writer = TokenFileWriter(tmp_path / "tokens", np.dtype(np.uint16))
    lengths = random.integers(1, 30, size=40)
    for length in lengths:
        writer.add(random.integers(1, 90, size=length))
    writer.finish()
    sources = (SourceConfig(path=str(tmp_path / "tokens")),)
    dataset = open_dataset(DataConfig(seq_len=16, sources=sources), seed=3, vocab_size=96, split="train")
    document_of = np.repeat(np.arange(40), lengths)
    tokens = np.fromfile(tmp_path / "tokens.bin", np.uint16)
    starts = np.arange(0, len(tokens) - 1, 16)
    samples = np.arange(dataset.n_samples)
    batch = dataset.read(samples)
    for row, found in enumerate(dataset.documents(samples)):
        (start,) = [
            at for at in starts if np.array_equal(tokens[at : at + 16], batch.tokens_BS[row][: len(tokens) - at])
        ]
        stop = min(start + 16, len(tokens) - 1)
        expected = {"first": document_of[start], "last": document_of[stop - 1], "file": str(tmp_path / "tokens")}
        assert found == expected


def test_a_file_goes_back_but_keeps_its_events(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (1, 2, 3):
            file.write({"step": step, "loss": 1.0})
            file.write({"step": step, "event": "seen"})
        file.rewind(1)
        file.write({"step": 2, "loss": 2.0})
    rows = [(row["step"], row.get("loss")) for row in read_metrics(path)]
    assert rows == [(1, 1.0), (1, None), (2, None), (3, None), (2, 2.0)]


@pytest.mark.parametrize("n", [5, 3 * TRACE_POINTS])
def test_the_view_goes_back(tmp_path, n):
    progress = RunProgress(4 * n, 1, "run", tmp_path)
    for step in range(1, n + 1):
        progress.observe({"step": step, "loss": float(step)})
    progress.rewind(n - 2)
    assert progress.step == n - 2 and progress.seconds_left() is None
    assert progress.losses.means[-1] <= n - 2
    progress.observe({"step": n - 1, "loss": 0.0})
    assert progress.step == n - 1


def test_a_view_shows_no_lists():
    assert event_text({"step": 3, "event": "spike", "z": 9.5, "documents": [{"file": "a"}]}) == "step 3: spike  z=9.5"
