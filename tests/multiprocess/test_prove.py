"""`roundtable prove` on real processes: sound layouts are proven, and every planted fault is caught and named.

Bounds: launcher/prove/checks.py states each with its reason.
"""

import functools
import json
import os
from pathlib import Path

import pytest

from any_family import any_family
from launcher.cli import main
from launcher.prove.report import to_json, verdict
from near_ties import twin_experts
from prove_faults_listed import DIES, FAULTS
from prove_runs import failures, prove, prove_fault, told_about, write_config
from rotating import some_fast
from starved import starved

SOUND = [
    ("parallel.zero=0",),
    ("parallel.zero=1", "train.precision=bf16"),
    ("parallel.zero=2", "train.precision=fp16", "model.moe.balance={name: bias}"),
    ("parallel.zero=3", "train.precision=bf16", "train.recompute=full", "model.tie_embeddings=false"),
    ("parallel.zero=3", "optimizer={name: sgd}", "optimizer.clip_norm=null", "train.precision=fp16"),
    ("parallel.zero=2", "model.family=llama", "model.moe=null", "model.qk_norm=false"),
    (
        "model.family=mixtral",
        "model.qk_norm=false",
        "model.sliding_window=512",
        "model.moe={n_experts: 8, top_k: 1, n_dense_layers: 0, n_shared_experts: 0, score: softmax, routed_scale: 1.0}",
    ),
]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(overrides, marks=[pytest.mark.slow] if number != 6 else [])
        for number, overrides in enumerate(SOUND)
    ],
    ids=lambda overrides: " ".join(overrides)[:60],
)
def test_sound_layout_is_proven(tmp_path, overrides):
    outcome = prove(tmp_path, overrides)
    assert outcome.proven, failures(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.tp=2", "parallel.ep=4", "model.z_loss=1e-4"),
        ("parallel.ep=2", "parallel.ep_chunks=3", "parallel.pp=2", "parallel.pipeline.name=zbv"),
        ("parallel.cp=2", "parallel.ep=2", "parallel.cp_attention=ring", "parallel.zero=3"),
        ("parallel.pp=2", "parallel.ep=2", "parallel.zero=2", "train.precision=bf16", "model.z_loss=1e-4"),
        ("parallel.pp=2", "parallel.ep=2", "parallel.zero=3", "train.activation_gib=64"),
        ("parallel.tp=2", "parallel.cp=2", "parallel.zero=3", "train.activation_gib=64"),
    ],
    ids=str,
)
def test_sound_axes_are_proven(tmp_path, overrides):
    outcome = prove(tmp_path, overrides, ranks=4)
    assert outcome.proven, failures(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("parallel.tp=2", "parallel.ep=2", "parallel.zero=2"), 2),
        (("parallel.cp=2", "parallel.cp_attention=ring", "parallel.zero=3"), 2),
        (("parallel.zero=3", "train.recompute=full", "parallel.ep=2"), 4),
        (("parallel.pp=2", "parallel.pipeline.name=zbv", "parallel.ep=2"), 4),
        (("parallel.pp=2", "parallel.tp=2", "model.mtp.depth=1"), 4),
        (("train.fp8_keep_weights=true", "parallel.ep=2", "parallel.ep_chunks=2", "parallel.tp=2"), 4),
        (("train.fp8_keep_weights=true", "parallel.pp=2", "parallel.zero=2", "train.recompute=full"), 2),
        (("train.recompute=selective", "optimizer={name: muon}"), 2),
    ],
    ids=str,
)
def test_products_of_8_bits_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, ("train.precision=fp8", *overrides), ranks=ranks)
    assert outcome.proven, failures(outcome)


LATENT = (
    *("model.family=deepseek_v3", "model.qk_norm=false", "model.n_kv_heads=8", "model.mla.kv_lora_rank=128"),
    *("model.moe.n_groups=4", "model.moe.top_k_groups=2", "model.moe.balance={name: bias}"),
)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("parallel.tp=2", "parallel.pp=2", "parallel.ep=2"), 4),
        pytest.param(
            ("parallel.cp=2", "parallel.cp_attention=ulysses", "model.mla.q_lora_rank=null"), 2, marks=pytest.mark.slow
        ),
        pytest.param(("parallel.cp=2", "parallel.cp_attention=ring", "parallel.zero=3"), 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_latent_attention_and_groups_of_experts_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, (*LATENT, *overrides), ranks)
    assert outcome.proven, failures(outcome)


