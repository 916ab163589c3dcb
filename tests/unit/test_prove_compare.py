"""What a proof measures with: errors, factors, coverage, ties, and the bounds of 16-bit precisions."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from launcher.prove.checks import (
    Check,
    check_cancelled,
    check_exact,
    check_series,
    check_tensors,
    check_updates,
    without_gradient,
)
from launcher.prove.compare.boxes import TensorBox, Uncovered, assemble
from launcher.prove.compare.errors import (
    execution_order,
    explain_norm,
    factor,
    name_ratio,
    tensor_errors,
    total_norm,
)
from launcher.prove.compare.routing import (
    NO_CHOICE,
    ChoiceReplay,
    HeldTokens,
    Replayed,
    StepChoices,
    routers_of,
)
from launcher.prove.noise_checks import check_noisy_gradients, check_noisy_losses
from launcher.prove.plain import PlainTrainer
from launcher.prove.reference import ReferenceStep
from launcher.prove.report import number
from launcher.prove.rounding import NOISE_FACTOR
from launcher.prove.tokens import write_documents
from modeling.config import FAMILIES
from modeling.decoder import ENTRY
from modeling.init import materialize
from modeling.moe_config import BiasBalance, MoEConfig
from modeling.optimizers.config import SGDConfig
from modeling.router import build_router
from parallel.checkpoint.boxes import Box
from small_models import build_decoder, example_config


def test_errors_are_relative_to_each_tensors_own_norm():
    theirs = {"a": torch.full((4,), 2.0), "b": torch.full((4,), 1e-3), "zero": torch.zeros(3)}
    ours = {"a": torch.full((4,), 2.02), "b": torch.full((4,), 1.1e-3), "zero": torch.zeros(3)}
    errors = tensor_errors(ours, theirs)
    assert errors["a"] == pytest.approx(0.01, rel=1e-4) and errors["b"] == pytest.approx(0.1, rel=1e-4)
    assert errors["zero"] == 0.0
    assert tensor_errors({**ours, "a": torch.full((4,), math.nan)}, theirs)["a"] == math.inf


def test_an_unused_expert_is_measured_against_all_tensors():
    theirs = {"a": torch.ones(100), "idle": torch.zeros(4)}
    errors = tensor_errors({"a": torch.ones(100), "idle": torch.full((4,), 1e-12)}, theirs)
    assert errors["idle"] == pytest.approx(2e-12 / (1e-5 * 10))


def test_execution_order_of_every_family():
    for family in FAMILIES:
        names = [name for name, _ in build_decoder(example_config(family)).named_parameters()]
        order = execution_order(reversed(names))
        assert sorted(order) == sorted(names)
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in order))
        entry = [name for name in ENTRY if name in modules]
        assert modules[: len(entry) + 1] == [*entry, "layers.0.attention_norm"]
        is_linear = example_config(family).is_linear_layer(0)
        queries = [name for name in order if name.startswith(f"layers.0.attention.{'in_' * is_linear}q")]
        out = f"layers.0.attention.{'out' if is_linear else 'o'}.weight"
        assert order.index(queries[-1]) < order.index(out) < order.index("layers.0.feed_forward_norm.weight")
        assert order.index("final_norm.weight") > order.index("layers.1.feed_forward_norm.weight")


def test_execution_order_of_an_attention_with_steps_between():
    names = ["q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o"]
    order = [f"layers.0.attention.{name}.weight" for name in names] + ["layers.0.feed_forward_norm.weight"]
    assert execution_order(reversed(order)) == order


def test_plain_factors_are_named():
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(0))
    found = factor(gradient * 4, gradient)
    assert found.is_plain and name_ratio(found.ratio, {"dp": 2, "ep": 4, "micro-batches": 4}) == "ep or micro-batches"
    assert name_ratio(0.5, {"dp": 2}) == "1/dp" and name_ratio(1.7, {"dp": 2}) is None
    other = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert not factor(gradient * 4 + other, gradient).is_plain
    assert math.isnan(factor(gradient, torch.zeros(50)).ratio)


def test_a_norm_is_explained_by_what_it_miscounts():
    gradients = {"a": torch.full((3,), 2.0), "b": torch.full((5,), 1.0), "c": torch.full((7,), 0.5)}
    twice_b = math.sqrt(total_norm(gradients.values()) ** 2 + 5.0)
    assert explain_norm(twice_b, gradients, {}, {}) == "b counted 2 times"
    without_a_and_c = math.sqrt(5.0)
    assert explain_norm(without_a_and_c, gradients, {"some": ["a", "c"]}, {}) == "some counted 0 times"
    assert explain_norm(100.0, gradients, {}, {"dp": 3}) is None


def piece(name, start, shape, value, is_owner=True):
    return TensorBox(name, Box(start, shape), torch.full(shape, float(value)), is_owner)


def test_pieces_make_whole_tensors():
    pieces = [piece("w", (0, 0), (1, 3), 1), piece("w", (1, 0), (1, 3), 2), piece("w", (0, 0), (2, 3), 9, False)]
    whole = assemble(pieces, {"w": (2, 3)})["w"]
    assert torch.equal(whole, torch.tensor([[1.0] * 3, [2.0] * 3]))


def test_planted_missing_and_repeated_pieces_are_seen():
    with pytest.raises(Uncovered, match="w: 3 of 6 elements are missing"):
        assemble([piece("w", (0, 0), (1, 3), 1)], {"w": (2, 3)})
    with pytest.raises(Uncovered, match=r"w: boxes .* overlap"):
        assemble([piece("w", (0, 0), (2, 3), 1), piece("w", (1, 0), (1, 3), 1)], {"w": (2, 3)})
    with pytest.raises(Uncovered, match="v is not a tensor of this model"):
        assemble([piece("v", (0,), (1,), 1)], {"w": (1,)})
    failed = check_tensors("p", "gradients", [], {"w": torch.ones(2)}, 1e-5)
    assert not failed.passed and "w: 2 of 2 elements are missing" in failed.worst


def test_planted_wrong_copy_is_seen():
    theirs = {"w": torch.ones(4)}
    owned = [piece("w", (0,), (4,), 1)]
    assert check_tensors("p", "gradients", owned, theirs, 1e-5).passed
    failed = check_tensors("p", "gradients", [*owned, piece("w", (0,), (2,), 1.1, False)], theirs, 1e-5)
    assert not failed.passed and failed.worst == "a copy of w"


def test_planted_single_wrong_bit_is_seen():
    theirs = {"a": torch.ones(4), "b": torch.ones(4)}
    value = torch.ones(4)
    value[2] = torch.nextafter(value[2], torch.tensor(2.0))
    pieces = [piece("a", (0,), (4,), 1), TensorBox("b", Box((0,), (4,)), value)]
    failed = check_exact("p", "weights", pieces, theirs)
    assert not failed.passed and failed.worst == "b"


def test_series_show_the_earliest_failure():
    failed = check_series("p", "loss", [1.0, 1.1, 2.0], [1.0, 1.0, 1.0])
    assert failed.worst == "step 2" and not failed.passed
    assert check_series("p", "loss", [1.0], [1.0 + 5e-7]).passed
    assert not check_series("p", "loss", [math.nan], [1.0]).passed
    assert not Check("p", "n", "w", math.nan, 1.0).passed


def test_bounds_in_16_bits_are_multiples_of_one_processs_distance():
    exact = {"a": torch.ones(100), "b": torch.ones(100)}
    low = {"a": torch.full((100,), 1.01), "b": torch.full((100,), 1.01)}

    def error(value):
        pieces = [piece("a", (0,), (100,), value), piece("b", (0,), (100,), 1)]
        return check_noisy_gradients("p", pieces, low, exact, "")

    assert error(1.02).passed and not error(1.04).passed
    assert error(1.02).error == pytest.approx(2, rel=1e-3) and error(1.02).bound == NOISE_FACTOR
    assert check_noisy_losses("p", "loss", [4.02], [4.01], [4.0], floor=0.0).passed
    assert not check_noisy_losses("p", "loss", [4.04], [4.01], [4.0], floor=0.0).passed


@pytest.fixture
def router():
    config = example_config("mixtral")
    model = build_decoder(config)
    materialize(model, config, 0, "cpu", torch.float32)
    return model


def replay_of(model, scores_TE, experts_TK, gaps_T, bound):
    """A rank's choice for one sequence, against a recorded one."""
    layer, own = next(iter(routers_of(model).items()))
    seen, n_tokens = Replayed(), scores_TE.shape[0]
    held = HeldTokens([7], torch.arange(n_tokens), torch.zeros(1, n_tokens))
    replay = ChoiceReplay(model, lambda _: held, seen)
    reference = StepChoices([7], {layer: experts_TK[None].to(torch.int16)}, {layer: gaps_T[None]})
    replay.start_step(reference, bound)
    return own.revise_choice(scores_TE, own.choose(scores_TE)), seen


