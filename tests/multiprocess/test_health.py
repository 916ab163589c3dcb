"""Steps that went wrong, under several layouts: what is done about them, by the real loop on gloo processes.

A run is compared with one in which the same samples were left out from the start: bit for bit (one layout, CPU).
"""

import dataclasses
import math
import subprocess
from pathlib import Path

import pytest

from command_runs import BIAS_MODEL, ENVIRONMENT, command, same_events_in_wandb, write_config
from data.dataset import open_dataset
from health_runs import Plan, run_planned
from launcher.config.load import load_config
from launcher.config.tree import HealthConfig
from launcher.errors import UserError
from launcher.training.health import UNHEALTHY
from launcher.training.samples import out_of_data_line, why_out_of_data
from launcher.training.start import check_tokens, start_training
from launcher.watch.metrics import read_metrics
from layout_runs import MOE_MODEL, VOCAB_SIZE, write_tokens
from modeling.logical import logical_shapes
from modeling.optimizers.config import SGDConfig
from parallel.checkpoint.local import LocalStore
from parallel.config import ParallelConfig

NORM = "final_norm.weight"  # whole on every rank of tp


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def run(
    folder: Path, tokens: str, name: str, plan: Plan, *, health=None, wandb="disabled", **changes
) -> tuple[list, list[dict]]:
    """What the ranks returned, and metrics.jsonl."""
    path = write_config(folder, tokens, name, **{"model": BIAS_MODEL, **changes})
    config = dataclasses.replace(load_config(path, [f"metrics.wandb.mode={wandb}"]), health=health or HealthConfig())
    returned = run_planned(plan, config)
    return returned, read_metrics(folder / name / "metrics.jsonl")


def updates(rows: list[dict]) -> list[dict]:
    return [row for row in rows if "loss" in row]


def numbers(rows: list[dict]) -> list[tuple]:
    return [(row["loss"], row["grad_norm"]) for row in rows]


def events(rows: list[dict], name: str) -> list[dict]:
    return [row for row in rows if row.get("event") == name]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


LAYOUTS = [
    slow(0, "fp32", {}),
    slow(1, "bf16", {}),
    slow(1, "fp32", {}),
    (2, "fp32", {}),
    slow(3, "bf16", {}),
    slow(2, "bf16", {"tp": 2}),
    slow(1, "bf16", {"ep": 2}),
    slow(2, "fp32", {"pp": 2}),
    slow(1, "bf16", {"pp": 2}),
]


@pytest.mark.parametrize(("zero", "precision", "axes"), LAYOUTS)
def test_a_skipped_batch_leaves_no_trace(tmp_path, tokens, zero, precision, axes):
    """Sample 19, in step 3, makes the gradients of whoever reads it NaN."""
    setting = {"parallel": ParallelConfig(zero=zero, **axes), "precision": precision}
    codes, rows = run(tmp_path, tokens, "skips", Plan(poisoned=19), steps=6, **setting)
    _, expected = run(tmp_path, tokens, "reference", Plan(skipped=(16, 24)), steps=5, **setting)
    assert codes == [0, 0]
    trained = [row for row in updates(rows) if not row.get("skipped")]
    assert [row["step"] for row in trained] == [1, 2, 4, 5, 6]
    assert numbers(trained) == numbers(updates(expected))
    (event,) = events(rows, "nonfinite")
    assert (event["step"], event["action"], event["first_sample"], event["last_sample"]) == (3, "skip", 16, 23)
    (skipped,) = (row for row in updates(rows) if row.get("skipped"))
    assert event["n_nonfinite_tensors"] > 1
    assert event["tensor"].startswith(f"layers.{BIAS_MODEL.n_layers - 1}.")  # the one nearest to the loss
    assert not math.isfinite(event["grad_norm"]) and not math.isfinite(skipped["grad_norm"])
    assert event["n_nonfinite"] == math.prod(logical_shapes(BIAS_MODEL)[event["tensor"]])  # all, each once
    ledger = read_metrics(tmp_path / "skips" / "ledger.jsonl")
    assert [row["trained"] for row in ledger] == [True, True, False, True, True, True]


@pytest.mark.parametrize(
    ("tensor", "axes", "rank", "place"),
    [
        slow(NORM, {"tp": 2}, 1, "rank 1 (tp 1)"),
        ("layers.1.feed_forward.experts.down", {"ep": 2}, 1, "rank 1 (dp 1, ep 1)"),
    ],
)
def test_a_nan_that_one_rank_alone_holds_is_seen_by_all(tmp_path, tokens, tensor, axes, rank, place):
    plan = Plan(tensor=tensor, rank=rank, step=2)
    codes, rows = run(tmp_path, tokens, "seen", plan, steps=3, parallel=ParallelConfig(**axes))
    (event,) = events(rows, "nonfinite")
    assert codes == [0, 0]
    assert (event["step"], event["tensor"], event["place"]) == (2, tensor, place)
    assert (event["n_nonfinite"], event["n_nonfinite_tensors"]) == (1, 1)
    assert all(math.isfinite(row["loss"]) for row in updates(rows))


