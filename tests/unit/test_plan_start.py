"""The plan that a start tells: by term what it missed, and that nothing that goes wrong with it stops a run."""

import dataclasses
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launcher.closed_form.memory import layers_of, memory_of, own_weights, position_memory
from launcher.config.load import load_config
from launcher.plan.closed_forms import step_of_rank
from launcher.plan.memory import rank_memory
from launcher.plan.quick import GIB, GRADIENTS, MATRICES, PASSING, Held, fullest, held_by, job_on, quick_plan, room_on
from launcher.plan.search import layouts
from launcher.report.plans import planned_at_start, planned_rows
from launcher.trace.hardware import known_hardware, read_hardware
from launcher.training import cpu_room, planned
from launcher.training.cpu_room import LATER_BYTES, PRODUCT_BYTES, SCATTERED, SCATTERED_IN_BF16
from launcher.training.planned import HELD, MISS_AFTER, Planned, miss, plan_start

CONFIG = load_config(Path("configs/quickstart.yaml"), [])
MESH = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), pp=SimpleNamespace(rank=0))


class Watchers:
    """Keeps the events."""

    def __init__(self):
        self.events = []

    def event(self, row):
        self.events.append(row)


def rows(n: int) -> list[dict]:
    first = {"step": 1, "step_seconds": 60.0, "peak_gib": 1.0, "loader_wait_seconds": 2.0}
    later = {"step_seconds": 0.5, "peak_gib": 1.5, "loader_wait_seconds": 0.1, "moe/layer_00/load_max": 1.2}
    return [first, *({"step": step, **later} for step in range(2, n + 1))]


def test_the_miss_is_told_once_after_ten_updates_without_the_first():
    watchers, plan = Watchers(), Planned({"step_seconds": 0.4, "peak_gib": 2.0})
    for row in rows(2 * MISS_AFTER):
        plan.observe(row, watchers)
    (event,) = watchers.events
    assert event == {
        "step": 10, "event": "plan_miss", "step_seconds": 0.5, "step_seconds_planned": 0.4, "peak_gib": 1.5,
        "step_seconds_miss": pytest.approx(0.25), "peak_gib_planned": 2.0, "peak_gib_miss": -0.25,
        "loader_wait_seconds": 0.1, "busiest_expert": pytest.approx(1.2), "busiest_expert_planned": 1.0,
    }  # fmt: skip


def test_a_miss_is_of_updates_of_the_batch_that_is_planned():
    watchers, plan = Watchers(), Planned({"step_seconds": 0.4}, 64)
    small = [{"step": step, "step_seconds": 0.01, "batch_size": step} for step in range(1, 31)]
    whole = [{"step": 30 + step, "step_seconds": 0.5, "batch_size": 64} for step in range(1, MISS_AFTER + 1)]
    for row in [*small, *whole]:
        plan.observe(row, watchers)
    (event,) = watchers.events
    assert event["step"] == 40 and event["step_seconds"] == 0.5


def test_what_was_not_planned_or_not_measured_has_no_miss():
    found = miss({"peak_gib": 2.0}, [{"step": 1}, {"step": 2, "step_seconds": 0.5, "peak_gib": None}])
    assert found == {"step_seconds": 0.5}


def test_the_plan_of_a_cpu_is_of_memory_alone():
    plan = plan_start(CONFIG, MESH)
    watchers = Watchers()
    plan.report(watchers, 3)
    (event,) = watchers.events
    assert (event["step"], event["event"]) == (3, "plan") and "step_seconds" not in event
    parts = [value for key, value in event.items() if key.endswith("_gib") and key in planned.HELD.values()]
    assert 0 < sum(parts) < event["peak_gib"] < event["room_gib"] and event["weights_gib"] > 0
    assert not any(isinstance(value, dict) for value in event.values())  # W&B flattens those


