"""Plans of published rows: closed forms against the model's own counts and schedules, hostile rows, and the page."""

import json
import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from launcher.cli import main
from launcher.closed_form.architecture import architecture_of
from launcher.closed_form.consistency import contradictions
from launcher.closed_form.evaluate import COVERED, evaluate, limits, spread_of
from launcher.closed_form.fit import fit
from launcher.closed_form.forecast import FILE, chance_to_fit, plan_row
from launcher.closed_form.gpus import gpu_of, network_of
from launcher.closed_form.own import architecture_of_config
from launcher.closed_form.page import MEMORY_TARGET, TARGETS, page
from launcher.closed_form.products import Product, padding
from launcher.closed_form.rows import job_of, measured_seconds, read_rows, zero_of
from launcher.closed_form.work import Step, work_of
from launcher.config.load import load_config
from launcher.estimate.order import Passes, simulate
from modeling.counts import count_parameters, flops_per_token
from modeling.logical import logical_tensors
from parallel.pipeline.config import Interleaved, OneFOneB
from plan_table import PAGE, ROOT, ROWS, constants_text

ROW = {
    "id": "one",
    "model": {"name": "a", "layers": 8, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 32000, "seq": 2048},
    "hw": {"gpu": "H100", "count": 16, "per_node": 8},
    "layout": {"dp": 4, "tp": 2, "pp": 2, "precision": "bf16", "zero": 1},
    "batch": {"global_seqs": 32, "micro": 1},
    "measured": {"step_s": 0.2},
}


def changed(**changes):
    row = deepcopy(ROW)
    for path, value in changes.items():
        part, key = path.split("__")
        row[part][key] = value
    return row


@pytest.fixture(scope="module")
def found():
    return evaluate(read_rows(ROWS))


def test_the_page_and_the_constants_are_what_the_rows_make(found):
    assert constants_text(found) == FILE.read_text(), "run `make plan-table`"
    assert page(found) == PAGE.read_text(), "run `make plan-table`"


@pytest.mark.slow
def test_planted_another_measurement_changes_the_page(found):
    rows = read_rows(ROWS)
    changed_row = next(row for row in rows if row["id"] == "dgxc-l31-8b-bf16-8")
    changed_row["measured"]["step_s"] *= 2
    assert page(evaluate(rows)) != PAGE.read_text()


def test_what_the_page_claims(found):
    """Dense and MoE rows and memory reach what was aimed at, and intervals hold what they are made for."""
    for kind, (median, tenth) in TARGETS.items():
        rows = [each for each in found.time if each.case.job.kind == kind]
        sizes = np.abs([each.relative for each in rows])
        assert np.median(sizes) <= median and np.quantile(sizes, 0.9) <= tenth
        assert np.mean([each.is_covered for each in rows]) >= COVERED
    assert np.median(np.abs([each.relative for each in found.memory])) <= MEMORY_TARGET
    assert np.mean([each.is_covered for each in found.memory]) >= COVERED


def test_no_publisher_s_rows_are_in_the_fit_that_predicts_them():
    """Twice the seconds of one publisher leave its own predictions as they were."""
    three = ("InternLM", "NVIDIA/dgxc", "pytorch/torchtitan")
    rows = [row for row in read_rows(ROWS) if row["source"].startswith(three)]
    before = evaluate(rows)
    for row in rows:
        if row["source"].startswith("InternLM"):
            row["measured"]["tokens_per_s_per_gpu"] /= 2
    after = evaluate(rows)
    for one, other in zip(before.time, after.time, strict=True):
        if one.case.publisher == "InternLM/InternLM":
            assert one.value - other.value == pytest.approx(math.log(2), abs=1e-9)