ALTERNATING = (
    *("model.family=qwen3_moe", "model.tie_embeddings=false", "model.moe.n_shared_experts=0"),
    *("model.moe.score=softmax", "model.moe.routed_scale=1.0", "model.moe.n_dense_layers=0"),
    *("model.moe.every_n_layers=2", "model.moe.dense_layers=[5]"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("parallel.tp=2", "parallel.pp=2", "parallel.ep=2"), 8),
        (("parallel.cp=2", "parallel.cp_attention=ring", "parallel.zero=3", "train.recompute=full"), 4),
        (("parallel.cp=2", "parallel.tp=2", "parallel.ep=2"), 4),
        (("parallel.pp=2", "parallel.pipeline={name: zbv}", "train.precision=bf16"), 4),
    ],
    ids=str,
)
def test_layers_with_experts_and_without_in_turn_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, (*ALTERNATING, *overrides), ranks)
    assert outcome.proven, failures(outcome)


def test_experts_in_no_layer_are_proven(tmp_path):
    """Every layer is told to be dense, so there is no balance loss to compare, and nobody routes."""
    outcome = prove(tmp_path, ("model.moe.n_dense_layers=8", "parallel.ep=2"), 2)
    assert outcome.proven and not any("balance" in check.name for check in outcome.checks), failures(outcome)


TERMS = ("model.positions=alibi", "model.sinks=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("parallel.tp=2", "parallel.cp=2"), 4),
        (("parallel.cp=2", "parallel.tp=2", "parallel.cp_attention=ring"), 4),
        (("parallel.tp=2", "parallel.pp=2"), 8),
        (("parallel.zero=3", "train.precision=bf16", "train.recompute=full"), 2),
    ],
    ids=str,
)
def test_slopes_and_sinks_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, (*TERMS, *overrides), ranks, on_both_sides=(any_family,))
    assert outcome.proven, failures(outcome)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("model.attention_gate=elementwise", "parallel.tp=2", "parallel.tp_overlap=true"), 2),
        pytest.param(
            ("model.attention_gate=headwise", "parallel.cp=2", "parallel.tp=2", "train.recompute=selective"),
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("model.attention_gate=headwise", "parallel.tp=2", "parallel.pp=2", "optimizer={name: muon}"),
            4,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("model.attention_gate=elementwise", "parallel.zero=3", "train.precision=bf16", "train.recompute=full"),
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param((*LATENT, "model.attention_gate=elementwise", "parallel.tp=2"), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gates_of_attention_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, overrides, ranks, on_both_sides=(any_family,))
    assert outcome.proven, failures(outcome)


DISTANCES = ("model.positions=t5", "model.score_cap=0.5", "model.logit_cap=0.5", "model.z_loss=1e-4")


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        pytest.param(("parallel.tp=2", "parallel.cp=2", "parallel.cp_attention=ring"), 4, marks=pytest.mark.slow),
        pytest.param(("parallel.cp=2", "parallel.tp=2"), 4, marks=pytest.mark.slow),
        pytest.param(("parallel.tp=2", "parallel.pp=2"), 8, marks=pytest.mark.slow),
        pytest.param(("parallel.zero=3", "train.precision=bf16", "train.recompute=full"), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_biases_of_distances_and_caps_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, (*DISTANCES, *overrides), ranks, on_both_sides=(any_family,))
    assert outcome.proven, failures(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("model.positions=sinusoidal", "parallel.tp=2", "parallel.pp=2"), 4),
        (("model.nope_layers=[1,3,5]", "parallel.cp=2"), 4),
        (("model.positions=none", "parallel.zero=3", "train.recompute=full"), 2),
    ],
    ids=str,
)
def test_models_of_no_family_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, ("model.family=none", *overrides), ranks)
    assert outcome.proven, failures(outcome)