def test_a_cpu_holds_what_the_heap_and_onednn_keep_besides(monkeypatch):
    """By hand: pieces of what passes, the experts' products in 16 bits, what later steps load; the rest is there."""
    monkeypatch.setattr(cpu_room, "is_built_by_rows", lambda dtype: True)
    monkeypatch.setattr(cpu_room.expert_passes, "why_not", lambda dtype: "experts are left to oneDNN")
    monkeypatch.setattr(cpu_room.attention_passes, "why_not_tiles", lambda: "attention is left to torch")
    monkeypatch.setattr(cpu_room, "resident_bytes", lambda: 2.0 * GIB)
    for changes, numbers, scattered in (
        ([], 32, SCATTERED),  # 512 rows are the mean: multiples of 32 up to 1024
        (["model.moe.n_experts=12", "model.moe.top_k=2"], 32 + 16, SCATTERED),  # 341: of 16 to 512, of 32 to 1024
        (["train.micro_batch_size=1"], 16, SCATTERED),  # of 16 up to all 256 tokens
        (["train.micro_batch_size=16", "model.d_model=512"], 32, 1.0),  # blocks of 4 MiB are mapped
        (["train.precision=fp32"], 0, SCATTERED),
    ):
        config = load_config(Path("configs/quickstart.yaml"), changes)
        event = planned.fields_of(config, MESH)
        state = rank_memory(step_of_rank(config, 1, 0)).total
        room = cpu_room.cpu_room(config, MESH)
        assert room.outside == 2 * GIB - state + LATER_BYTES + 6 * numbers * PRODUCT_BYTES
        tensors = sum(event.get(name, 0.0) for name in planned.HELD.values())
        passing = sum(event.get(planned.HELD[name], 0.0) for name in PASSING)
        expected = tensors + (scattered - 1) * passing + room.outside / GIB
        assert event["peak_gib"] == pytest.approx(expected) and room.scattered == scattered


def test_bf16_in_cpp_leaves_fewer_pieces(monkeypatch):
    monkeypatch.setattr(cpu_room.attention_passes, "why_not_tiles", lambda: None)
    for changes, scattered in (
        ([], SCATTERED_IN_BF16),
        (["train.precision=fp8"], SCATTERED_IN_BF16),  # of 16 bits between its products
        (["train.precision=fp32"], SCATTERED),
        (["train.precision=fp16"], SCATTERED),
        (["train.micro_batch_size=16", "model.d_model=512"], 1.0),
    ):
        assert cpu_room.cpu_room(load_config(Path("configs/quickstart.yaml"), changes), MESH).scattered == scattered
    monkeypatch.setattr(cpu_room.attention_passes, "why_not_tiles", lambda: "the processor does not multiply bf16")
    assert cpu_room.cpu_room(CONFIG, MESH).scattered == SCATTERED


def test_a_cpus_head_makes_few_logits_at_a_time():
    for precision, tokens, n_bytes in (("bf16", 512, 2), ("fp32", 256, 4)):
        event = planned.fields_of(load_config(Path("configs/quickstart.yaml"), [f"train.precision={precision}"]), MESH)
        assert event["logits_gib"] * GIB == n_bytes * (8192 * 256 + 2 * 8192 * tokens)  # weights, logits and gradient


def test_the_worst_moment_is_that_of_what_is_scattered():
    held = Held(0, 0, 0, 0, buffers=5.0, activations=3.0, head=0.0, logits=1.0, left=0.0)
    assert held.parts() == {GRADIENTS: 5.0} and held.pieces == 0
    scattered = dataclasses.replace(held, scattered=2.0)
    assert scattered.parts() == {"activations": 3.0, "logits": 1.0} and scattered.pieces == 4.0


