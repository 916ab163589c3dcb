"""What ZeRO 3 gathers where a rank computes with more weights than DeepSpeed keeps: the replay against DeepSpeed.

The sizes are small ones, so that a small model's weights lie above all of them; each weight's count is exact.
"""

import dataclasses
import random
from collections import Counter

import pytest

from gather_runs import PRELOAD, begun_in_step, count_gathers
from launcher.config.tree import RunConfig
from launcher.traffic import gathers
from launcher.traffic.gathers import Passes, gathers_by_weight, pass_events
from launcher.traffic.step import Step
from launcher.traffic.zero import gathers_of
from layout_runs import MOE_MODEL, run_config, write_tokens
from modeling.config import ModelConfig
from parallel.config import ParallelConfig
from parallel.processes.start import run_ranks
from parallel.sizes import Sizes
from rendezvous import stuck
from traffic_models import LATENT, PLAIN, POST_NORM

assert MOE_MODEL.moe is not None
FOUR_LAYERS = dataclasses.replace(MOE_MODEL, n_layers=4)
NO_SHARED = dataclasses.replace(
    FOUR_LAYERS, tie_embeddings=False, moe=dataclasses.replace(MOE_MODEL.moe, n_shared_experts=0)
)
MODELS = {
    "tied": FOUR_LAYERS,
    "no shared": NO_SHARED,
    "latent": dataclasses.replace(LATENT, n_layers=4),
    "post": dataclasses.replace(POST_NORM, n_layers=4),
    "plain": PLAIN,
}
MODES = ("none", "selective", "feed_forward", "full")
# Between them every rule decides: what is used soon, what the prefetcher has passed, what may be whole at once.
CASES = [
    Sizes(persistent=50, prefetched=0, reused=30_000, live=40_000),
    Sizes(persistent=600, prefetched=5000, reused=30_000, live=40_000),
    Sizes(persistent=0, prefetched=500, reused=2000, live=10_000),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def config_of(tokens: str, model: ModelConfig, recompute: str, micro_batch_size: int = 1) -> RunConfig:
    return run_config(
        tokens, model=model, parallel=ParallelConfig(zero=3), recompute=recompute, micro_batch_size=micro_batch_size
    )


def step_of(config: RunConfig, sizes: Sizes) -> Step:
    return Step(
        model=config.model,
        optimizer=config.optimizer,
        parallel=config.parallel,
        world_size=2,
        seq_len=config.data.seq_len,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        precision=config.train.precision,
        recompute=config.train.recompute,
        sizes=sizes,
    )


def counted(config: RunConfig, cases: list[Sizes]) -> list[dict[str, int]]:
    """Both ranks gather alike."""
    first, second = run_ranks(count_gathers, 2, config, cases, timeout_seconds=400, threads=1, preload=PRELOAD)
    assert first == second
    return first


def replayed(config: RunConfig, sizes: Sizes) -> dict[str, int]:
    step = step_of(config, sizes)
    return {name: count for name, count in gathers_by_weight(step).items() if step.weights[name] > sizes.persistent}


@pytest.mark.parametrize("cases", [CASES[2:], pytest.param(CASES, marks=pytest.mark.slow)], ids=["one", "all"])
def test_each_weight_is_gathered_as_often_as_deepspeed_does(cases, tokens, monkeypatch):
    """And planted: without DeepSpeed's cache of what it drops the replay is another."""
    config = config_of(tokens, FOUR_LAYERS, "full")
    found = counted(config, cases)
    assert found == [replayed(config, sizes) for sizes in cases]
    n_micro_batches = step_of(config, CASES[0]).n_micro_batches
    assert any(n_micro_batches < count for counts in found for count in counts.values())
    monkeypatch.setattr(Passes, "decide", lambda passes, whole: None)
    assert found != [replayed(config, sizes) for sizes in cases]


def test_selective_gathers_no_weight_outside_of_its_module(tokens):
    """It asks a layer's experts how they are computed, before the router: a weight that is read there is gathered."""
    config = config_of(tokens, FOUR_LAYERS, "selective")
    sizes = Sizes(persistent=600, prefetched=0, reused=0, live=10_000)
    assert counted(config, [sizes]) == [replayed(config, sizes)]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_so_it_is_for_sizes_that_are_drawn(model, recompute, tokens):
    draw = random.Random(f"{model} {recompute}")
    cases = [
        Sizes(
            persistent=draw.choice((0, 50, 600)),
            prefetched=draw.choice((0, 500, 2000, 5000)),
            reused=draw.choice((0, 2000, 10_000, 30_000)),
            live=draw.choice((3000, 10_000, 40_000, 10**9)),
        )
        for _ in range(5)
    ]
    config = config_of(tokens, MODELS[model], recompute)
    assert counted(config, cases) == [replayed(config, sizes) for sizes in cases]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [2, 4])
def test_so_it_is_with_two_micro_batches_and_with_one(micro_batch_size, tokens):
    """The pass that decides is then the first of a step, when small weights are whole."""
    config = config_of(tokens, FOUR_LAYERS, "none", micro_batch_size)
    assert counted(config, CASES) == [replayed(config, sizes) for sizes in CASES]


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_with_few_weights_gathers_as_the_table_says(model, recompute, tokens):
    """docs/traffic.md: once a micro-batch, an embedding once a step."""
    config = config_of(tokens, MODELS[model], recompute)
    step = step_of(config, Sizes(persistent=100))
    names = [name for name in step.weights if step.weights[name] > 100]
    table, found = gathers_of(step, names), gathers_by_weight(step)
    assert {name: found[name] for name in names} == table


def test_experts_and_dense_weights_are_gathered_in_one_order(tokens):
    """Both lie on several ranks, in groups of their own; NCCL needs one order of the groups on all ranks."""
    config = config_of(tokens, FOUR_LAYERS, "none")
    config = dataclasses.replace(config, parallel=ParallelConfig(ep=2, zero=3))
    given = (config, Sizes(persistent=0, prefetched=5000))
    queues = run_ranks(begun_in_step, 4, *given, timeout_seconds=280, threads=1, preload=PRELOAD)
    assert {(0, 1, 2, 3), (0, 2)} < {begun.ranks for entry in queues[0] for begun in entry}
    assert stuck(queues) == []


def test_a_pass_takes_each_weight_forwards_and_backwards(tokens):
    step = step_of(config_of(tokens, FOUR_LAYERS, "none"), CASES[0])
    uses = Counter(name for event in pass_events(step) if event.kind == "fetch" for name in event.names)
    routers = {name for name in step.weights if name.endswith("router.weight")}
    assert set(uses) == set(step.weights) and routers
    assert all(uses[name] == 4 for name in routers | {"embed.weight"})  # three outputs; also the head
    assert all(count == 2 for name, count in uses.items() if name not in routers | {"embed.weight"})
    assert gathers.KNOWN_FROM == 1
