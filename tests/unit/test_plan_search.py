"""`plan --search`: what is legal, what fits, which is first, and why."""

import itertools
import json
import time

import pytest

from launcher.cli import main
from launcher.closed_form.bubble import waits_of
from launcher.closed_form.forecast import plan_on
from launcher.closed_form.gpus import capacity, gpu_of
from launcher.closed_form.own import architecture_of_config, job_of_config
from launcher.closed_form.work import Step
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.estimate.order import Passes, simulate
from launcher.plan.search import layouts, overrides_of, search, why
from modeling.logical import logical_tensors
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB, chunks

CONFIG = """\
name: small
model: {n_layers: 8, d_model: 1024, n_heads: 16, n_kv_heads: 16, d_ff: 4096, vocab_size: 32768}
data: {seq_len: 2048, sources: [{path: none.txt}]}
train: {global_batch_size: 64}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_what_is_found_is_legal_and_fits_and_is_in_order(path):
    config, gpu = load_config(path, []), gpu_of("H100", 8, "")
    found = search(config, 16, gpu, 8)
    assert len(found.best) == 10 and found.n_planned > 100
    assert all(not check(each.config, 16) and each.peak_bytes <= capacity(gpu) for each in found.best)
    seconds = [each.seconds for each in found.best]
    assert all(one <= other * 1.001 for one, other in itertools.pairwise(seconds))
    given = plan_on(job_of_config(config, 16, gpu, 8), gpu)["step_seconds"]
    assert seconds[0] <= given


def test_every_layout_keeps_the_rules(path):
    config = load_config(path, [])
    found = list(layouts(config, 16, 8))
    degrees = {(each.parallel.tp, each.parallel.pp, each.parallel.cp) for each in found}
    assert (1, 1, 1) in degrees and (8, 2, 1) in degrees and (1, 8, 1) in degrees
    assert all(not check(each, 16) for each in found[::7])


def test_experts_are_dealt_over_ranks(path):
    path.write_text(CONFIG.replace("32768}", "32768, moe: {n_experts: 16, top_k: 2, d_ff: 1024}}"))
    found = list(layouts(load_config(path, []), 16, 8))
    assert {each.parallel.ep for each in found} == {1, 2, 4, 8, 16}


def test_a_smaller_gpu_leaves_fewer_layouts(path):
    config = load_config(path, ["model.n_layers=32", "model.d_model=6144", "model.d_ff=16384"])
    large, small = (search(config, 8, gpu_of(name, 8, ""), 8) for name in ("A100-80", "A100-40"))
    assert large.n_planned == small.n_planned and large.n_unfit < small.n_unfit


@pytest.mark.slow
def test_the_search_of_16384_gpus_takes_under_a_minute(tmp_path):
    config = load_config("configs/models/llama-3-1-405b.yaml", ["train.global_batch_size=2048", "data.seq_len=8192"])
    began = time.process_time()
    found = search(config, 16384, gpu_of("H100", 8, ""), 8)
    assert time.process_time() - began < 60
    assert found.best and found.best[0].config.parallel.tp > 1


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved(n_chunks=2)])
def test_waits_of_few_micro_batches_are_those_of_many(schedule):
    """A pipeline's ends are as long however many micro-batches pass between them."""
    pp, n = 4, 48
    order = simulate(
        schedule, [Passes(*(each / (1 + isinstance(schedule, Interleaved)) for each in (1.0, 2.0)))] * pp, n
    )
    assert max(order.ends) / 3 - n == pytest.approx(waits_of(schedule, n, [1.0] * pp), rel=0.02)


@pytest.mark.parametrize(
    "schedule", [OneFOneB(), Interleaved(n_chunks=2), ZBV(), DualPipeV()], ids=lambda each: each.name
)
@pytest.mark.parametrize("seconds", [(8, 8, 24, 8), (24, 8, 8, 8), (12, 12, 12, 15), (1, 1, 1, 20)], ids=str)
def test_a_pipeline_waits_less_for_positions_with_less_work(schedule, seconds):
    """By the order of the passes themselves; as if all positions were the slowest it came to 36% too many seconds."""
    n, n_chunks = 8, chunks(schedule)
    passes = [Passes(each / n_chunks, 2 * each / n_chunks) for each in seconds]
    ends = max(simulate(schedule, passes, n).ends) / 3 / max(seconds)
    assert n + waits_of(schedule, n, seconds) == pytest.approx(ends, rel=0.01)