def test_planted_norm_that_overlooks_uncounted_copies_lets_a_nan_through(tmp_path, tokens):
    plan = Plan(tensor=NORM, rank=1, step=2, blind=True)
    _, rows = run(tmp_path, tokens, "blind", plan, steps=3, parallel=ParallelConfig(tp=2))
    assert [event["step"] for event in events(rows, "nonfinite")] == [3]  # a step late: the weights are spoiled
    assert not math.isfinite(updates(rows)[2]["loss"])


@pytest.mark.parametrize("axes", [{"pp": 2, "zero": 1}, slow({"zero": 2}), slow({"tp": 2, "zero": 3})])
def test_rolled_back_run_goes_on_without_those_batches(tmp_path, tokens, axes):
    """Sample 45, in step 6, makes the loss large; the checkpoint before is step 4's, so steps 5 and 6 are left out."""
    health = HealthConfig(on_spike="rollback", spike_window=4, spike_z=20.0)
    setting = {"parallel": ParallelConfig(**axes), "model": MOE_MODEL, "steps": 8, "health": health}
    setting |= {"optimizer": SGDConfig(lr=0.5, momentum=0.9, clip_norm=0.5)}
    codes, rows = run(tmp_path, tokens, "back", Plan(spiked=45), wandb="offline", **setting)
    _, expected = run(tmp_path, tokens, "reference", Plan(skipped=(32, 48)), **setting)
    assert codes == [0, 0]
    assert [row["step"] for row in updates(rows)] == list(range(1, 9))
    assert numbers(updates(rows)) == numbers(updates(expected))
    (event,) = events(rows, "rollback")
    assert (event["step"], event["at_step"], event["cause"], event["samples_left_out"]) == (4, 6, "spike", [32, 48])
    assert event["z"] > 20 and len(event["documents"]) == 8
    assert same_events_in_wandb(tmp_path / "back") >= {"start", "rollback", "checkpoint"}
    ours, theirs = (read_metrics(tmp_path / name / "ledger.jsonl") for name in ("back", "reference"))
    assert ours == theirs
    assert ours[4]["hopped"] == [[32, 48]]


def test_a_rollback_to_step_0_begins_with_the_first_loss_scale(tmp_path, tokens):
    """Steps 1 and 2 overflow, so the scale is a quarter when sample 33, in step 5, makes the loss large."""
    path = write_config(tmp_path, tokens, "back", model=MOE_MODEL, precision="fp16", steps=8)
    config = load_config(path, ["checkpoint.every_steps=8"])
    config = dataclasses.replace(config, health=HealthConfig(on_spike="rollback", spike_window=2, spike_z=20.0))
    assert run_planned(Plan(poisoned=3, tensor=NORM, step=2, spiked=33), config, 1) == [0]
    reference = dataclasses.replace(config, run_dir=str(tmp_path / "reference"))
    assert run_planned(Plan(skipped=(0, 40)), reference, 1) == [0]
    rows, expected = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("back", "reference"))
    assert [event["samples_left_out"] for event in events(rows, "rollback")] == [[0, 40]]
    assert [row["loss_scale"] for row in updates(rows)] == [row["loss_scale"] for row in updates(expected)]
    assert numbers(updates(rows)) == numbers(updates(expected))


def test_an_overflow_at_the_smallest_loss_scale_is_a_problem(tmp_path, tokens):
    """fp16: above it, the scaler answers; at it, health does."""
    setting = {"precision": "fp16", "steps": 4}
    _, rows = run(tmp_path, tokens, "scaled", Plan(poisoned=10, loss_scale=2.0), **setting)
    assert [row["skipped"] for row in updates(rows)] == [False, True, False, False]
    assert [row["loss_scale"] for row in updates(rows)] == [2.0, 2.0, 1.0, 1.0]
    assert events(rows, "nonfinite") == []
    _, rows = run(tmp_path, tokens, "smallest", Plan(poisoned=10, loss_scale=1.0), **setting)
    assert [row["skipped"] for row in updates(rows)] == [False, True, False, False]
    assert [event["step"] for event in events(rows, "nonfinite")] == [2]


def short_of_data(tmp_path, tokens):
    """A config with 64 samples, 8 steps' worth; a rollback in step 6 leaves two steps' out, so step 6 is the last."""
    health = HealthConfig(on_spike="rollback", spike_window=4, spike_z=20.0)
    path = write_config(
        tmp_path, tokens, "short", model=MOE_MODEL, steps=8, optimizer=SGDConfig(lr=0.5, momentum=0.9, clip_norm=0.5)
    )
    config = dataclasses.replace(load_config(path), health=health)
    dataset = open_dataset(config.data, seed=0, vocab_size=VOCAB_SIZE, split="train")
    sources = (dataclasses.replace(config.data.sources[0], max_epochs=64.5 / dataset.n_samples),)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=sources))
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every_steps=4))


