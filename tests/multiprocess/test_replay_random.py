"""Twenty random steps of a run with crashes, other layouts and batches, a skip and a rollback, executed again.

On the layout that a step had bit for bit, on a random other one within the proof's bounds; all by the real command.
What is expected is read from the run's files here, not by the replay's own reading of them.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_runs import ledger, train, updates, write_config
from eventful_run import LIVES, N_DRAWN, N_STEPS, Draw, draws, life_of, make_run, size_of, write_run
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.tree import HealthConfig
from launcher.prove.rounding import MOST, NOISE_FACTOR
from launcher.replay import plan, record
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens
from object_store import s3_bucket
from parallel.config import ParallelConfig

pytestmark = [pytest.mark.xdist_group("replay_random"), pytest.mark.timeout(900)]  # the run takes minutes to make

BOUND = 1e-6  # the proof's in fp32 of a loss and a norm, relative, for each step since the checkpoint
NOISY = (17,)  # of noise: a unit in the last place of the weights moves its gradients' norm by 4e-5


def test_the_draws_reach_all_of_the_run_and_every_axis(tmp_path):
    drawn = draws(write_run(tmp_path))
    steps = {draw.step for draw in drawn}
    assert len(steps) == N_DRAWN and max(steps) <= N_STEPS and {life_of(step) for step in steps} == set(LIVES)
    assert {17, 25} <= steps, "the skipped batch, and the first one after the rollback"
    overrides = {each for draw in drawn for each in draw.overrides}
    axes = [f"parallel.{name}=2" for name in ("tp", "pp", "cp", "ep")]
    axes += [f"parallel.zero={stage}" for stage in range(4)]
    axes += [f"parallel.pipeline={{name: {name}}}" for name in ("1f1b", "interleaved", "zbv", "dualpipev")]
    assert overrides >= {*axes, "train.micro_batch_size=1", "train.micro_batch_size=3", "train.recompute=full"}
    crossing = [draw for draw in drawn if life_of(draw.begins_at + 1) != life_of(draw.step)]
    assert any(size_of(draw.begins_at + 1) != size_of(draw.step) for draw in crossing), "a batch changes on the way"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("eventful"))


@pytest.fixture(scope="module")
def drawn(run) -> list[Draw]:
    return draws(run.with_suffix(".yaml"))


def replay(run: Path, step: int, tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    """The exit code, and the report."""
    code = main(["replay", str(run), "--step", str(step), "--json", str(tmp_path / "report.json"), *arguments])
    return code, json.loads((tmp_path / "report.json").read_text())


def by_step(rows: list[dict]) -> dict[int, dict]:
    return {row["step"]: row for row in rows}


def check_samples(run: Path, step: int, report: dict) -> None:
    """The documents are those of the samples that ledger.jsonl names, and their losses make the row's."""
    samples = {sample for each in report["documents"] for sample in each["samples"]}
    row = by_step(ledger(run.with_suffix(".yaml")))[step]
    assert samples == set(range(row["first_sample"], row["last_sample"] + 1)) and len(samples) == size_of(step)
    total = sum(each["loss"] * each["tokens"] for each in report["documents"] if each["tokens"])
    assert total / sum(each["tokens"] for each in report["documents"]) == pytest.approx(report["row"]["loss"], rel=1e-6)


@pytest.mark.slow
def test_the_run_has_lived_through_all_of_it(run, tmp_path, capsys):
    rows = read_metrics(run / "metrics.jsonl")
    events = [(row["event"], row["step"]) for row in rows if "event" in row]
    starts = [(row["step"], row["ranks"]) for row in rows if row.get("event") == "start"]
    assert starts == [(0, 2), (6, 2), (12, 2), (18, 2), (30, 4), (33, 4)]
    assert {("restart", 6), ("spike", 17), ("rollback", 24)} <= set(events)
    (rollback,) = [row for row in rows if row.get("event") == "rollback"]
    assert (rollback["at_step"], rollback["samples_left_out"]) == (26, [200, 216])
    found = ledger(run.with_suffix(".yaml"))
    assert [row["last_sample"] + 1 - row["first_sample"] for row in found] == list(map(size_of, range(1, N_STEPS + 1)))
    assert [row["step"] for row in found if not row["trained"]] == [17]
    assert main(["replay", str(run), "--step", "35"]) == 2  # made by a start of which nothing is left
    assert "--step=35 was not reached" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", range(N_DRAWN))
