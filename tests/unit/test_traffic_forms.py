"""launcher.traffic's forms where numbers can be worked out by hand, and where there is none."""

import dataclasses
from fractions import Fraction
from typing import Any

import pytest

from launcher.traffic.axes import step_traffic, tp_traffic
from launcher.traffic.step import Step, around_ring
from launcher.traffic.zero import gathers_of
from modeling.config import ModelConfig
from modeling.moe_config import MoEConfig
from modeling.mtp_config import MTPConfig
from modeling.optimizers.config import AdamWConfig
from parallel.config import ParallelConfig

DENSE = Step(
    model=ModelConfig(vocab_size=10, d_model=6, n_layers=1, n_heads=2, n_kv_heads=2, d_head=2, d_ff=4),
    optimizer=AdamWConfig(),
    parallel=ParallelConfig(),
    world_size=1,
    seq_len=8,
    global_batch_size=4,
    micro_batch_size=1,
    precision="fp32",
    recompute="none",
)
MOE = dataclasses.replace(DENSE, model=dataclasses.replace(DENSE.model, moe=MoEConfig(n_experts=4, top_k=2, d_ff=4)))


def sent(step: Step) -> dict[tuple[str, str, str], Fraction]:
    return {(term.axis, term.what, term.collective): term.sent_bytes for term in step_traffic(step)}


def test_one_process_sends_nothing():
    assert step_traffic(DENSE) == [] and step_traffic(MOE) == []


@pytest.mark.parametrize(
    ("collective", "expected"), [("all-reduce", 30), ("all-gather", 15), ("reduce-scatter", 15), ("all-to-all", 15)]
)
def test_a_ring_of_four(collective, expected):
    assert around_ring(collective, 20, 4) == expected
    assert around_ring(collective, 20, 1) == 0


def test_a_buffer_that_ranks_do_not_divide_gives_a_fraction():
    assert around_ring("all-reduce", 20, 3) == Fraction(80, 3)


def test_tensor_parallelism_by_hand():
    """Two halves, embedding and head; 4 micro-batches of 8 tokens; of 192 bytes of hidden states half is sent."""
    by_what = {(term.what, term.collective): term.sent_bytes for term in tp_traffic(replaced(DENSE, 2, tp=2))}
    assert by_what["positions", "all-gather"] == 4 * 6 * 192 / 2
    assert by_what["positions", "reduce-scatter"] == 4 * 6 * 192 / 2
    assert by_what["gradients of what tp does not cut", "all-reduce"] == 3 * 6 * 4
    assert by_what["loss over the vocabulary", "all-reduce"] == 4 * 8 * 12


def test_recomputation_repeats_all_but_a_layers_last_sum():
    full = dataclasses.replace(replaced(DENSE, 2, tp=2), recompute="full")
    by_what = {(term.what, term.collective): term.sent_bytes for term in tp_traffic(full)}
    assert by_what["positions", "all-gather"] == 4 * 8 * 192 / 2
    assert by_what["positions", "reduce-scatter"] == 4 * 7 * 192 / 2


def test_zero_by_hand():
    """Weights: 60 + 60 of the vocabulary and 3 norms of 6 without decay; 4 x 24 of attention and 3 x 24 with it."""
    for zero, times in ((0, 1), (1, 1), (2, 2)):
        terms = sent(replaced(DENSE, 2, zero=zero))
        assert terms["replicas", "gradients", "all-reduce"] == times * 4 * (138 + 168)
        assert terms.get(("replicas", "weights", "all-gather"), 0) == (0 if zero == 0 else 4 * (138 + 2 + 168) / 2)
    terms = sent(replaced(DENSE, 2, zero=3))
    assert terms["replicas", "gradients", "reduce-scatter"] == 2 * 4 * 306 / 2
    assert terms["replicas", "weights", "all-gather"] == 4 * 306 / 2


def test_experts_travel_by_the_routing():
    """Of rank 0's pairs 3 leave, and of rank 1's 5 arrive: forward out and back, and backward the same."""
    routed = {0: [[4, 1, 2, 1], [2, 3, 0, 0]]}
    step = dataclasses.replace(replaced(MOE, 2, ep=2), routed=routed)
    assert sent(step)["ep", "tokens", "all-to-all"] == 2 * (3 + 5) * 6 * 4
    other = dataclasses.replace(step, ep_rank=1)
    assert sent(other)["ep", "tokens", "all-to-all"] == 2 * (5 + 3) * 6 * 4
    with pytest.raises(ValueError, match=r"depend on the routing: give Step\.routed"):
        step_traffic(dataclasses.replace(step, routed=None))


def test_zero_3_gathers_the_early_layers_of_a_large_model_twice():
    """Of 12 layers of 218 million elements each; the last ones are kept from their forward to their backward pass."""
    shape = {"d_model": 4096, "d_ff": 12288, "n_heads": 32, "n_kv_heads": 32, "d_head": 128, "n_layers": 12}
    large = dataclasses.replace(DENSE.model, vocab_size=100, **shape)
    step = dataclasses.replace(replaced(DENSE, 4, zero=3), model=large, global_batch_size=32)
    counts = gathers_of(step, list(step.weights))
    of_layer = [counts[f"layers.{layer}.attention.q.weight"] for layer in range(12)]
    assert step.n_micro_batches == 8 and of_layer[:6] == [16] * 6 and of_layer[-2:] == [8] * 2
    assert of_layer == sorted(of_layer, reverse=True) and set(of_layer) == {8, 16}


def test_what_has_no_form_is_refused():
    further = dataclasses.replace(DENSE.model, vocab_size=2**20, d_model=1024, mtp=MTPConfig(), family="none")
    with pytest.raises(ValueError, match="has no closed form"):
        step_traffic(dataclasses.replace(replaced(DENSE, 2, zero=3), model=further))


def replaced(step: Step, world_size: int, **parallel: Any) -> Step:
    """The step under another layout."""
    return dataclasses.replace(step, world_size=world_size, parallel=dataclasses.replace(step.parallel, **parallel))