def test_a_run_whose_last_step_with_data_cannot_be_saved_says_so(tmp_path, tokens):
    plan = Plan(spiked=45, unsaved=6, told=str(tmp_path / "told"))
    assert run_planned(plan, short_of_data(tmp_path, tokens), 1) == [2]
    assert LocalStore(tmp_path / "short/checkpoints").names() == ["step-00000004"]
    why = "rank 0: OSError: [Errno 28] No space left on device"
    line = f"step 7; step 6 could not be saved ({why}): mend that, and start the run again"
    assert (tmp_path / "told").read_text().endswith(line)


def test_a_run_whose_rollback_left_it_too_few_data_is_saved_and_ends(tmp_path, tokens):
    """The next start is refused."""
    config = short_of_data(tmp_path, tokens)
    assert run_planned(Plan(spiked=45, told=str(tmp_path / "told")), config) == [2, 2]
    line = (tmp_path / "told").read_text()
    assert line.endswith("too few are left for step 7; step 6 is saved: lower train.steps to 6")
    dataset = open_dataset(config.data, seed=0, vocab_size=VOCAB_SIZE, split="train")
    line = why_out_of_data(dataset.stages, config.train, 6, 64, [(32, 48)])
    assert line is not None and line.startswith(
        "data.sources.max_epochs leaves 64 sequences in all, 16 were left out after rollbacks, and "
    )
    assert line.endswith("too few are left for step 7")
    unsaved = out_of_data_line(line, 6, "No space left on device")
    assert unsaved.endswith("; step 6 could not be saved (No space left on device): mend that, and start the run again")
    assert LocalStore(tmp_path / "short/checkpoints").names() == ["step-00000004", "step-00000006"]
    with pytest.raises(UserError, match=r"come to 64 in step 6, and train.steps=8 takes 16 more; lower train.steps"):
        check_tokens(config)


HOPELESS = {"optimizer": SGDConfig(lr=1e30, clip_norm=None)}  # the first update spoils the weights


@pytest.mark.parametrize("policy", ["skip", slow("rollback")])
def test_a_remedy_that_does_not_help_ends(tmp_path, tokens, policy):
    config = write_config(tmp_path, tokens, "hopeless", **HOPELESS)
    limits = ["health.max_skips=2", "health.max_rollbacks=2", "checkpoint.every_steps=null"]
    assert start_training(config, [f"health.on_nonfinite={policy}", *limits], 2) == UNHEALTHY
    rows = read_metrics(tmp_path / "hopeless" / "metrics.jsonl")
    assert [row["action"] for row in rows if "action" in row] == [policy, policy, "stop"]
    assert rows[-1]["limit"] == f"health.max_{policy}s"
    assert not list((tmp_path / "hopeless" / "checkpoints").iterdir())


def test_a_save_under_way_is_finished_where_health_stops_the_run(tmp_path, tokens):
    plan = Plan(poisoned=18, slow_save=True)
    returned, rows = run(tmp_path, tokens, "saving", plan, health=HealthConfig(on_nonfinite="stop"))
    assert returned == [UNHEALTHY, UNHEALTHY]
    assert [row["step"] for row in events(rows, "nonfinite")] == [3]
    assert [row["step"] for row in events(rows, "checkpoint")] == [2]
    assert LocalStore(tmp_path / "saving/checkpoints").names() == ["step-00000002"]


@pytest.mark.slow
def test_a_stopped_run_says_why_in_one_line(tmp_path, tokens):
    config = write_config(tmp_path, tokens, "hopeless", **HOPELESS)
    overrides = ["health.on_nonfinite=stop", "checkpoint.every_steps=null", "metrics.wandb.mode=offline"]
    ended = subprocess.run(command(config, 2, *overrides), env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == UNHEALTHY
    assert line.startswith("stopped at step 2 by health.on_nonfinite: ")
    (event,) = events(read_metrics(tmp_path / "hopeless" / "metrics.jsonl"), "nonfinite")
    assert event["action"] == "stop" and event["tensor"] in line and event["place"] in line
    assert same_events_in_wandb(tmp_path / "hopeless") == {"start", "plan", "nonfinite"}
    assert not list((tmp_path / "hopeless" / "checkpoints").iterdir())


@pytest.mark.parametrize("work", ["save", slow("evaluation")])
def test_a_request_to_one_rank_during_long_work_stops_all_after_it(tmp_path, tokens, work):
    path = write_config(tmp_path, tokens, "asked", parallel=ParallelConfig(pp=2))
    overrides = ["train.eval_every_steps=2", f"data.heldout_path={tokens}"]
    config = load_config(path, overrides)
    assert run_planned(Plan(stops_during=work, rank=1), config) == [75, 75]
    rows = read_metrics(tmp_path / "asked" / "metrics.jsonl")
    assert [row["step"] for row in updates(rows)] == [1, 2]
    assert [(row["step"], row["signal"]) for row in events(rows, "stopped")] == [(2, "SIGUSR1")]
    assert [path.name for path in (tmp_path / "asked" / "checkpoints").iterdir()] == ["step-00000002"]
