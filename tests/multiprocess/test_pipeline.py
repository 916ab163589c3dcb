"""Every schedule on two and four processes against one plain process: losses, gradients, routing, evaluation, order.

Tolerances: fp32 sums in another order. Losses (fp64 sums of fp32 terms) to 1e-6 relative; each gradient to 1e-5 of its
own norm; counts exactly. SGD is used because it is linear in the gradient. `make test` runs every schedule and every
model, `make test-slow` every pair of them.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from parallel.pipeline.config import SCHEDULES, ZBV, DualPipeV, Interleaved, OneFOneB, chunks
from parallel.pipeline.draw import peak_activations
from parallel.pipeline.schedule import action_orders
from parallel.pipeline.volume import sent_bytes
from pp_runs import BIAS, DENSE, MOE, Case, errors, reference, run_case
from rotating import fast_where

BOUNDS = {"loss": 1e-6, "eval": 1e-6, "gradient": 1e-5, "counts": 0.0, "balance": 1e-6}
MODELS = {
    "moe": MOE,
    "moe_tied": replace(MOE, tie_embeddings=True),
    "bias": BIAS,
    "dense_tied": replace(DENSE, tie_embeddings=True),
}


def by_name(value):
    return getattr(value, "name", value)


def check(case: Case) -> None:
    """The case equals one process, and did and sent what its schedule says."""
    ours = run_case(case)
    found = errors(ours, reference(replace(case, pp=1, pipeline=OneFOneB(), recompute="none")))
    assert all(found[name] <= bound for name, bound in BOUNDS.items()), found
    orders = action_orders(case.pipeline, case.pp, case.n_micro)
    assert ours.orders == [[f"{action.stage}{action.kind}{action.micro_batch}" for action in order] for order in orders]
    assert ours.peaks == [peak_activations(order) for order in orders]
    hidden_bytes = case.micro_batch_size * 24 * case.model.d_model * 4
    tied = case.model.vocab_size * case.model.d_model if case.model.tie_embeddings else 0
    assert ours.sent == [
        sent_bytes(case.pipeline, case.pp, rank, case.n_micro, hidden_bytes, tied) for rank in range(case.pp)
    ]


@pytest.mark.parametrize(
    ("schedule", "model"),
    fast_where(
        product(SCHEDULES, ["moe", "moe_tied", "dense_tied"]),
        lambda schedule, model: model == "moe_tied" and schedule != Interleaved(),  # test_pipeline_deepspeed.py has it
    ),
    ids=by_name,
)
def test_two_stages_equal_one_process(schedule, model):
    check(Case(MODELS[model], schedule))


FAST_ON_FOUR = [(OneFOneB(), "dense_tied")]  # odd numbers of micro-batches of other schedules are below


@pytest.mark.parametrize(
    ("schedule", "model"),
    fast_where(product(SCHEDULES, ["bias", "dense_tied"]), lambda *case: case in FAST_ON_FOUR),
    ids=by_name,
)
def test_four_ranks_equal_one_process(schedule, model):
    check(Case(replace(MODELS[model], n_layers=9), schedule, pp=4, n_micro=8, micro_batch_size=1))


EACH_ITS_OWN = ("full", "selective", "feed_forward", "none", "selective")
FAST_RECOMPUTATION = {"1f1b": EACH_ITS_OWN, "dualpipev": "feed_forward"}


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    fast_where(
        product(SCHEDULES, ["full", "feed_forward", "selective", EACH_ITS_OWN]),
        lambda schedule, recompute: FAST_RECOMPUTATION.get(schedule.name) == recompute,
    ),
    ids=by_name,
)
def test_recomputation_changes_nothing(schedule, recompute):
    check(Case(MOE, schedule, recompute=recompute, n_micro=4, steps=1))


@pytest.mark.parametrize(
    ("schedule", "layers"),
    fast_where(
        [(OneFOneB(), (4, 1)), (Interleaved(), (1, 2, 1, 1)), (ZBV(), (2, 1, 1, 1)), (DualPipeV(), (1, 1, 1, 2))],
        lambda schedule, layers: schedule.name == "dualpipev",
    ),
    ids=str,
)
def test_uneven_layers_and_padding(schedule, layers):
    check(Case(MODELS["moe_tied"], replace(schedule, layers=layers), n_micro=4, padded=True, steps=1))


@pytest.mark.parametrize(
    ("schedule", "pp", "n_micro"),
    fast_where(
        [
            (OneFOneB(), 2, 2),
            (OneFOneB(), 2, 7),
            (Interleaved(n_chunks=3), 2, 6),
            (Interleaved(), 2, 1),
            (Interleaved(), 4, 3),
            (Interleaved(), 4, 10),
            (ZBV(), 2, 1),
            (ZBV(), 4, 3),
            (DualPipeV(), 2, 5),
            (DualPipeV(), 4, 9),
        ],
        lambda schedule, pp, n_micro: n_micro in (5, 7),
    ),
    ids=str,
)
def test_numbers_of_micro_batches(schedule, pp, n_micro):
    n_layers = pp * chunks(schedule)
    check(Case(replace(DENSE, n_layers=n_layers), schedule, pp=pp, n_micro=n_micro, micro_batch_size=1, steps=1))


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved()], ids=by_name)
def test_tied_copies_stay_bitwise_equal(schedule):
    copies = run_case(Case(MODELS["moe_tied"], schedule)).copies
    assert torch.equal(copies[0]["embed.weight"], copies[1]["embed.weight"])


PLANTED = [
    ("stage initialized like another", "loss"),
    ("tied gradient not reduced", "gradient"),
    ("last micro-batch dropped", "loss"),
    ("loss scaled per stage", "gradient"),
    ("context of another micro-batch", "loss"),
]
FAST_UNDER_1F1B = ("loss scaled per stage", "context of another micro-batch")  # the others in chunks of layers


@pytest.mark.parametrize(
    ("schedule", "fault", "check_name"),
    fast_where(
        [(schedule, *planted) for schedule in (OneFOneB(), Interleaved()) for planted in PLANTED],
        lambda schedule, fault, check_name: (schedule.name == "1f1b") == (fault in FAST_UNDER_1F1B),
    ),
    ids=by_name,
)
def test_planted_fault_is_seen(schedule, fault, check_name):
    case = Case(MODELS["moe_tied"], schedule, n_micro=5 if fault == "last micro-batch dropped" else 8)
    if fault == "last micro-batch dropped" and schedule.name == "interleaved":
        case = replace(case, n_micro=3)
    found = errors(run_case(replace(case, fault=fault)), reference(replace(case, pp=1, pipeline=OneFOneB())))
    assert found[check_name] > 10 * BOUNDS[check_name], found
