"""`train.activation_gib`: which layer recomputes what, and that it is as little as the budget allows."""

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.closed_form import budget
from launcher.closed_form.again import again_of, kind_of
from launcher.closed_form.budget import GIB, MODES, halfway_gib, least_gib, modes_of, rounded_up, told, within
from launcher.closed_form.choose import Option, choose
from launcher.closed_form.held import LayerHeld, Moment, held_at, moments_of, most_held, worst_moments
from launcher.closed_form.own_memory import layers_of_stages
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.prove.shrink import shrink
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB, PipelineConfig
from parallel.pipeline.schedule import action_orders
from parallel.recompute import Recompute

DENSE = ("train.global_batch_size=64", "parallel.pp=4", "parallel.tp=2", "data.seq_len=8192")
PLAIN = Moment((1,), 0)


def config_of(name: str, *overrides: str) -> RunConfig:
    return load_config(Path(f"configs/models/{name}.yaml"), list(overrides))


def some_options(draw: random.Random) -> tuple[Option, ...]:
    """Modes of a layer: each keeps less than the one before, and computes more again."""
    kept = sorted((draw.uniform(1, 10) for _ in range(4)), reverse=True)
    work = [0.0, *sorted(draw.uniform(0.1, 5) for _ in range(3))]
    return tuple(Option(LayerHeld(each, draw.uniform(0, 3)), cost) for each, cost in zip(kept, work, strict=True))


def work_of(stages: Sequence[Sequence[Sequence[Option]]], taken: Sequence[Sequence[int]]) -> float:
    return sum(
        layer[option].work
        for layers, own in zip(stages, taken, strict=True)
        for layer, option in zip(layers, own, strict=True)
    )


def least_work(stages: Sequence[Sequence[Sequence[Option]]], moments: Sequence[Moment], limit: float) -> float | None:
    """Of all choices, one by one; None where none stays within the limit."""
    sizes, best = [len(layers) for layers in stages], None
    for flat in itertools.product(range(4), repeat=sum(sizes)):
        places = iter(flat)
        taken = [list(itertools.islice(places, size)) for size in sizes]
        held = [
            [layer[o].held for layer, o in zip(layers, own, strict=True)]
            for layers, own in zip(stages, taken, strict=True)
        ]
        if most_held(held, moments) <= limit:
            work = work_of(stages, taken)
            best = work if best is None else min(best, work)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_a_choice_is_within_its_limit_and_near_the_least_work_that_is(seed):
    draw = random.Random(seed)
    kinds = [some_options(draw) for _ in range(2)]
    if seed % 2:
        stages, moments = (
            [[draw.choice(kinds) for _ in range(3)] for _ in range(2)],
            [Moment((3, 1), 0), Moment((2, 2), 1)],
        )
    else:
        stages, moments = [[draw.choice(kinds) for _ in range(5)]], [PLAIN]
    most = choose(stages, moments, math.inf)
    assert all(option == 0 for own in most.options for option in own)
    least = choose(stages, moments, 0.0).held
    for share in (0.1, 0.4, 0.7, 0.95):
        limit = least + share * (most.held - least)
        chosen, best = choose(stages, moments, limit), least_work(stages, moments, limit)
        assert chosen.held <= limit and best is not None
        largest = max(option.work for kind in kinds for option in kind)
        assert best - 1e-9 <= work_of(stages, chosen.options) <= best + largest


def test_planted_a_choice_by_the_first_mode_that_fits_all_layers_works_more():
    """What one mode for all layers would cost: the bound of the test above does not hold for it."""
    kind = tuple(Option(LayerHeld(kept, 0.0), work) for kept, work in ((10, 0), (6, 1), (3, 4), (1, 6)))
    stages = [[kind] * 6]
    limit = 45.0
    alike = next(work_of(stages, [[mode] * 6]) for mode in range(4) if 6 * kind[mode].held.kept <= limit)
    best = least_work(stages, [PLAIN], limit)
    assert best is not None and work_of(stages, choose(stages, [PLAIN], limit).options) == best
    assert alike > best


def test_what_cannot_be_kept_gets_the_least_that_is_held():
    kind = tuple(Option(LayerHeld(kept, 0.0), work) for kept, work in ((10, 0), (6, 1), (3, 4), (1, 6)))
    assert choose([[kind] * 3], [PLAIN], 2.0).options == [[3, 3, 3]]
    alone = (Option(LayerHeld(2.0, 1.0), 0.0), Option(LayerHeld(0.1, 4.0), 1.0))  # computing again needs more room
    assert choose([[alone]], [PLAIN], 1.0).options == [[0]]