def row_of(path):
    """A config's model in the rows' schema, and its config."""
    config = load_config(path, [])
    model, moe = config.model, config.model.moe
    dims = {
        "name": path.stem.replace("_", "-"),
        "layers": model.n_layers,
        "hidden": model.d_model,
        "heads": model.n_heads,
        "kv_heads": model.n_kv_heads,
        "ffn": model.d_ff,
        "vocab": model.vocab_size,
        "seq": config.data.seq_len,
        "params": count_parameters(model).total,
    }
    if moe is not None:
        dims |= {
            "experts": moe.n_experts,
            "topk": moe.top_k,
            "moe_ffn": moe.d_ff,
            "shared_experts": moe.shared_width // moe.d_ff,
        }
    return dims, model


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "models").glob("*.yaml")), ids=lambda path: path.stem)
def test_parameters_and_flops_are_the_model_s_own(path):
    """What is inferred of a config's dims counts what the model's own tensors count, but for norms and biases."""
    dims, model = row_of(path)
    found = architecture_of(dims)
    counts = count_parameters(model)
    assert found.parameters == pytest.approx(counts.total, rel=0.01 if model.mtp is None else 0.04)
    seq_len = dims["seq"]
    keys = sum(min(seq_len, model.window_of(layer) or seq_len) for layer in model.all_layers) / model.n_layers
    flops = 6 * found.active_parameters + 12 * model.n_layers * found.attention_width * keys
    if model.mtp is None:  # of a module for further tokens rows say nothing
        assert flops == pytest.approx(flops_per_token(model, seq_len), rel=0.02)


OURS = sorted(path for folder in (".", "models") for path in (ROOT / "configs" / folder).glob("*.yaml"))


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_parameters_of_our_configs_are_those_of_their_tensors(path):
    """All, and those that a token meets, but for norms, biases and GPT-2's positions: 0.7% of its smallest."""
    model = load_config(path, []).model
    found, embedding = architecture_of_config(model), model.vocab_size * model.d_model
    assert found.parameters == pytest.approx(sum(each.numel for each in logical_tensors(model).values()), rel=0.01)
    active = count_parameters(model).active - (0 if model.tie_embeddings else embedding)
    assert found.active_parameters == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(("pp", "n"), [(2, 8), (4, 8), (8, 32)])
@pytest.mark.parametrize(("schedule", "vpp"), [(OneFOneB(), 1), (Interleaved(n_chunks=2), 2)])
def test_the_bubble_is_that_of_the_schedule_s_own_order(pp, n, schedule, vpp):
    job = job_of(
        changed(layout__pp=pp, layout__vpp=vpp, layout__dp=1, layout__tp=1, hw__count=pp, batch__global_seqs=n)
    )
    order = simulate(schedule, [Passes(1.0 / vpp, 2.0 / vpp)] * pp, n)
    one = 3.0
    waits = Step(job, gpu_of("H100", 8, "")).waits(1.0, 0.0, 0.0)
    assert (n + waits) * one == pytest.approx(max(order.ends), rel=0.02)


def test_a_row_s_plan():
    plan = plan_row(ROW)
    assert plan["id"] == "one" and plan["reason"] is None and plan["kind"] == "dense"
    assert plan["step_seconds_low"] < plan["step_seconds"] < plan["step_seconds_high"]
    assert plan["step_seconds"] == pytest.approx(sum(plan["seconds_by_part"].values()))
    assert plan["fits"] and plan["chance_to_fit"] > 0.99 and 2 < plan["peak_gb"] < 20


@pytest.mark.parametrize(
    ("changes", "slower"),
    [
        ({"model__layers": 16}, True),
        ({"layout__recompute": "full"}, True),
        ({"hw__gpu": "A100"}, True),
        ({"hw__gpu": "H100 (350W)"}, True),
        ({"layout__precision": "fp8"}, False),
        ({"hw__gpu": "B200"}, False),
        ({"layout__vpp": 4}, False),
    ],
)
def test_what_makes_a_step_longer_or_shorter(changes, slower):
    seconds, before = plan_row(changed(**changes))["step_seconds"], plan_row(ROW)["step_seconds"]
    assert (seconds > before) == slower


def test_natural_routing_takes_longer_and_is_less_sure():
    moe = {"model__experts": 64, "model__topk": 4, "model__moe_ffn": 1024, "layout__ep": 8}
    even, natural = plan_row(changed(**moe)), plan_row(changed(**moe, layout__routing="natural"))
    assert (even["kind"], natural["kind"]) == ("MoE forced", "MoE natural")
    assert natural["step_seconds"] > even["step_seconds"] and natural["peak_gb"] > even["peak_gb"]
    width = [plan["step_seconds_high"] / plan["step_seconds_low"] for plan in (even, natural)]
    assert width[1] > width[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model__hidden": None}, "model.hidden is not known"),
        ({"model__layers": None}, "model.layers is not known"),
        ({"hw__gpu": "TPU"}, "hw.gpu='TPU' is not known"),
        ({"hw__gpu": "A100", "layout__precision": "fp8"}, "A100-80GB has no rate for fp8"),
        ({"model__layers": 2.5}, "layers=2.5 is no whole number"),
        ({"model__experts": 4, "model__topk": 8}, "model.topk=8 is more than model.experts=4"),
        ({"batch__global_seqs": "many"}, "global_seqs=many is no whole number"),
    ],
)
def test_a_row_without_a_plan_says_why(changes, reason):
    plan = plan_row(changed(**changes))
    assert plan["step_seconds"] is None and plan["peak_gb"] is None and reason in plan["reason"]


