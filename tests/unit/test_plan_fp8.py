"""Plans of runs of 8 bits by closed forms: which products take the rate of 8 bits, and GPUs that have none.

FLOPs are those of bf16, to 1e-9: the same numbers are added in another order.
"""

import json

import pytest

from launcher.cli import main
from launcher.closed_form.gpus import gpu_of
from launcher.closed_form.memory import memory_of
from launcher.closed_form.own import job_of_config
from launcher.closed_form.work import Step
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.plan.closed_forms import step_of_rank
from launcher.plan.memory import cut_bytes
from launcher.plan.quick import fullest
from launcher.prove.matrix import Layout, fit
from modeling.counts import count_parameters
from modeling.logical import logical_parameters
from parallel.config import ParallelConfig

KEPT = "train.fp8_keep_weights=true"
DENSE, EXPERTS = "configs/models/llama-3-8b.yaml", "configs/models/qwen3-30b-a3b.yaml"


def config_of(path: str, *changes: str) -> RunConfig:
    """Of micro-batches and experts so large that no product waits for its bytes, one micro-batch a step."""
    wide = ["model.moe.d_ff=4096"] if path == EXPERTS else []
    return load_config(path, [*wide, "train.micro_batch_size=16", "train.global_batch_size=16", *changes])


def step_of(path: str, precision: str, recompute: str = "none", *changes: str) -> Step:
    """A step on one H100."""
    gpu = gpu_of("H100", 8, "")
    config = config_of(path, f"train.precision={precision}", f"train.recompute={recompute}", *changes)
    return Step(job_of_config(config, 1, gpu, 1), gpu)


def flops(step: Step, kind: str) -> tuple[float, float]:
    """What a micro-batch computes in 8 and in 16 bits, tiles that are not full included; the head's left out."""
    work, peak = step.work(), step.gpu.peak
    in_16_bits = getattr(work, kind) - step.head().get(kind, 0.0)
    return getattr(work, f"low_{kind}") * peak("fp8"), in_16_bits * peak("bf16")


def flops_of_passes(path: str, kind: str) -> tuple[float, float, float]:
    """In 8 and in 16 bits, and in all of them under bf16; a recomputed forward pass is all in 8 bits."""
    low, high = flops(step_of(path, "fp8"), kind)
    low_again, high_again = flops(step_of(path, "fp8", "full"), kind)
    _, plain = flops(step_of(path, "bf16"), kind)
    _, plain_again = flops(step_of(path, "bf16", "full"), kind)
    assert low + high == pytest.approx(plain, rel=1e-9)
    assert low_again - low == pytest.approx(plain_again - plain, rel=1e-9)
    assert high_again == pytest.approx(high, rel=1e-9)
    return low, high, plain


@pytest.mark.parametrize("path", [DENSE, EXPERTS])
def test_dense_products_are_all_in_8_bits(path: str) -> None:
    low, high, plain = flops_of_passes(path, "products")
    assert high == pytest.approx(0, abs=1e-9 * plain) and low == pytest.approx(plain, rel=1e-9)


def test_gradients_by_experts_weights_keep_16_bits() -> None:
    _, high, plain = flops_of_passes(EXPERTS, "grouped")
    assert 0.3 < high / plain < 0.4  # a third, but that tiles are less full than of dense products


def test_cutting_costs_bytes_and_8_bits_have_twice_the_rate() -> None:
    low, plain = step_of(EXPERTS, "fp8"), step_of(EXPERTS, "bf16")
    assert low.work().casts > 0 and plain.work().casts == 0
    assert low.gpu.peak("fp8") == pytest.approx(2 * low.gpu.peak("bf16"), rel=1e-3)  # rounded in the data sheet


def test_memory_is_that_of_16_bits() -> None:
    assert memory_of(step_of(EXPERTS, "fp8").job) == memory_of(step_of(EXPERTS, "bf16").job)


def hidden_elements(config: RunConfig) -> int:
    """Elements of the weights whose products have factors of 8 bits."""
    tensors = logical_parameters(config.model).values()
    return sum(tensor.numel for tensor in tensors if tensor.weight.takes_8_bits)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("path", [DENSE, EXPERTS])
def test_kept_weights_are_cut_once_a_step(path: str, recompute: str) -> None:
    """Of a micro-batch the rows alone are left, and an eighth of what cutting each weight both ways takes: 8 bytes."""
    changes = ["train.global_batch_size=128"]  # eight micro-batches
    each, kept = (step_of(path, "fp8", recompute, *changes, *more) for more in ([], [KEPT]))
    assert each.job.n_micro_batches == kept.job.n_micro_batches == 8
    n_weights, forwards = hidden_elements(config_of(path)), 2 if recompute == "full" else 1
    saved = (each.work().casts - kept.work().casts) * kept.bandwidth
    assert saved == pytest.approx(n_weights * (3 * forwards + 5 - 8 / 8), rel=1e-3)  # norms and biases are counted


@pytest.mark.parametrize("path", [DENSE, EXPERTS])
def test_kept_weights_take_two_bytes_an_element(path: str) -> None:
    config, gpu = config_of(path, "train.precision=fp8", KEPT), gpu_of("H100", 8, "")
    plain, kept = step_of(path, "fp8"), step_of(path, "fp8", "none", KEPT)
    n_weights = hidden_elements(config)
    assert memory_of(kept.job).state - memory_of(plain.job).state == pytest.approx(2 * n_weights, rel=1e-3)
    counted = cut_bytes(step_of_rank(config, 1, 0))
    assert 2 * n_weights < counted < 2.02 * n_weights  # with the rows' factors
    assert (
        fullest(config, 1, job_of_config(config, 1, gpu, 1)).weights
        == 2 * count_parameters(config.model).total + counted
    )


@pytest.mark.parametrize("command", [["plan"], ["plan", "--search"], ["profile"]])
def test_a_gpu_without_a_rate_is_told_in_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    gpu = ["--as" if command == ["profile"] else "--gpu", "A100-80GB"]
    assert main([*command, "configs/dense.yaml", *gpu, "train.precision=fp8"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "train.precision=fp8 has no rate on A100-80GB, whose file names none in low_precision_flops; plan for an H100, "
        "or try train.precision=bf16\n"
    )
    assert not said.out


def test_layouts_of_a_matrix_that_cannot_keep_weights_are_proven_without() -> None:
    """As with other switches that a layout cannot have."""
    config = load_config(EXPERTS, ["train.precision=fp8", KEPT])
    for zero, keeps in ((0, False), (1, True), (2, True), (3, False)):
        found, problems = fit(config, Layout(ParallelConfig(tp=2, zero=zero), 2))
        assert not problems and found.train.fp8_keep_weights is keeps


@pytest.mark.parametrize("layout", [[], ["parallel.ep=2"]], ids=str)
def test_a_traced_plan_tells_kept_weights_as_weights(layout: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing else of what a rank holds at most is another."""
    held = []
    for keeps in (False, True):
        overrides = ["train.precision=fp8", f"train.fp8_keep_weights={str(keeps).lower()}", *layout]
        config = load_config("configs/quickstart.yaml", overrides)
        n_ranks = 2 if layout else 1
        command = ["plan", "configs/quickstart.yaml", "--gpu", "H100", "--gpus", str(n_ranks), "--json", *overrides]
        assert main(command) == 0
        held.append(json.loads(capsys.readouterr().out)["positions"][0]["held_bytes"])
    plain, kept = held
    assert kept["weights"] - plain["weights"] == cut_bytes(step_of_rank(config, n_ranks, 0))
    assert {name for name in kept if kept[name] != plain.get(name)} == {"weights"}