def test_ties_are_replayed_and_larger_differences_kept(router):
    _, own = next(iter(routers_of(router).items()))
    n_experts = own.weight.shape[0]
    scores_TE = torch.rand(3, n_experts, generator=torch.Generator().manual_seed(0))
    best_TK = scores_TE.topk(own.top_k).indices
    theirs_TK = best_TK.clone()
    theirs_TK[0] = best_TK[0].flip(0)  # another order is no other choice
    unused = [next(e for e in range(n_experts) if e not in best_TK[token]) for token in (1, 2)]
    theirs_TK[1, -1], theirs_TK[2, -1] = unused
    chosen_TK, seen = replay_of(router, scores_TE, theirs_TK, torch.tensor([1.0, 1e-6, 1e-3]), 1e-5)
    assert torch.equal(chosen_TK, torch.stack([best_TK[0], theirs_TK[1], best_TK[2]]))
    assert (seen.tokens, seen.ties, seen.wrong, seen.strangers) == (3, 1, 1, 0)
    assert seen.largest_gap == pytest.approx(1e-3)


def test_tokens_that_the_reference_never_saw_are_counted(router):
    layer, own = next(iter(routers_of(router).items()))
    seen = Replayed()
    held = HeldTokens([8], torch.arange(3), torch.zeros(1, 3))
    replay = ChoiceReplay(router, lambda _: held, seen)
    replay.start_step(StepChoices([7], {layer: torch.zeros(1, 3, own.top_k)}, {layer: torch.zeros(1, 3)}), 1e-5)
    scores_TE = torch.rand(3, own.weight.shape[0])
    own.revise_choice(scores_TE, own.choose(scores_TE))
    assert seen.strangers == 3