HOSTILE = [None, -1, 0, 1, 0.5, 10**12, 1e300, float("nan"), float("inf"), True, "", "x\x1b[2J", [], {}, [1], {"a": 1}]


@pytest.mark.parametrize("part", ["model", "hw", "layout", "batch"])
def test_hostile_rows_have_a_plan_or_a_reason(part):
    keys = [*ROW[part], *{"model": ["experts", "params"], "layout": ["ep", "vpp", "recompute"]}.get(part, [])]
    for key in keys:
        for value in HOSTILE:
            plan = plan_row({**ROW, part: {**ROW[part], key: value}})
            assert (plan["step_seconds"] is None) == (plan["reason"] is not None), (key, value)
            json.dumps(plan, allow_nan=False)
    for value in HOSTILE:
        json.dumps(plan_row({**ROW, part: value}), allow_nan=False)


def test_layers_follow_from_the_parameters_in_a_name():
    dims = {"name": "bloom-183B", "hidden": 14400, "heads": 96, "ffn": 57600, "vocab": 250880}
    assert architecture_of(dims, pp=12).n_layers == 72


def test_gates_and_heads_follow_from_the_parameters():
    assert architecture_of({**ROW["model"], "params": 200e6}).ff_matrices == 3
    qwen = {"hidden": 2048, "layers": 48, "heads": 32, "kv_heads": 4, "vocab": 151936, "experts": 128, "topk": 8}
    assert architecture_of({**qwen, "moe_ffn": 768, "params": 30.5e9}).d_head == 128


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("NVLink3 + 4x100Gb OPA per node", 6.25e9),
        ("NVSwitch + 1600Gbps RoCE/node", 25e9),
        ("NVLink + 400Gb/s RDMA per GPU", 50e9),
        ("NVLink4 + IB 8x50GB/s", 50e9),
        ("NVLink4 900GB/s + IB NDR400/GPU", 50e9),
        ("NVLink", None),
    ],
)
def test_networks_are_read_from_their_words(words, rate):
    assert network_of(words, 8) == rate


def test_zero_is_read_from_its_words():
    assert zero_of("1 (shard in 8)", 64) == (1, 8)
    assert zero_of("FSDP64", 64) == (3, 64)
    assert zero_of(None, 4) == (1, 4)
    assert zero_of(0, 4) == (0, 4)


def test_tiles_that_are_not_full_take_longer():
    whole, odd = Product(4096, 4096, 4096), Product(4096, 4097, 4096)
    assert padding(odd, 132) > 1.5 * padding(whole, 132)
    assert padding(Product(16, 4096, 4096), 132) > 4 * padding(whole, 132)


def test_experts_messages_between_nodes_count_each_node_once():
    far = {"model__experts": 64, "model__topk": 8, "model__moe_ffn": 512, "layout__pp": 1, "layout__dp": 8}
    near = job_of(changed(**far, layout__ep=8))
    wide = job_of(changed(**far, layout__ep=16))
    gpu = gpu_of("H100", 8, "NDR")
    assert work_of(near, gpu).ep_far == 0 < work_of(wide, gpu).ep_far
    rows = wide.seq_len / wide.tp * wide.architecture.d_model * 2 * 4 * wide.architecture.n_layers
    assert work_of(wide, gpu).ep_far <= rows / 50e9


MOE = {"model__experts": 64, "model__topk": 8, "model__moe_ffn": 512, "layout__pp": 1, "layout__dp": 8}


def dispatch_of(ep=16, **changes):
    """Seconds within nodes and between them, and passes over layers, of a job on H100."""
    work = work_of(job_of(changed(**MOE, layout__ep=ep, **changes)), gpu_of("H100", 8, "NDR"))
    return work.ep_near, work.ep_far, work.moe_layers