def test_the_worst_moment_may_be_an_update_of_whole_matrices():
    held = Held(1.0, 0, 0, 0, buffers=5.0, activations=3.0, head=1.0, logits=1.0, left=0.0, matrices=6.0, scattered=2.0)
    assert held.parts()["logits"] == 1.0 and MATRICES not in held.parts()  # 2 x 5 of the head's
    more = dataclasses.replace(held, matrices=11.0)
    assert more.parts() == {"weights": 1.0, MATRICES: 11.0} and more.pieces == 0


def test_other_ranks_and_a_key_keep_it_silent():
    without = dataclasses.replace(CONFIG, metrics=dataclasses.replace(CONFIG.metrics, plan=False))
    watchers = Watchers()
    for plan in (plan_start(without, MESH), plan_start(CONFIG, SimpleNamespace(**{**vars(MESH), "rank": 1}))):
        plan.report(watchers, 0)
        for row in rows(MISS_AFTER):
            plan.observe(row, watchers)
    assert watchers.events == []


def test_planted_a_planner_that_breaks_costs_a_line_and_no_run(monkeypatch, capsys, tmp_path):
    def breaks(*_):
        raise ZeroDivisionError("nothing\nto divide")

    monkeypatch.setattr(planned, "quick_plan", breaks)
    watchers, plan = Watchers(), plan_start(CONFIG, MESH)
    plan.report(watchers, 0)
    said = capsys.readouterr().err
    assert watchers.events == [] and said.count("\n") == 1
    assert said.startswith("warning: this start could not be planned (ZeroDivisionError: nothing\\nto divide); metrics")


def test_planted_a_miss_that_breaks_costs_a_line_and_no_run(capsys):
    watchers, plan = Watchers(), Planned({"step_seconds": "torn"})
    for row in rows(MISS_AFTER + 3):
        plan.observe(row, watchers)
    said = capsys.readouterr().err
    assert watchers.events == [] and said.count("\n") == 1
    assert said.startswith("warning: the plan could not be compared with what was measured")


MODELS = sorted(Path("configs/models").glob("*.yaml"))


@pytest.mark.parametrize("name", known_hardware())
def test_layouts_that_nobody_chose_are_planned_on_every_gpu(name):
    """Published models under random legal layouts, precisions and optimizers: a plan, or what the GPU lacks."""
    hardware, draws, planned_now = read_hardware(name), random.Random(name), 0
    for model in draws.sample(MODELS, 2):
        gpus = 2 ** draws.randrange(8)
        batch = f"train.global_batch_size={gpus * 2 ** draws.randrange(4)}"
        words = (
            f"optimizer.name={draws.choice(('adamw', 'sgd', 'muon'))}",
            f"data.seq_len={2 ** draws.randrange(6, 13)}",
        )
        config = load_config(model, [batch, f"train.precision={draws.choice(('bf16', 'fp16', 'fp32'))}", *words])
        legal = list(itertools.islice(layouts(config, gpus, 8), 20))
        for each in draws.sample(legal, min(2, len(legal))):
            found = quick_plan(each, gpus, hardware, room_on(hardware))
            assert found["tensor_bytes"] > 0 and found["step_seconds"] > 0 and 0 <= found["chance_to_fit"] <= 1
            planned_now += 1
    assert planned_now