def test_the_gap_is_between_the_last_chosen_and_the_next():
    router = build_router(MoEConfig(n_experts=3, top_k=2, balance=BiasBalance()), 4)
    router.bias.copy_(torch.tensor([0.0, 0.0, 0.25]))
    assert router.gap(torch.tensor([[0.5, 0.4, 0.1]])).tolist() == pytest.approx([0.05])
    router.top_k = 3
    assert router.gap(torch.tensor([[0.5, 0.4, 0.1]])).tolist() == [math.inf]


def test_the_gap_is_between_groups_too():
    router = build_router(MoEConfig(n_experts=6, top_k=1, n_groups=3, top_k_groups=1), 4)
    # Sums of these are exact in fp32.
    scores_TE = torch.tensor(
        [[0.5, 0.375, 0.75, 0.109375, 0.828125, 0.03125], [0.5, 0.125, 0.75, 0.375, 0.625, 0.3125]]
    )
    assert router.choose(scores_TE).tolist() == [[0], [2]]
    assert router.gap(scores_TE).tolist() == [0.015625, 0.1875]
    router.top_k_groups = 3
    assert router.choose(scores_TE).tolist() == [[4], [2]]
    assert router.gap(scores_TE).tolist() == [0.078125, 0.125]


def test_one_process_records_every_choice_and_goes_on_from_a_state(tmp_path):
    from launcher.prove.shrink import shrink
    from prove_runs import load_small, write_config

    config, _ = load_small(write_config(tmp_path), (), 2)
    assert shrink(config, 2).model.n_layers == config.model.n_layers  # shrinking twice changes nothing
    from data.dataset import open_dataset

    data = write_documents(tmp_path, config, 30)
    dataset = open_dataset(data, seed=0, vocab_size=config.model.vocab_size, split="train")
    trainer = PlainTrainer(config.model, SGDConfig(momentum=0.9), dataset, seed=0)
    for step in range(2):
        trainer.step(np.arange(step * 4, step * 4 + 4))
    run = trainer.run
    batch = dataset.read(np.arange(4))
    for layer, experts_NSK in run.choices[0].experts.items():
        assert ((experts_NSK[..., 0] == NO_CHOICE).numpy() == (batch.documents_BS == -1)).all()
        assert int((experts_NSK != NO_CHOICE).sum()) == int(run.steps[0].counts[layer].sum())
    trainer.load(run.states[1])
    again = trainer.step(np.arange(4, 8), run.choices[1])
    assert again.loss == run.steps[1].loss
    assert all(torch.equal(run.states[2].weights[name], run.states[3].weights[name]) for name in run.states[2].weights)


def test_documents_are_ragged_and_some_samples_padded(tmp_path):
    from data.dataset import open_dataset
    from prove_runs import load_small, write_config

    config, _ = load_small(write_config(tmp_path), (), 2)
    dataset = open_dataset(write_documents(tmp_path, config, 40), seed=0, vocab_size=96, split="train")
    batch = dataset.read(np.arange(24))
    assert 1 <= (batch.documents_BS == -1).any(1).sum() < 24
    assert batch.documents_BS.max(1).min() == 0 and batch.documents_BS.max() > 2


def test_numbers_are_short():
    assert [number(value) for value in (0.0, 3.0, 1e-6, 1.234, math.inf)] == ["0", "3", "1.0e-06", "1.23", "inf"]


def test_the_document_tells_of_every_planted_fault():
    from pathlib import Path

    from prove_faults_listed import FAULTS

    text = Path("docs/prove.md").read_text()
    for fault in FAULTS:
        part = text.partition(f"**{fault.title}**")[2].partition("\n\n")[2]
        assert fault.check in part and fault.says in part.partition(". **")[0], fault.title


