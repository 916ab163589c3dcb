"""`plan --search --traces N`: traces of the best layouts decide their order and whether they fit."""

import json
from types import SimpleNamespace

import pytest

from launcher.cli import main
from launcher.closed_form.gpus import capacity, gpu_of
from launcher.config.load import load_config
from launcher.estimate import forecast as forecast_module
from launcher.estimate.order import Passes
from launcher.plan import decide as decide_module
from launcher.plan.decide import Verdict, decide, in_order, verdict_json
from launcher.plan.search import overrides_of, search
from launcher.trace.hardware import read_hardware

CONFIG = """\
name: small
model: {n_layers: 2, d_model: 64, n_heads: 2, n_kv_heads: 2, d_ff: 128, vocab_size: 512}
data: {seq_len: 64, sources: [{path: none.txt}]}
train: {global_batch_size: 4}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def plan_of(seconds, peak=1e9):
    keys = ("tokens_per_second", "mfu", "hours", "gpu_hours", "energy_kwh")
    plan = {"step_seconds": seconds, "peak_bytes": peak, "parts": {"optimizer": seconds}, "cost": None}
    return Verdict({**dict.fromkeys(keys, 1.0), **plan})


@pytest.mark.slow
def test_a_real_trace_is_told_beside_the_closed_form(path, capsys):
    assert main(["plan", str(path), "--search", "--gpus", "2", "--traces", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["layouts"]
    (of_trace,) = (row for row in rows if row["trace"] is not None)
    assert of_trace["trace"]["fits"] and of_trace["trace"]["step_seconds"] > 0 and of_trace["not_traced"] is None
    assert of_trace["trace"]["peak_gb"] > 0 and of_trace["step_seconds"] > 0
    assert {row["not_traced"] for row in rows} == {None, "not among the first"}


def test_planted_disagreement_the_traces_win(path, tmp_path, capsys, monkeypatch):
    """The closed forms' first is by its trace the slowest, and their second does not fit: the third is written."""
    found = search(load_config(path, []), 2, gpu_of("H100", 8, ""), 2)
    before = [overrides_of(each.config, found.given) for each in found.best]
    verdicts = [plan_of(3.0), plan_of(1.0, peak=1e12), plan_of(2.0)]
    monkeypatch.setattr(decide_module, "traced", lambda *arguments: verdicts)
    out = tmp_path / "best.yaml"
    assert main(["plan", str(path), "--search", "--gpus", "2", "--traces", "3", "--write", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    after = [row["overrides"] for row in told["layouts"]]
    assert after == [before[2], before[0], *before[3:], before[1]]
    written = load_config(out, [])
    assert overrides_of(written, written) == before[2]
    assert told["why"].startswith("by their traces the first takes 1.000 s less")
    assert told["layouts"][-1]["trace"]["fits"] is False
    assert main(["plan", str(path), "--search", "--gpus", "2", "--traces", "3"]) == 0
    words = capsys.readouterr().out
    assert "by traces of 3 of the best" in words and "too much" in words and "the first, by its trace" in words


def test_what_is_not_traced_keeps_its_place():
    best = list("abcd")
    verdicts = [plan_of(2.0), Verdict(reason="late"), plan_of(1.0), Verdict(reason="not among the first")]
    order, found = in_order(best, verdicts)  # type: ignore[arg-type]
    assert order == ["c", "b", "a", "d"] and [each.reason for each in found] == ["", "late", "", "not among the first"]


def test_without_time_the_closed_forms_stay_and_say_why(path):
    config, part = load_config(path, []), gpu_of("H100", 8, "")
    found = search(config, 2, part, 2)
    before = list(found.best)
    verdicts = decide(found, path, [], "H100", part, 2, n_traces=2, seconds=0.0)
    assert found.best == before
    assert verdict_json(verdicts[0]) == {"trace": None, "not_traced": "no time was left of 50 s"}
    assert capacity(part) > 0


def test_a_trace_that_takes_too_long_is_ended(path):
    config, part = load_config(path, []), gpu_of("H100", 8, "")
    found = search(config, 2, part, 2)
    (verdict, *_) = decide(found, path, [], "H100", part, 2, n_traces=1, seconds=0.2)
    assert verdict.plan is None and verdict.reason.startswith("its trace was not done after ")


def test_closed_forms_alone(path, capsys):
    assert main(["plan", str(path), "--search", "--gpus", "2", "--traces", "0", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["layouts"]
    assert {row["not_traced"] for row in rows} == {"--traces=0"}


MOE = "model.moe={n_experts: 4, top_k: 2, d_ff: 64, n_dense_layers: 4}"


@pytest.mark.parametrize(
    ("changes", "traced"),
    [
        (["parallel.pipeline.layers=[2,2,2,3,2,1]"], [0, 1, 1, 3, 1, 5]),
        (["parallel.pipeline.layers=[2,2,2,2,2,2]", MOE], [0, 1, 2, 2, 2, 5]),
        (["parallel.pipeline.name=zbv"], [0, 5, 5, 5, 5, 5]),  # the head is the first's
    ],
)
def test_the_fullest_of_like_positions_is_traced_for_them(path, changes, traced, monkeypatch):
    """By hand; of a plan that is asked for each position is traced."""
    config = load_config(path, ["model.n_layers=12", "parallel.pp=6", "train.global_batch_size=16", *changes])
    ranks, estimate = [], SimpleNamespace(n_micro_batches=16)
    monkeypatch.setattr(forecast_module, "measure_memory", lambda config, n_gpus, rank, *rest: ranks.append(rank))
    monkeypatch.setattr(forecast_module, "estimate_position", lambda *arguments: estimate)
    monkeypatch.setattr(forecast_module, "passes_of", lambda estimate: Passes(1.0, 2.0))
    monkeypatch.setattr(forecast_module, "update_seconds", lambda estimate: 0.0)
    found = forecast_module.forecast(config, 6, read_hardware("H100"), sampled=True)
    assert [each.rank for each in found.positions] == traced and ranks == sorted(set(traced))
    whole = forecast_module.forecast(config, 6, read_hardware("H100"))
    assert [each.rank for each in whole.positions] == list(range(6))


@pytest.mark.slow
def test_what_cannot_be_traced_keeps_its_closed_form(path, capsys):
    experts = ("model.family=mixtral", "model.moe={n_experts: 4, top_k: 2, d_ff: 64}", "train.precision=fp16")
    assert main(["plan", str(path), "--search", "--gpus", "2", "--traces", "1", *experts]) == 0
    told = capsys.readouterr().out
    why = "train.precision=fp16 with model.moe cannot be traced"
    assert f"layout 1 is planned by closed forms only, without a trace: {why}" in told