def test_all_to_all_sends_every_copy_and_launches_more():
    near, far, launches = dispatch_of()
    copied_near, copied_far, copied_launches = dispatch_of(layout__dispatcher="A2A")
    met = 2 * (1 - 0.5**8)  # nodes that have some of a token's eight experts, of two
    assert copied_far / far == pytest.approx(8 / met) and copied_launches == 2 * launches
    ranks = 16 * (1 - (15 / 16) ** 8)
    assert near / copied_near == pytest.approx(ranks * 15 / 16 / (8 * (15 / 16 - 1 / 2)))
    assert dispatch_of(layout__kernels="TE+DeepEP") == (near, far, launches)


def test_routing_that_is_only_pretended_and_routing_by_groups_meet_fewer_ranks():
    near, far, _ = dispatch_of()
    row = changed(**MOE, layout__ep=16)
    beside = work_of(job_of({**row, "notes": "Mock data, fake balanced gate."}), gpu_of("H100", 8, "NDR"))
    assert beside.ep_near / near == pytest.approx(2 * 15 / 16 / (16 * (1 - (15 / 16) ** 8) * 15 / 16))
    assert beside.ep_far < far
    step = Step(job_of(row), gpu_of("H100", 8, "NDR"))
    step.arch = replace(step.arch, expert_groups=(8, 4))
    assert step.met(8.0) == pytest.approx(4 * (1 - (3 / 4) ** 8)) and step.met(1.0) == 1.0
    nodes = 4 * (1 - (6 * 5 * 4 * 3) / (8 * 7 * 6 * 5))  # of four, each with two groups
    assert step.met(4.0) == pytest.approx(nodes * (1 - (1 - 1 / nodes) ** 8))


def test_dispatch_that_work_hides_delays_less():
    row = changed(**MOE, layout__ep=16)
    plain, hidden = plan_row(row), plan_row({**row, "notes": "GA 4. +1f1b EP overlap."})
    assert hidden["seconds_by_part"]["ep"] < plain["seconds_by_part"]["ep"]


def test_recipes_hold_for_their_releases_and_rows_know_better():
    def system(table, gpu="GB300", **layout):
        row = changed(**MOE, model__name="qwen3-30b-a3b", hw__gpu=gpu)
        row["layout"] |= {"precision": "MXFP8", **layout}
        return job_of({**row, "source": "NVIDIA-NeMo/Megatron-Bridge HEAD", "table": table}).system

    early, late = system("26.04.01 NeMo Container / Qwen3"), system("26.06 NeMo Container / Qwen3")
    assert early.graphed < late.graphed == 1 and late.hides_dispatch and not early.hides_dispatch
    assert system("26.06 NeMo Container / Qwen3", precision="BF16").graphed < 1
    assert system("Qwen3").graphed == 0
    assert system("26.02 NeMo Container / Qwen3", gpu="B200").dispatch == "all-to-all"
    assert system("26.02 NeMo Container / Qwen3", gpu="B200", dispatcher="DeepEP").dispatch == "nodes"
    assert early.half_sums


def test_modules_for_further_tokens_and_parts_again_take_time():
    before = plan_row(changed(**MOE))["step_seconds"]
    assert plan_row(changed(**MOE, model__mtp=1))["step_seconds"] > before
    assert plan_row(changed(**MOE, layout__recompute="norm, act"))["step_seconds"] > before
    flushed = {**changed(layout__vpp=2), "notes": "GA 4, local batch 2."}
    assert plan_row(flushed)["step_seconds"] > plan_row(changed(layout__vpp=2))["step_seconds"]


def test_rows_of_experts_may_be_any_number():
    """Tensor cores need lengths in memory that are multiples of 8; the number of rows is none of these."""
    even, odd = (Product.of(rows, 4096, 4096).backward()[1] for rows in (4096, 4095))
    assert padding(odd, 132) == pytest.approx(padding(even, 132), rel=0.01)


