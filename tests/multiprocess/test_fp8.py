"""Runs whose products have factors of 8 bits: other numbers than in 16, the same after a resume, judged as they train.

What evaluates a checkpoint computes as the run's own evaluation did; they differ by the order of fp64 sums, 1e-9.
"""

import dataclasses
import json

import numpy as np
import pytest

from command_runs import numbers, train, write_config
from launcher.cli import main
from launcher.watch.metrics import read_metrics
from layout_runs import MOE_MODEL, run_config, write_tokens
from parallel.processes.start import run_ranks

UNIT = 16
assert MOE_MODEL.moe is not None
MODEL = dataclasses.replace(  # widths of whole units, as a GPU's products of 8 bits take them
    MOE_MODEL, n_kv_heads=4, d_ff=4 * UNIT, moe=dataclasses.replace(MOE_MODEL.moe, d_ff=2 * UNIT)
)


def run(folder, tokens, name, precision, *overrides, ranks=1, **changes):
    options = {"model": MODEL, "steps": 4, "precision": precision, **changes}
    return train(write_config(folder, tokens, name, **options), ranks, *overrides)


def test_a_run_of_8_bits_goes_on_bit_for_bit_and_is_evaluated_as_it_trains(tmp_path, capsys):
    tokens = write_tokens(tmp_path)
    held_out = [f"data.heldout_path={tokens}", "train.eval_every_steps=4", "train.eval_sequences=6"]
    whole = run(tmp_path, tokens, "whole", "fp8", *held_out)
    run(tmp_path, tokens, "parted", "fp8", *held_out, "train.steps=2")
    parted = run(tmp_path, tokens, "parted", "fp8", *held_out)
    assert numbers(parted) == numbers(whole)
    bf16 = run(tmp_path, tokens, "bf16", "bf16", *held_out)
    distances = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(whole, bf16, strict=True)]
    assert 1e-5 < max(distances) < 2e-2, distances  # 8 bits are used, and nothing else is changed
    rows = read_metrics(tmp_path / "whole/metrics.jsonl")
    (seen,) = [row["eval_loss"] for row in rows if "eval_loss" in row]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "whole"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(seen, rel=1e-9)


KEPT = "train.fp8_keep_weights=true"


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("train.recompute=full", 1),
        ("parallel.tp=2 parallel.ep=2 parallel.tp_overlap=true parallel.ep_overlap=true parallel.ep_chunks=2", 2),
        ("parallel.pp=2 parallel.zero=2", 2),
        ("parallel.zero=2 parallel.offload_optimizer=true", 2),
    ],
    ids=str,
)
def test_weights_that_are_kept_in_8_bits_change_no_number(tmp_path, layout, ranks):
    """Through updates, evaluations and a resume: each weight is cut again when it has changed, and only then."""
    tokens = write_tokens(tmp_path)
    held_out = [f"data.heldout_path={tokens}", "train.eval_every_steps=2", "train.eval_sequences=4"]
    plain = run(tmp_path, tokens, "plain", "fp8", *held_out, *layout.split(), ranks=ranks)
    run(tmp_path, tokens, "kept", "fp8", KEPT, *held_out, *layout.split(), "train.steps=2", ranks=ranks)
    kept = run(tmp_path, tokens, "kept", "fp8", KEPT, *held_out, *layout.split(), ranks=ranks)
    assert numbers(kept) == numbers(plain)
    evaluations = [
        [row["eval_loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "eval_loss" in row]
        for name in ("kept", "plain")
    ]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 2


def losses_of_weights_drawn_again(config):
    """One rank's held-out losses by the weights of two seeds, written one after the other into one engine."""
    import torch

    from launcher.estimate.samples import WholeSequences
    from launcher.training.loop import build_engine
    from launcher.training.step import read_micro_batch
    from parallel.mesh import close_mesh, open_mesh

    mesh = open_mesh(config.parallel, 120)
    engine, losses = build_engine(config, mesh), []
    batch = read_micro_batch(WholeSequences(config), np.arange(2), mesh)
    for seed in (0, 1):
        engine.initialize_weights(seed)
        with torch.no_grad():
            losses += [float(output.loss) for output in engine.evaluate([batch])]
    close_mesh()
    return losses


def test_weights_that_are_written_between_steps_are_cut_again(tmp_path):
    """As a rollback within a run writes a checkpoint's."""
    found = []
    for kept in (False, True):
        options = {"model": MODEL, "precision": "fp8", "fp8_keep_weights": kept}
        found += run_ranks(losses_of_weights_drawn_again, 1, run_config(write_tokens(tmp_path), **options), threads=1)
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_a_replay_may_leave_out_what_a_run_kept(tmp_path, capsys):
    """Where a weight is cut changes no bit, so a replay on less memory is held to the same numbers."""
    run(tmp_path, write_tokens(tmp_path), "kept", "fp8", KEPT)
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "kept"), "--step", "4", "train.fp8_keep_weights=false"]) == 0
    assert "bit for bit" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.tp=2 parallel.ep=2", "parallel.pp=2", "parallel.cp=2 parallel.zero=3"])
def test_a_run_of_8_bits_goes_on_under_another_layout(tmp_path, layout):
    """From one process's checkpoint: losses as near one process's as 8 bits are to 16 (2e-2)."""
    tokens = write_tokens(tmp_path)
    whole = run(tmp_path, tokens, "whole", "fp8")
    run(tmp_path, tokens, "moved", "fp8", "train.steps=2")
    moved = run(tmp_path, tokens, "moved", "fp8", *layout.split(), ranks=2)
    assert [row["step"] for row in moved] == [1, 2, 3, 4] and numbers(moved[:2]) == numbers(whole[:2])
    for ours, theirs in zip(moved, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2)


def test_widths_that_no_gpu_multiplies_in_8_bits_are_refused(tmp_path, capsys):
    tokens = write_tokens(tmp_path)
    odd = dataclasses.replace(MODEL, d_ff=40)
    path = write_config(tmp_path, tokens, "odd", model=odd, precision="fp8")
    assert main(["train", str(path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(
        "train.precision=fp8 needs d_ff=40 (of layers.0.feed_forward.gate.weight) to be a multiple of 16"
    )
    assert not (tmp_path / "odd").exists()