def test_planned_seconds_follow_the_layout_s_own_positions(path):
    """The slowest position has the same work in both; the others of the second one have less, and begin it sooner."""
    gpu = gpu_of("H100", 8, "")
    changes = ["parallel.pp=4", "train.global_batch_size=64", "model.n_layers=16"]
    even, uneven = (
        Step(job_of_config(load_config(path, [*changes, *more]), 8, gpu, 8), gpu).work().passes
        for more in (["parallel.pipeline.layers=[5,5,5,1]"], ["model.n_layers=8", "parallel.pipeline.layers=[1,1,5,1]"])
    )
    assert even == pytest.approx(32 + 3, abs=1) and 32 < uneven < even - 1


MOE = "model.moe={n_experts: 4, top_k: 2, d_ff: 512, n_dense_layers: 2}"
MTP = ("model.family=deepseek_v3", "model.mtp={depth: 2}")
PP4, V = ("parallel.pp=4",), ("parallel.pp=4", "parallel.pipeline.name=zbv")


@pytest.mark.parametrize(
    ("changes", "costs", "slowest"),
    [
        ([*PP4, "parallel.pipeline.layers=[1,1,5,1]"], (1, 2, 3), (5, 0, 0)),
        ([*PP4, "parallel.pipeline.layers=[1,1,5,1]"], (1, 2, 5), (1, 0, 1)),
        ([*PP4, "parallel.pipeline.layers=[2,2,2,2]", MOE], (1, 2, 1), (0, 2, 1)),
        ([*PP4, "parallel.pipeline.layers=[2,2,2,2]", MOE], (9, 2, 1), (2, 0, 0)),
        ([*V, "parallel.pipeline.layers=[1,1,1,1,1,1,1,1]", MOE], (1, 2, 3), (1, 1, 1)),  # the first has the head
        ([MOE], (1, 2, 3), (2, 6, 1)),
        ([*MTP, MOE], (1, 2, 3), (2, 8, 3)),
        ([*MTP, MOE, *PP4, "parallel.pipeline.layers=[3,3,1,1]"], (1, 2, 3), (0, 3, 3)),
    ],
)
def test_the_slowest_position_is_one_of_the_layouts_own(path, changes, costs, slowest):
    """By hand: layers without experts, layers with them, and passes of the head."""
    gpu = gpu_of("H100", 8, "")
    config = load_config(path, changes)
    assert Step(job_of_config(config, 8, gpu, 8), gpu).slowest(*costs) == slowest


OFFLOADED = ("parallel.zero=2", "parallel.offload_optimizer=true")


def test_layers_of_stages_that_were_given_are_not_those_of_what_is_found(path):
    given = ["parallel.pp=2", "parallel.pipeline.layers=[3, 5]"]
    config = load_config(path, given)
    for each in search(config, 16, gpu_of("H100", 8, ""), 8, n_best=100).best[::5]:
        assert load_config(path, [*given, *overrides_of(each.config, config)]) == each.config


@pytest.mark.parametrize("given", [("parallel.grad_reduce=micro_batch",), OFFLOADED], ids=" ".join)
def test_what_a_stage_of_zero_cannot_do_is_switched_off_with_it(path, given):
    """A layout's overrides, after those that were given, lead to the config that was planned, which is legal."""
    config = load_config(path, [*given])
    found = search(config, 16, gpu_of("H100", 8, ""), 8, n_best=200)
    stages = {each.config.parallel.zero for each in found.best}
    assert stages == {1, 2, 3}
    for each in found.best:
        parallel = each.config.parallel
        assert parallel.offload_optimizer == (given == OFFLOADED and parallel.zero == 2)
        assert (parallel.grad_reduce == "micro_batch") == (given != OFFLOADED and parallel.zero == 1)
    for each in found.best[::5]:
        assert load_config(path, [*given, *overrides_of(each.config, config)]) == each.config