def test_a_drawn_step_comes_out_bit_for_bit_on_its_own_layout(number, run, drawn, tmp_path):
    step = drawn[number].step
    code, report = replay(run, step, tmp_path)
    rows = by_step(updates(run.with_suffix(".yaml")))
    assert code == 0 and report["reproduced"] and report["layout"]["ranks"] == life_of(step).ranks
    assert [each["step"] for each in report["steps"]] == list(range((step - 1) // 3 * 3 + 1, step + 1))
    for each in report["steps"]:
        assert each["exact"] and each["replayed"] == {key: rows[each["step"]][key] for key in each["replayed"]}
    assert (report["event"] or {}).get("action") == ("skip" if step == 17 else None)
    check_samples(run, step, report)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(N_DRAWN))
def test_a_drawn_step_comes_out_within_bounds_on_another_layout(number, run, drawn, tmp_path):
    draw = drawn[number]
    begin = ("--ranks", str(draw.ranks), "--from", str(draw.begins_at))
    code, report = replay(run, draw.step, tmp_path, *draw.overrides, *begin)
    rows = by_step(updates(run.with_suffix(".yaml")))
    assert code == 0 and report["reproduced"] and report["from"] == draw.begins_at
    assert [each["step"] for each in report["steps"]] == list(range(draw.begins_at + 1, draw.step + 1))
    for n_done, each in enumerate(report["steps"], 1):
        recorded, replayed = rows[each["step"]], each["replayed"]
        assert not each["exact"] and (replayed["tokens"], replayed["lr"]) == (recorded["tokens"], recorded["lr"])
        for key in ("loss", "grad_norm"):
            bound = BOUND * n_done
            if each["step"] in NOISY and each["moved"]:  # as far as `prove` lets rounding move one
                bound = max(bound, min(NOISE_FACTOR * each["moved"][key], MOST * bound))
            assert abs(replayed[key] / recorded[key] - 1) <= bound, (each["step"], key)
    check_samples(run, draw.step, report)


def last_config_for_all(monkeypatch) -> None:
    """Each start is taken for the last one."""
    monkeypatch.setattr(plan.ConfigFiles, "of", lambda self, *_: self.own)


def batch_of_the_step_for_all(monkeypatch) -> None:
    """Steps before the one that is looked at have its batch size."""
    on_layout = plan.on_layout

    def changed(recorded: Any, chosen: Any) -> Any:
        sizes = {key: getattr(chosen.train, key) for key in ("global_batch_size", "batch_ramp")}
        config = on_layout(recorded, chosen)
        return dataclasses.replace(config, train=dataclasses.replace(config.train, **sizes))

    monkeypatch.setattr(plan, "on_layout", changed)


def spikes_trained_on(monkeypatch) -> None:
    """A batch that was skipped is trained on."""
    on_layout = plan.on_layout
    monkeypatch.setattr(
        plan, "on_layout", lambda *given: dataclasses.replace(on_layout(*given), health=HealthConfig(on_spike="report"))
    )


def rollback_overlooked(monkeypatch) -> None:
    """What the rollback left out is trained on."""
    monkeypatch.setattr(record, "_range_of", lambda row, path: (0, 0))


FAULTS = {  # what is broken, the step that is replayed, from which checkpoint, and the first step that differs
    last_config_for_all: (2, 0, 1),
    batch_of_the_step_for_all: (13, 9, 10),
    spikes_trained_on: (18, 15, 17),
    rollback_overlooked: (26, 24, 25),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_in_what_a_run_went_through_are_seen(fault, run, tmp_path, monkeypatch):
    step, begins_at, first = FAULTS[fault]
    arguments = ("parallel.tp=2", "parallel.pp=1", "parallel.cp=1", "parallel.ep=1", "parallel.pipeline={name: 1f1b}")
    begin = ("--ranks", "2", "--from", str(begins_at))
    code, report = replay(run, step, tmp_path, *arguments, *begin)
    assert code == 0 and report["reproduced"]
    fault(monkeypatch)
    code, report = replay(run, step, tmp_path, *arguments, *begin)
    assert code == 1 and report["first_difference"]["step"] == first


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Iterator[str]:
    with s3_bucket(tmp_path_factory.mktemp("aws"), "replay") as url:
        yield url


@pytest.mark.slow
def test_a_step_is_replayed_from_checkpoints_on_an_object_store(bucket, tmp_path):
    """The first start's config lies in its checkpoints there alone."""
    path = write_config(tmp_path, write_tokens(tmp_path), "run", parallel=ParallelConfig(ep=2, zero=1))
    config = load_config(path)
    stored = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, dir=f"{bucket}/run"))
    path.write_text(dump_config(stored))
    train(path, 2, "train.steps=4")
    train(path, 2, "train.steps=6", "train.global_batch_size=4", "optimizer.lr=5e-4")
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    for step, n_steps in ((4, 2), (6, 2)):
        code, report = replay(tmp_path / "run", step, tmp_path)
        assert code == 0 and [each["exact"] for each in report["steps"]] == [True] * n_steps
        code, report = replay(tmp_path / "run", step, tmp_path, "parallel.tp=2", "parallel.ep=1")
        assert code == 0 and not any(each["exact"] for each in report["steps"])
    code, report = replay(tmp_path / "run", 6, tmp_path, "--from", "2")
    assert code == 0 and len(report["steps"]) == 4 and all(each["exact"] for each in report["steps"])