def test_intervals_are_wider_for_fewer_publishers_and_for_larger_errors(found):
    dense = [each for each in found.time if each.case.job.kind == "dense"]
    names = sorted({each.case.publisher for each in dense})
    two = [each for each in dense if each.case.publisher in names[:2]]
    assert np.ptp(spread_of(two)) > np.ptp(spread_of(dense)) > 0
    assert spread_of([]) == [-math.inf, math.inf]
    few = [each for each in found.time if each.case.job.kind != "dense"][:4]
    larger = [replace(each, value=1.0) for each in few]
    assert np.ptp(limits([*dense, *larger], "MoE")) > np.ptp(limits([*dense, *few], "MoE"))


def test_rows_that_contradict_themselves_are_found():
    assert contradictions(ROW) == []
    assert "are not the 16 GPUs" in contradictions(changed(layout__dp=8))[0]
    assert "of the peak" in contradictions(changed(measured__step_s=0.0001))[0]
    assert "makes" in contradictions(changed(measured__tokens_per_s_per_gpu=1.0))[0]
    assert "more than the 80" in contradictions(changed(measured__mem_gb=100))[0]


def test_seconds_are_preferred_to_tokens_and_tokens_to_formulas():
    assert measured_seconds(ROW) == 0.2
    row = changed(measured__step_s=None, measured__tokens_per_s_per_gpu=4096.0)
    assert measured_seconds(row) == 1.0
    assert measured_seconds({**changed(measured__step_s=None), "derived": {"step_s_from_formula": 3.0}}) == 3.0


def test_the_command_prints_a_line_for_each_row(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [ROW, {"id": "two \x1b[2J"}, {}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert main(["plan", "--rows", str(path), "--json"]) == 0
    plans = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [plan["id"] for plan in plans] == ["one", "two \x1b[2J", None]
    assert [plan["step_seconds"] is None for plan in plans] == [False, True, True]
    assert main(["plan", "--rows", str(path)]) == 0
    told = capsys.readouterr().out
    assert "no plan for two" in told and "\x1b" not in told


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        ("not json", [], "line 1 must be a JSON object"),
        ("{}\n[]", [], "line 2 must be a JSON object"),
        ("{}", ["config.yaml"], "give one of them"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path, capsys, text, arguments, told):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert main(["plan", *arguments, "--rows", str(path)]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and len(captured.err.splitlines()) == 1 and captured.out == ""


@pytest.mark.parametrize("interval", [(-0.2, 0.2), (-0.35, 0.05), (0.1, 0.3)])
def test_the_chance_to_fit_is_that_of_the_interval_that_holds_four_errors_of_five(interval):
    low, high = interval
    for error, chance in ((low, 0.1), ((low + high) / 2, 0.5), (high, 0.9)):
        assert chance_to_fit(80.0, 80.0 * math.exp(error), interval) == pytest.approx(chance, abs=1e-3)


def test_a_fit_finds_constants_and_keeps_what_no_row_tells_of():
    random = np.random.default_rng(0)
    amounts_NK = random.uniform(1, 5, (40, 2))
    measured_N = amounts_NK @ np.array([0.5, 3.0])

    def predict(constants):
        return amounts_NK @ np.array([constants["one"], constants["two"]])

    priors = {"one": (1.0, 2.0, ""), "two": (1.0, 2.0, ""), "unused": (7.0, 0.5, "")}
    publishers = [f"publisher {number % 8}" for number in range(40)]
    found = fit(predict, measured_N, publishers, priors)
    assert found == pytest.approx({"one": 0.5, "two": 3.0, "unused": 7.0}, rel=0.02)
    held = fit(predict, measured_N, publishers, priors | {"two": (1.0, 1e-4, "")})
    assert held["two"] == pytest.approx(1.0, rel=0.01)
    measured_N[0] *= 20  # one row that is wrong by far moves little
    assert fit(predict, measured_N, publishers, priors) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("n_rows", [4, 36])
def test_a_publisher_weighs_as_the_square_root_of_its_rows(n_rows):
    """Between two that are not far apart: where the weighted mean of their logarithms is."""
    measured_N, publishers = np.array([1.1] * n_rows + [1.0]), ["many"] * n_rows + ["one"]

    def predict(constants):
        return np.full(n_rows + 1, constants["speed"])

    found = fit(predict, measured_N, publishers, {"speed": (1, 9, "")})
    weight = n_rows**0.5
    assert math.log(found["speed"]) == pytest.approx(math.log(1.1) * weight / (weight + 1), rel=1e-3)