@pytest.mark.parametrize(
    ("model", "overrides", "gpus", "position"),
    [
        ("qwen3-30b-a3b", ["parallel.pp=4", "parallel.ep=4", "parallel.pipeline.layers=[8,8,24,8]"], 16, 2),
        ("qwen3-30b-a3b", ["parallel.pp=8", "train.recompute=full"], 8, 2),
        ("gemma-2-27b", ["parallel.pp=16", "parallel.pipeline.name=zbv"], 16, 14),
        ("deepseek-v3", ["parallel.pp=16", "parallel.pipeline.name=interleaved"], 16, 3),
        ("olmoe-1b-7b-0924", ["parallel.pp=8", "train.recompute=full"], 8, 6),
    ],
)
def test_whatever_position_holds_most_is_found(model, overrides, gpus, position):
    """Each of the positions is looked at one by one to compare."""
    batch = ["train.micro_batch_size=1", "train.global_batch_size=64", "data.seq_len=4096"]
    config = load_config(Path(f"configs/models/{model}.yaml"), [*batch, *overrides])
    job, _ = job_on(config, gpus, None)
    held = [held_by(config, gpus, job, each).total for each in range(job.pp)]
    assert held.index(max(held)) == position and fullest(config, gpus, job).total == held[position]
    assert memory_of(job).tensors == max(position_memory(job, each).tensors for each in range(job.pp))
    assert memory_of(job).tensors == pytest.approx(held[position], rel=1e-2)


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("gemma-3-1b", []),
        ("llama-3-8b", []),
        ("deepseek-v2-lite", []),
        ("deepseek-v3", ["model.mtp={depth: 1}", "parallel.ep=64"]),
    ],
)
@pytest.mark.parametrize("pipeline", ["1f1b", "zbv"])
def test_closed_forms_count_the_weights_that_each_position_has(model, overrides, pipeline):
    """Without norms. In a V the first position has the embedding and the head, which are one matrix where tied.

    Beside a module for further tokens lies another embedding.
    """
    changes = ["parallel.pp=4", f"parallel.pipeline.name={pipeline}", "train.global_batch_size=64", *overrides]
    config = load_config(Path(f"configs/models/{model}.yaml"), changes)
    job, _ = job_on(config, 256, None)
    for position in range(4):
        counted = sum(own_weights(job, position, layers_of(job, position)))
        assert counted == pytest.approx(sum(step_of_rank(config, 256, position).weights.values()), rel=0.01)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("degrees", [(4, 1, 4), (4, 2, 8), (8, 1, 24), (2, 2, 8), (1, 4, 8)])
def test_a_search_counts_the_state_of_experts_as_a_start_does(zero, degrees):
    """Where tp is larger than ep several of its ranks hold an expert, and ZeRO cuts it over these, too."""
    tp, ep, world_size = degrees
    changes = [f"parallel.tp={tp}", f"parallel.ep={ep}", f"parallel.zero={zero}", "train.global_batch_size=48"]
    config = load_config(Path("configs/models/olmoe-1b-7b-0924.yaml"), changes)
    job, _ = job_on(config, world_size, None)
    state = rank_memory(step_of_rank(config, world_size, 0)).total
    assert position_memory(job, 0).state == pytest.approx(state, rel=0.01)


# Two layers, one with a window, over 8,192 tokens: GB and seconds of `roundtable plan --gpu H100`, 2026-11-27.
TRACED = {"gemma-2-2b": (21.75, 0.194), "gpt-oss-20b": (56.76, 0.142)}