def test_heavier_modes_come_first_where_the_backward_pass_comes_last():
    """It computes again when what later layers have left is gone."""
    kind = (Option(LayerHeld(4.0, 2.0), 0.0), Option(LayerHeld(1.0, 6.0), 1.0))
    chosen = choose([[kind] * 4], [PLAIN], 13.0)
    assert chosen.options == [[1, 1, 0, 0]] and chosen.held == 12.0
    turned = [[kind[option].held for option in reversed(chosen.options[0])]]
    assert held_at(turned, PLAIN) == 16.0


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved(), ZBV(), DualPipeV()], ids=lambda each: each.name)
def test_moments_are_the_fullest_of_the_schedule(schedule: PipelineConfig):
    """No moment of any position's own order of passes holds more, whatever its layers leave."""
    pp, n = 4, 16
    draw = random.Random(0)
    for position, actions in enumerate(action_orders(schedule, pp, n)):
        own = sorted({each.stage for each in actions})
        stages = [[LayerHeld(draw.random(), draw.random(), draw.random())] for _ in own]
        now, put_off, most = [0] * len(own), [0] * len(own), 0.0
        for action in actions:
            place = own.index(action.stage)
            held = [(count, later) for count, later in zip(now, put_off, strict=True)]
            if action.kind == "F":
                now[place] += 1
                continue
            if action.kind == "W" and action.stage > 0:
                put_off[place] -= 1
                continue
            if action.kind == "I" and action.stage == 0:
                continue  # torch leaves all to the second part
            (layer,) = stages[place]
            kept = sum(n * each.kept + m * each.waiting for (n, m), (each,) in zip(held, stages, strict=True))
            most = max(most, kept + layer.working)
            now[place] -= 1
            if action.kind == "I":  # by whose end all layers of the stage wait
                most = max(most, kept - layer.kept + layer.waiting)
                put_off[place] += 1
        assert now == put_off == [0] * len(own)
        assert most_held(stages, worst_moments(schedule, pp, n)[position]) == pytest.approx(most)
        if isinstance(schedule, OneFOneB):
            assert moments_of(actions, own) == (Moment((pp - position,), 0, (0,)),)


def work_of_modes(config: RunConfig, modes: Sequence[Recompute]) -> float:
    """What layers of a model whose layers are alike compute again, by their modes."""
    kind, exchanges, seq_len = kind_of(config.model, 0), config.parallel.ep > 1, config.data.seq_len
    works = {
        mode: again_of(config.model, kind, mode, seq_len, exchanges=exchanges, weights_stay=True).work for mode in MODES
    }
    return sum(works[mode] for mode in modes)


def test_early_positions_compute_more_again():
    config = config_of("llama-3-8b", *DENSE)
    found = within(config, 16, 8.0)
    assert all(held <= 8.0 * GIB for held in found.held)
    costs = []
    for (layers,) in layers_of_stages(config.model, config.parallel.pipeline, 4):
        modes = [found.modes[layer] for layer in layers]
        costs.append(work_of_modes(config, modes))
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1] == 0.0


def test_windows_and_experts_are_told_apart():
    """A layer with a window is cheaper to compute again than one without, and keeps as much."""
    gemma = config_of("gemma-3-1b", "data.seq_len=8192")
    modes = within(gemma, 1, 3.0).modes
    full = [layer for layer, mode in enumerate(modes) if mode == "full"]
    assert full and all(gemma.model.window_of(layer) is not None for layer in full)
    deepseek = config_of("deepseek-v3", "parallel.ep=8", "data.seq_len=4096")
    modes = within(deepseek, 16, 21.0).modes
    assert set(modes[:3]) == {"selective"} and "full" in modes[3:] and len(modes) == len(deepseek.model.all_layers)


def test_more_room_never_means_more_work():
    config = config_of("qwen3-30b-a3b", "parallel.ep=8", "data.seq_len=4096")
    works = []
    least, _ = least_gib(config, 8)
    for share in range(1, 9):
        modes = within(config, 8, share * least).modes
        works.append(work_of_modes(config, modes))
    assert works == sorted(works, reverse=True)


def test_without_a_budget_all_layers_have_the_one_mode():
    config = config_of("llama-3-8b", "train.recompute=feed_forward")
    assert set(modes_of(config, 1)) == {"feed_forward"} and len(modes_of(config, 1)) == 32


def test_the_choice_depends_on_nothing_but_the_layout():
    """Ranks that compute a stage together would gather weights in other orders, and wait for each other."""
    config = config_of("qwen3-30b-a3b", "parallel.zero=3", "data.seq_len=4096", "train.activation_gib=12")
    first = modes_of(config, 8)
    budget.budgeted.cache_clear()
    renamed = dataclasses.replace(config, name="other", seed=3)
    assert modes_of(renamed, 8) == first and len(set(first)) > 1


def test_a_budget_below_full_recomputation_is_refused_and_the_remedy_works():
    config = config_of("llama-3-8b", *DENSE, "train.activation_gib=1.5")
    (line,) = check(config, 16)
    assert line.startswith("train.activation_gib=1.5 must be at least 1.9, which the ranks of pipeline position 0 of ")
    assert "parallel.pp=4 hold with full recomputation at train.micro_batch_size=1" in line and line.endswith(
        "; try 1.9"
    )
    assert check(config_of("llama-3-8b", *DENSE, "train.activation_gib=1.9"), 16) == []
    assert rounded_up(1.8901) == 1.9 and rounded_up(0.00012345) == 0.000124 and rounded_up(0.0) == 0.0


def test_a_proof_has_layers_of_several_modes():
    config = config_of("qwen3-30b-a3b", "parallel.pp=2", "train.activation_gib=9", "train.global_batch_size=64")
    small = shrink(config, 4)
    assert small.train.activation_gib == halfway_gib(small, 4) and check(small, 4, is_small=True) == []
    assert len(set(modes_of(small, 4))) > 1


def test_modes_are_told_in_runs():
    assert told(("full", "full", "none", "selective")) == "full in 0-1, none in 2, selective in 3"
    assert MODES == ("none", "selective", "feed_forward", "full")