MUP = ("model.init={name: mup, base_d_model: 128}", "model.tie_embeddings=false")
DROPOUT = ("model.embedding_dropout=0.1", "model.residual_dropout=0.2", "model.attention_dropout=0.1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("parallel.tp=2", "parallel.pp=2", "parallel.ep=2", *MUP), 8),
        (("parallel.cp=2", "parallel.zero=3", *MUP), 2),
        (("parallel.cp=2", "parallel.cp_attention=ring", "model.init.base_expert_d_ff=256", *MUP), 2),
        (("parallel.tp=2", "parallel.zero=3", "train.recompute=full", "train.precision=bf16", *MUP), 4),
        (("parallel.pp=2", "parallel.pipeline.name=zbv", "parallel.zero=2", *MUP), 2),
        (("parallel.tp=2", "optimizer={name: muon}", *MUP), 4),
        (("parallel.tp=2", "optimizer={name: sgd, weight_decay: 0.1}", *MUP), 2),
        (("parallel.pp=2", "model.family=none", "model.logit_divisor=4", MUP[0]), 2),  # tied
        (("parallel.tp=2", "model.init={name: xavier}"), 2),
        (("parallel.ep=2", "parallel.zero=3", "model.init={name: he}"), 2),
    ],
    ids=str,
)
def test_ways_to_draw_weights_and_to_scale_rates_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, overrides, ranks)
    assert outcome.proven, failures(outcome)


FURTHER = ("model.family=none", "model.mtp.depth=2", "model.moe.balance={name: bias}")
ONE, UNTIED = "model.mtp.depth=1", "model.tie_embeddings=false"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("parallel.tp=2", "parallel.cp=2", "parallel.cp_attention=ring"), 4),
        (("parallel.cp=2", "parallel.tp=2", "train.recompute=full"), 4),
        (("parallel.tp=2", "parallel.pp=2", "parallel.ep=2", "train.recompute=selective"), 8),
        (("parallel.pp=2", "parallel.pipeline.name=zbv", "train.recompute=full"), 4),
        (("parallel.pp=2", "parallel.pipeline.name=interleaved", "train.precision=bf16"), 2),
        (("parallel.zero=3", "train.precision=bf16", "train.recompute=full"), 2),
        (("model.positions=alibi", "model.sinks=true", "parallel.cp=2", "parallel.cp_attention=ring"), 2),
        (("model.positions=t5", "model.score_cap=0.5", "parallel.tp=2"), 2),
    ],
    ids=str,
)
def test_dropout_is_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, (*DROPOUT, *overrides), ranks, on_both_sides=(any_family,))
    assert outcome.proven, failures(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (("parallel.tp=2", "parallel.pp=2", "parallel.ep=2", UNTIED), 8),
        (("parallel.pp=2", "parallel.tp=2", "parallel.zero=2", "train.precision=fp16"), 4),
        (("parallel.cp=2", "parallel.tp=2", "parallel.zero=3"), 4),
        (("parallel.cp=2", "parallel.cp_attention=ring", "parallel.zero=2", "train.precision=bf16"), 4),
        (("parallel.zero=3", "train.precision=bf16", "train.recompute=full", UNTIED), 2),
        (("parallel.zero=0", "model.moe=null", "model.norm=layer", "model.sliding_window=100", "model.z_loss=1e-4"), 2),
        (("parallel.pp=2", "parallel.cp=2", "parallel.zero=3", "train.recompute=full"), 4),
        (("parallel.pp=2", "parallel.pipeline.name=interleaved", "parallel.zero=3", "parallel.ep=2"), 4),
        (
            (
                "parallel.pp=2",
                "parallel.pipeline.name=zbv",
                "train.precision=bf16",
                "train.recompute=full",
                ONE,
                UNTIED,
            ),
            4,
        ),
        (("parallel.pp=2", "parallel.pipeline.name=dualpipev", "parallel.cp=2", ONE, UNTIED), 4),
    ],
    ids=str,
)
def test_modules_that_predict_further_tokens_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, (*FURTHER, *overrides), ranks)
    assert outcome.proven, failures(outcome)