def test_chunks_of_experts_and_overlap_are_left_out_where_a_layout_cannot_have_them(path):
    moe = "model.moe={n_experts: 8, top_k: 2, d_ff: 512}"
    given = ["model.family=mixtral", moe, "parallel.ep=2", "parallel.ep_chunks=4", "parallel.tp_overlap=true"]
    config = load_config(path, given)
    found = search(config, 16, gpu_of("H100", 8, ""), 8, n_best=400)
    assert {(each.config.parallel.ep, each.config.parallel.ep_chunks) for each in found.best} >= {
        (1, 1),
        (2, 4),
        (4, 2),
    }
    for each in found.best:
        parallel = each.config.parallel
        assert parallel.ep_chunks == (1 if parallel.ep == 1 else min(4, 8 // parallel.ep))
        splits = parallel.pipeline.name in ("zbv", "dualpipev")
        assert parallel.tp_overlap == (parallel.zero != 3 and not splits)
    for each in found.best[::5]:
        assert load_config(path, [*given, *overrides_of(each.config, config)]) == each.config


def test_the_command_explains_and_writes(path, tmp_path, capsys):
    out = tmp_path / "best.yaml"
    assert main(["plan", str(path), "--search", "--gpus", "16", "--traces", "0", "--write", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layouts"][0]["fits"] and found["why"].startswith("the first takes ")
    assert not check(load_config(out, []), 16)
    written = load_config(out, [])
    assert overrides_of(written, written) == found["layouts"][0]["overrides"]
    again = tmp_path / "again.yaml"
    assert main(["plan", str(path), "--search", "--gpus", "16", "--traces", "0", "--write", str(again)]) == 0
    told = capsys.readouterr().out
    assert "legal layouts" in told and "the first takes" in told
    assert f"`roundtable plan {again} --gpu H100 --gpus 16` traces it" in told


@pytest.mark.parametrize(
    ("changes", "in_one_kernel"),
    [
        ([], True),
        (["model.positions=alibi", "train.precision=bf16"], True),
        (["model.positions=alibi", "train.precision=fp32"], False),
        (["model.positions=alibi", "train.precision=bf16", "parallel.cp=2", "parallel.cp_attention=ring"], False),
        (["model.positions=alibi", "train.precision=bf16", "parallel.cp=2", "parallel.cp_attention=ulysses"], True),
        (["model.score_cap=50.0"], False),
        (["model.positions=t5"], False),
    ],
)
def test_attention_that_no_kernel_knows_is_planned_by_its_formula(path, changes, in_one_kernel):
    job = job_of_config(load_config(path, changes), 8, gpu_of("H100", 8, ""), 8)
    assert job.system.flash == in_one_kernel


def test_why_names_the_parts():
    first = {"step_seconds": 1.0, "peak_gb": 3.0, "seconds_by_part": {"tp, cp": 0.2, "memory": 0.8}}
    second = {"step_seconds": 1.4, "peak_gb": 4.0, "seconds_by_part": {"tp, cp": 0.8, "memory": 0.6}}
    assert why(first, second).endswith("less tp, cp (0.600 s), but more memory (0.200 s)")
    assert why(first, {**first, "peak_gb": 4.0}).endswith("1.0 GiB less memory")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--search", "--write", "config.yaml"], "--write=config.yaml must be a new file"),
        (["--search", "--write", "none/out.yaml"], "--write=none/out.yaml must be a new file"),
        (["--write", "out.yaml"], "add --search"),
        (["--search", "--imbalance", "1.3"], "--imbalance=1.3 does not go with --search, which plans equal loads"),
        (["--search", "--gpu", "H1"], "--gpu=H1 must be one of"),
        (["--search", "--gpus", "1", "model.n_layers=200", "model.d_model=8192"], "are too few"),
        (["--search", "--gpus", "11"], "train.global_batch_size=64 must be a multiple of dp=11"),
    ],
)
def test_refusals_change_nothing(path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(path.parent)
    assert main(["plan", "config.yaml", *arguments]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.out == ""
    assert [each.name for each in path.parent.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    "changes",
    [
        ["model.family=none", "model.ff_gated=false"],
        [
            "model.family=none",
            "model.ff_gated=false",
            "model.moe={n_experts: 8, top_k: 2, d_ff: 512, n_dense_layers: 2}",
        ],
        ["model.family=none", "model.moe={n_experts: 8, top_k: 2, d_ff: 512, shared_d_ff: 200}"],
    ],
)
def test_closed_forms_have_the_model_s_own_matrices(path, changes):
    """All but norms and biases: dense layers without gates beside experts with them, shared experts of any width."""
    model = load_config(path, changes).model
    own = sum(tensor.numel for tensor in logical_tensors(model).values())
    assert architecture_of_config(model).parameters == pytest.approx(own, rel=5e-4)