def test_updates_by_rounding_alone_are_left_out_and_named():
    """A small gradient is compared; one of 1e-11 of all is noise, over which AdamW makes whole updates.

    In one step that is enough: it decides that step's update. An expert without tokens in one step has none to decide.
    """

    def step(**sizes: float) -> ReferenceStep:
        gradients = {name: torch.full((4,), size) for name, size in ({"head": 1.0} | sizes).items()}
        return ReferenceStep(1.0, {}, {}, 2.0, gradients, {}, skipped=False)

    steps = [
        step(router=1e-11, gate=1e-7, sinks=1e-11, expert=0.0, unused=0.0),
        step(router=-1e-11, gate=1e-7, sinks=1e-3, expert=1e-3, unused=0.0),
    ]
    assert without_gradient(steps) == ["router", "sinks", "unused"]
    names = ["router"]
    start = {name: torch.zeros(4) for name in ("head", "router", "gate")}
    theirs = {name: torch.full((4,), 1e-3) for name in start}
    ours = theirs | {"router": torch.full((4,), -1e-3)}
    box = Box((0,), (4,))
    pieces = [TensorBox(name, box, value, is_owner=True) for name, value in ours.items()]
    left_out = check_updates("adamw", "weights", pieces, theirs, start, 1e-2, steps, names)
    assert left_out.passed
    assert left_out.note == "left out, for a gradient of rounding alone: router"
    assert not check_updates("adamw", "weights", pieces, theirs, start, 1e-2, steps).passed


def test_an_element_whose_gradient_rounding_decides_is_left_out_alone() -> None:
    """AdamW moves it as far as any other, this way or that; its neighbours are held to the bound."""
    gradient = torch.tensor([1.0, -1.0, 1e-5, 1.0])
    steps = [ReferenceStep(1.0, {}, {}, 2.0, {"bias": gradient}, {}, skipped=False)]
    start, theirs = {"bias": torch.zeros(4)}, {"bias": -1e-3 * gradient.sign()}

    def moved_otherwise(element: int) -> Check:
        ours = theirs["bias"].clone()
        ours[element] *= -1
        piece = TensorBox("bias", Box((0,), (4,)), ours, is_owner=True)
        return check_updates("adamw", "weights", [piece], theirs, start, 1e-2, steps)

    assert moved_otherwise(2).passed
    assert not any(moved_otherwise(element).passed for element in (0, 1, 3))


def test_updates_are_held_to_what_rounding_does_to_one_process() -> None:
    """Of a tensor whose gradient nearly cancels an update is badly conditioned: others keep their bound."""
    steps = [ReferenceStep(1.0, {}, {}, 2.0, {"head": torch.ones(4), "bias": torch.ones(4)}, {}, skipped=False)]
    start = {name: torch.zeros(4) for name in ("head", "bias")}
    theirs = {name: torch.full((4,), 1e-3) for name in start}
    nudged = [theirs | {"bias": theirs["bias"] * (1 + share)} for share in (0.004, -0.009)]

    def moved(name: str, share: float) -> Check:
        ours = theirs | {name: theirs[name] * (1 + share)}
        pieces = [TensorBox(key, Box((0,), (4,)), value, is_owner=True) for key, value in ours.items()]
        return check_updates("muon", "weights", pieces, theirs, start, 1e-2, steps, nudged=lambda: nudged)

    within = moved("bias", 0.026)
    assert within.passed
    assert within.bound == pytest.approx(0.027, rel=1e-3)
    assert within.note == "rounding alone moves it by 9.0e-03 on one process"
    assert not moved("bias", 0.028).passed
    assert not moved("head", 0.011).passed
    nudged = [theirs | {"bias": -theirs["bias"]}]  # nothing of it can be told
    assert moved("bias", 0.09).passed
    assert not moved("bias", 0.11).passed
    assert not moved("bias", -1.0).passed  # left out


def test_gradients_that_cancel_are_held_to_zero() -> None:
    """Keys' biases where no channel turns: what is left of the gradient is rounding, on both sides."""

    def seen(left: float) -> list[Check]:
        steps = [ReferenceStep(1.0, {}, {}, 2.0, {"head": torch.ones(4), "bias": torch.zeros(4)}, {}, skipped=False)]
        piece = TensorBox("bias", Box((0,), (4,)), torch.full((4,), left), is_owner=True)
        return check_cancelled("sgd", [SimpleNamespace(steps=[SimpleNamespace(gradients=[piece])])], steps, {"bias"})

    assert [check.passed for check in seen(1e-9)] == [True]
    (failed,) = seen(1e-4)
    assert not failed.passed and failed.worst == "bias on a rank (step 1)"