PLAIN = (
    *("model.norm=layer", "model.embedding_norm=true", "model.parallel_block=true", "model.ff_gated=false"),
    *("model.activation=gelu", "model.ff_bias=true", "model.positions=learned", "model.max_positions=1024"),
)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        pytest.param(("parallel.tp=2", "parallel.cp=2", "train.recompute=selective"), 4, marks=pytest.mark.slow),
        pytest.param(("parallel.cp=2", "parallel.tp=2", "parallel.cp_attention=ring"), 4, marks=pytest.mark.slow),
        pytest.param(("parallel.tp=2", "parallel.pp=2", "parallel.pipeline.name=zbv"), 8, marks=pytest.mark.slow),
        pytest.param(("parallel.pp=2", "parallel.zero=3", "train.recompute=full"), 4, marks=pytest.mark.slow),
        pytest.param(("parallel.tp=2", "parallel.zero=3", "train.precision=bf16"), 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_plain_parallel_blocks_and_learned_positions_are_proven(tmp_path, overrides, ranks):
    outcome = prove(tmp_path, (*PLAIN, *overrides), ranks, on_both_sides=(any_family,))
    assert outcome.proven, failures(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sound_layout_whose_partitions_are_padded_is_proven(tmp_path, zero):
    """Six ranks share groups of a few dozen elements: DeepSpeed pads partitions, and seldom marks the padding."""
    axes = ("parallel.cp=3", "parallel.ep=6", "parallel.cp_attention=ring", "model.n_heads=4", "data.seq_len=510")
    sizes = ("model.moe.n_experts=12", "train.global_batch_size=12", "train.micro_batch_size=2")
    outcome = prove(tmp_path, (*axes, *sizes, f"parallel.zero={zero}"), ranks=6)
    assert outcome.proven, failures(outcome)


BY_TITLE = {fault.title: fault for fault in FAULTS}
FAST_FAULTS = (  # each for another check to catch
    "mean of means: loss divided by the rank's own count",
    "attention across documents under cp (all-to-all)",
    "evaluation: a rank's share dropped",
    "accumulation in bf16 (ZeRO 2)",
    "a group of weights keeps the first learning rate",
    "every rank reads the same samples",
)
assert len({BY_TITLE[title].check for title in FAST_FAULTS}) == len(FAST_FAULTS)


@pytest.mark.parametrize("title", some_fast(BY_TITLE, *FAST_FAULTS), ids=str)
def test_planted_fault_is_caught_and_named(tmp_path, title):
    fault = BY_TITLE[title]
    outcome = prove_fault(tmp_path, fault)
    assert not outcome.proven
    caught = outcome.died is not None if fault.check == DIES else fails(outcome, fault.check)
    assert caught, failures(outcome)
    assert fault.says in told_about(outcome, fault), failures(outcome)


def fails(outcome, name):
    return any(check.name == name and not check.passed for check in outcome.checks)


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ("parallel.ep=2",)),
        pytest.param(2, ("parallel.ep=2", "parallel.zero=0"), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.ep=2", "parallel.zero=2", "train.recompute=full"), marks=pytest.mark.slow),
        pytest.param(4, ("parallel.ep=2", "parallel.zero=3", "train.precision=bf16"), marks=pytest.mark.slow),
        pytest.param(4, ("parallel.ep=4", "parallel.tp=2"), marks=pytest.mark.slow),
        pytest.param(4, ("parallel.ep=2", "parallel.pp=2", "parallel.pipeline.name=zbv"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_whose_experts_get_no_tokens_are_proven(tmp_path, ranks, overrides):
    """That such ranks exist is seen by the planted fault that only their experts can show."""
    outcome = prove(tmp_path, overrides, ranks, on_both_sides=(starved,))
    assert outcome.proven, failures(outcome)


TWINS = functools.partial(twin_experts, 1e-7)


def told_of_ties(outcome):
    """The number of ties that the table's note and the last line tell, which are equal."""
    note = next(check.note for check in outcome.checks if check.name == "router choices")
    assert note == f"{outcome.ties} ties replayed"
    assert f"; {outcome.ties} router ties decided as on one process; " in str(verdict(outcome))
    assert json.loads(to_json(outcome))["ties"] == outcome.ties
    return outcome.ties


def test_real_ties_are_replayed_counted_and_printed(tmp_path):
    """tp rounds otherwise than one process, which decides between two experts whose scores differ by rounding alone."""
    outcome = prove(tmp_path, ("parallel.tp=2",), on_both_sides=(TWINS,))
    assert outcome.proven, failures(outcome)
    assert told_of_ties(outcome) > 0


@pytest.mark.slow
def test_planted_real_ties_that_are_not_replayed_fail(tmp_path):
    """So the ties above are real: without the replay, weights and gradients of other experts come out."""
    outcome = prove(tmp_path, ("parallel.tp=2",), fault="ties are not replayed", on_both_sides=(TWINS,))
    assert not outcome.proven and fails(outcome, "router counts") and fails(outcome, "gradients"), failures(outcome)


@pytest.mark.slow
def test_planted_choices_at_small_gaps_are_replayed(tmp_path):
    outcome = prove(tmp_path, fault="the next expert at gaps below a tie's", on_both_sides=(TWINS,))
    assert outcome.proven, failures(outcome)
    assert told_of_ties(outcome) > 0


@pytest.fixture(scope="module")
def other_choices(tmp_path_factory):
    """What is found where a rank chooses the next expert at gaps above a tie's."""
    return prove(tmp_path_factory.mktemp("choices"), fault="the next expert at gaps above a tie's")


@pytest.mark.xdist_group("prove: other choices")
def test_planted_choices_at_larger_gaps_fail(other_choices):
    outcome = other_choices
    assert not outcome.proven and fails(outcome, "router choices"), failures(outcome)
    choices = next(check for check in outcome.checks if check.name == "router choices")
    assert choices.error > 0 and "layer 1, gap" in choices.worst and told_of_ties(outcome) == 0


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        pytest.param("zbv", ["parallel.zero=2", "model.tie_embeddings=true"], marks=pytest.mark.slow),
        pytest.param("zbv", ["parallel.ep=2", "train.precision=bf16", "train.recompute=full"], marks=pytest.mark.slow),
        pytest.param("interleaved", ["parallel.ep=2", "parallel.zero=3"], marks=pytest.mark.slow),
        pytest.param("interleaved", ["parallel.tp=2", "train.recompute=selective"], marks=pytest.mark.slow),
        pytest.param("dualpipev", ["parallel.cp=2", "parallel.ep=2", "train.precision=fp16"], marks=pytest.mark.slow),
        pytest.param(
            "dualpipev", ["model.moe=null", "model.family=llama", "model.qk_norm=false"], marks=pytest.mark.slow
        ),
    ],
)
def test_the_command_proves_every_schedule(tmp_path, capsys, schedule, changes):
    path = write_config(tmp_path)
    axes = ["parallel.pp=2", f"parallel.pipeline.name={schedule}", *changes]
    ranks = 2 if changes[0] == "parallel.zero=2" else 4
    code = main(["prove", str(path), *axes, "--ranks", str(ranks), "--steps", "2"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"{ranks} processes: pp=2 ({schedule})" in printed and "proven: " in printed.splitlines()[-1]


def test_planted_death_of_a_rank_ends_the_proof(tmp_path):
    outcome = prove(tmp_path, fault="a rank dies")
    assert not outcome.proven
    assert outcome.died is not None and "rank 1 (dp 1) of 2 ended by exit code 7" in outcome.died


def test_command_prints_a_table_or_json_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = write_config(tmp_path)
    assert main(["prove", str(path), "parallel.zero=2", "--steps", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["proven"] and printed["ranks"] == 2 and printed["steps"] == 1
    assert all(check["passed"] and check["error"] <= check["bound"] for check in printed["checks"])
    assert os.listdir(tmp_path) == [path.name]
    assert main(["prove", str(path), "--steps", "1", "--keep"]) == 0
    shown = capsys.readouterr()
    assert "proven: " in shown.out and "layout -> one" in shown.out and "build" in shown.err
    kept = Path(shown.out.split("kept in ")[1].strip())
    assert (kept / "layout" / "step-00000001").is_dir() and (kept / "plain" / "manifest.json").is_file()


@pytest.mark.xdist_group("prove: other choices")
def test_planted_fault_gives_exit_code_one(other_choices, tmp_path, capsys, monkeypatch):
    import launcher.commands.prove as command

    monkeypatch.setattr(command, "prove_in", lambda *_, **__: other_choices)
    assert main(["prove", str(write_config(tmp_path))]) == 1
    assert "not proven: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["parallel.tp=2", "--ranks", "3"], "--ranks=3 must be a multiple of parallel.tp=2 = 2"),
        (["parallel.ep=2", "--ranks", "1"], "parallel.ep=2"),
        (["model.n_heads=7", "model.d_head=64"], "model.n_kv_heads=4 must divide model.n_heads=7"),
        (["parallel.zero=0", "train.precision=bf16"], "parallel.zero=0 works with train.precision=fp32 only"),
        (["--steps", "0"], "steps"),
    ],
)
def test_wrong_input_gives_exit_code_two_and_lines_alone(tmp_path, capsys, arguments, line):
    assert main(["prove", str(write_config(tmp_path)), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and line in shown.err and "Traceback" not in shown.err