@pytest.mark.parametrize("name", TRACED)
def test_scores_that_are_in_memory_are_counted(name):
    """Within a tenth of what is traced, and seconds within half: sinks ride on FlashAttention, capped scores do not."""
    run = ["train.micro_batch_size=1", "train.global_batch_size=1", "data.seq_len=8192", "train.recompute=none"]
    layers = ["model.n_layers=2", "model.full_attention_layers=[1]"]
    config = load_config(Path(f"configs/models/{name}.yaml"), [*run, *layers])
    plan = quick_plan(config, 1, read_hardware("H100"), None)
    gigabytes, seconds = TRACED[name]
    assert plan["tensor_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.1)
    assert plan["step_seconds"] == pytest.approx(seconds, rel=0.5)
    whole = load_config(Path(f"configs/models/{name}.yaml"), [*run, "data.seq_len=131072"])
    (job, _) = job_on(whole, 1, read_hardware("H100"))
    assert job.ours is not None
    assert job.ours.scores == (6 * 4 * 2**26 if name == "gemma-2-2b" else 0)  # of a piece, however long the rows


# Four layers of Qwen3-8B over 4,096 tokens: GB of `roundtable plan --gpu H100`, 2026-11-28; without gates 42.75, 41.71.
@pytest.mark.parametrize(("mode", "gigabytes"), [("none", 44.22), ("selective", 42.92)])
def test_gates_of_attention_are_counted(mode, gigabytes):
    run = ["train.micro_batch_size=1", "train.global_batch_size=1", "data.seq_len=4096", f"train.recompute={mode}"]
    gated = ["model.family=none", "model.attention_gate=elementwise", "model.n_layers=4"]
    config = load_config(Path("configs/models/qwen3-8b.yaml"), [*run, *gated])
    plan = quick_plan(config, 1, read_hardware("H100"), None)
    assert plan["tensor_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.03)


# Three layers of linear attention and one of attention over 8 x 4,096 tokens, of Qwen3-Next's dims with 32 experts: GB
# of `roundtable plan --gpu H100`, 2026-11-29. The rule is its package's kernels'; in fp32, of four linear layers
# without experts over 8 x 2,048 tokens, torch's operations.
LINEAR = [
    *("model.vocab_size=16384", "model.d_model=2048", "model.n_layers=4", "model.n_heads=16", "model.n_kv_heads=2"),
    *("model.d_head=256", "model.d_ff=5120", "model.norm_adds_one=true", "model.qk_norm=true"),
    *("model.attention_gate=elementwise", "model.rope_fraction=0.25", "model.tie_embeddings=false"),
    "model.linear_attention={n_k_heads: 16}",
    *("train.micro_batch_size=8", "train.global_batch_size=8"),
]
MIXED = [
    *("model.family=qwen3_next", "data.seq_len=4096", "model.full_attention_layers=[3]", "train.precision=bf16"),
    "model.moe={n_experts: 32, top_k: 4, d_ff: 512, n_shared_experts: 1, shared_d_ff: 512, shared_gate: true}",
]
WIDE = ["model.family=none", "data.seq_len=2048", "model.full_attention_layers=[]", "train.precision=fp32"]
WIDE += ["model.moe=null"]


@pytest.mark.parametrize(
    ("of", "mode", "gigabytes"),
    [
        (MIXED, "none", 27.57),
        (MIXED, "selective", 21.54),
        (MIXED, "feed_forward", 21.84),
        (MIXED, "full", 17.48),
        (WIDE, "full", 15.08),
    ],
)
def test_linear_attention_is_counted(of, mode, gigabytes):
    config = load_config(Path("configs/quickstart.yaml"), [*LINEAR, *of, f"train.recompute={mode}"])
    plan = quick_plan(config, 1, read_hardware("H100"), None)
    assert plan["tensor_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.05)


def test_a_report_shows_the_last_starts_plan():
    events = [
        {"step": 0, "event": "plan", "peak_gib": 1.0, "step_seconds": 9.0},
        {"step": 4, "event": "plan", "peak_gib": 2.0, "step_seconds": 0.5, "gpu": "H100", "tokens_per_second": 10.0},
        {"step": 4, "event": "start"},
    ]
    found = {what: row for what, *row in planned_rows(None, planned_at_start(events), {"step_seconds": 0.75})}
    assert found["step"] == ["0.5 s on H100", "0.75 s", "median; 1.50 times the plan"]
    assert found["peak memory"][0] == "2 GiB on H100" and found["MFU"][:2] == ["", ""]
    memory = {"step": 0, "event": "plan", "peak_gib": "torn"}
    assert all(not row[1] for row in planned_rows(None, planned_at_start([memory]), {}))
    assert planned_at_start([]) is None


def test_each_part_of_a_plan_has_a_name_in_events():
    held, found = Held(*[1.0] * len(dataclasses.fields(Held))), set()
    for changes in ({"buffers": 0.0}, {"buffers": 9.0}, {"matrices": 99.0}):  # the head, a reduction, the update
        found |= set(dataclasses.replace(held, **changes).parts())
    assert found == set(HELD)
