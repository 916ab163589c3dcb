"""Stages: which layers they hold, what they keep of the decoder, and that in a row they are the decoder."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modeling.decoder import build_decoder
from modeling.init import materialize
from parallel.pipeline.config import SCHEDULES, ZBV, DualPipeV, Interleaved, OneFOneB, PipelineConfig, stage_ranks
from parallel.pipeline.stages import (
    Part,
    Stage,
    even_layers,
    is_second_copy,
    keep_parts,
    pipeline_parts,
    rank_parts,
    tied_weight,
)
from pp_runs import BIAS, DENSE, MOE, Case, batch_of, micro_batches


@given(
    costs=st.lists(st.floats(0.1, 9.0), min_size=1, max_size=7),
    n_stages=st.integers(1, 7),
    ends=st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 9.0)),
)
def test_even_layers_is_the_best_of_all(costs, n_stages, ends):
    n_stages = min(n_stages, len(costs))

    def stage_costs(counts):
        sums, start = [], 0
        for count in counts:
            sums.append(sum(costs[start : start + count]))
            start += count
        sums[0] += ends[0]
        sums[-1] += ends[1]
        return sums

    counts = even_layers(costs, n_stages, *ends)
    assert sum(counts) == len(costs) and min(counts) >= 1 and len(counts) == n_stages
    choices = [one for one in product(range(1, len(costs) + 1), repeat=n_stages) if sum(one) == len(costs)]
    assert max(stage_costs(counts)) <= min(max(stage_costs(one)) for one in choices) * (1 + 1e-12)


def test_as_many_stages_as_a_large_model_has_layers():
    costs = [1.0, 2.0, 3.0] * 100
    assert even_layers(costs, 300, 0.05, 1.3) == [1] * 300
    assert even_layers(costs, 296, 9.0, 9.0) == [1] * 288 + [2, 1] * 4


def test_of_equally_good_splits_the_one_with_the_most_layers_at_the_end_is_taken():
    assert even_layers([1.0] * 10, 4, 0.0, 0.0) == [2, 2, 3, 3]
    assert even_layers([1.0] * 5, 3, 1.0, 1.0) == [1, 2, 2]


def test_equal_layers_are_dealt_evenly_and_a_large_head_takes_layers_away():
    assert even_layers([1.0] * 8, 4, 0.0, 0.0) == [2, 2, 2, 2]
    assert even_layers([1.0] * 96, 32, 0.05, 1.3)[-1] == 2


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (OneFOneB(), [0, 1, 2]),
        (Interleaved(), [0, 1, 2, 0, 1, 2]),
        (ZBV(), [0, 1, 2, 2, 1, 0]),
        (DualPipeV(), [0, 1, 2, 2, 1, 0]),
    ],
)
def test_stage_ranks(config: PipelineConfig, ranks):
    assert stage_ranks(config, 3) == ranks


@pytest.mark.parametrize("schedule", [*SCHEDULES, Interleaved(n_chunks=3)], ids=str)
def test_ranks_hold_each_layer_once_in_order(schedule):
    config = replace(DENSE, n_layers=9)
    parts = pipeline_parts(config, schedule, 3)
    assert [layer for part in parts for layer in part.layers] == list(range(9))
    held = [layer for rank in range(3) for part in rank_parts(config, schedule, 3, rank) for layer in part.layers]
    assert sorted(held) == list(range(9))
    assert [part.has_embedding for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.has_head for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_kept_parts_keep_their_names_and_weights(schedule, tied):
    config = replace(MOE, tie_embeddings=tied)
    whole = built(config)
    names: list[str] = []
    for rank in range(2):
        parts = rank_parts(config, schedule, 2, rank)
        with torch.device("meta"):
            model = build_decoder(config)
        keep_parts(model, parts)
        assert all(parameter.is_meta for parameter in model.parameters())
        materialize(model, config, 0, "cpu", torch.float32)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
        names += [name for name, _ in model.named_parameters()]
        copy = tied_weight(model, config, parts, 2)
        assert (copy is not None) == (tied and schedule.name in ("1f1b", "interleaved"))
        if copy is not None:
            assert copy is model.get_parameter("embed.weight")
            assert is_second_copy(parts) == (rank == 1)
            if is_second_copy(parts):
                assert model.head.weight is copy
                names.remove("embed.weight")
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())


@pytest.mark.parametrize("config", [MOE, BIAS, replace(DENSE, tie_embeddings=True)], ids=["moe", "bias", "dense_tied"])
def test_stages_in_a_row_are_the_decoder(config):
    model = built(config)
    ready, _ = micro_batches(batch_of(Case(config, OneFOneB(), n_micro=1), 0))
    again, _ = micro_batches(batch_of(Case(config, OneFOneB(), n_micro=1), 0))
    expected = model(ready[0].tokens_BS, ready[0].context, ready[0].targets_BS)
    carried = torch.zeros(0)
    stats = {}
    for index, layers in enumerate([range(2), range(2, 3), range(3, 5)]):
        stage = Stage(model, Part(index, 3, layers))
        stage.open(again)
        carried = stage(carried, torch.tensor([0]))
        stats |= stage.close()[0].stats
    assert torch.equal(carried, expected.loss)
    assert stats.keys() == expected.stats.keys()
    for layer, one in stats.items():
        assert torch.equal(one.counts_E, expected.stats[layer].counts_E)


def built(config):
    with torch.device("meta"):
        model = build_decoder(config)
    materialize(model, config, 0, "cpu", torch.float32)
    return model


def test_a_stage_drops_what_the_decoder_drops():
    config = replace(DENSE, embedding_dropout=0.1, residual_dropout=0.2)
    with torch.device("meta"):
        stage = build_decoder(config).part_of([0], has_embedding=True, has_head=False)
    assert (stage.drop_embedding.probability, stage.own_layers[0].drop_attention.probability) == (0.1, 0.2)
