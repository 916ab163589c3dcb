"""A run whose layers recompute within a budget: the same numbers, bit for bit, told at its start, free at a resume."""

import pytest

from command_runs import numbers, train, write_config
from launcher.closed_form.budget import halfway_gib, modes_of, told
from launcher.config.load import load_config
from launcher.watch.metrics import read_metrics
from launcher.watch.progress import event_text
from layout_runs import write_tokens
from parallel.config import ParallelConfig


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(zero=3, ep=2), ParallelConfig(pp=2)], ids=["zero3", "pp"])
def test_a_budget_set_at_a_resume_is_told_and_changes_nothing(tmp_path, parallel):
    tokens = write_tokens(tmp_path)
    whole, parts = (write_config(tmp_path, tokens, name, steps=4, parallel=parallel) for name in ("whole", "parts"))
    uninterrupted = train(whole, 2)
    train(parts, 2, "train.steps=2")
    gib = halfway_gib(load_config(parts, []), 2)
    assert numbers(train(parts, 2, f"train.activation_gib={gib}")) == numbers(uninterrupted)
    modes = modes_of(load_config(parts, [f"train.activation_gib={gib}"]), 2)
    assert len(set(modes)) > 1
    events = [row for row in read_metrics(parts.with_suffix("") / "metrics.jsonl") if "event" in row]
    (event,) = (row for row in events if row["event"] == "recompute")
    assert event_text(event).startswith(f"step 2: recomputation by layer: {told(modes)}, activations of ")
    assert event["layers"] == told(modes) and event["planned_gib"] <= event["budget_gib"] == gib
    assert [row["to"] for row in events if row.get("key") == "train.activation_gib"] == [str(gib)]
