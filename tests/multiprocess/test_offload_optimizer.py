"""Masters and optimizer states on the host (DeepSpeed's ZeRO-Offload) against one plain process.

On a CPU device and host are the same memory; the code is DeepSpeed's own for a host, and the update torch's. Tolerances
are those of test_zero.py, where the reasons are: 1e-6 with SGD, 1e-5 in the mean with AdamW; in 16 bits as there.
"""

import pytest
import torch

from command_runs import numbers, train, write_config
from layout_runs import MOE_MODEL, largest_error, run_config, run_layout, run_reference, write_tokens
from modeling.optimizers.config import AdamWConfig
from offload_runs import after_skipped_steps
from parallel.config import ParallelConfig
from parallel.processes.start import run_ranks
from rotating import some_fast

BOUND = 1e-6
LAYOUTS = {
    "dp2": (2, {}),
    "tp2 ep2": (2, {"tp": 2, "ep": 2}),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2 pp2 dp2": (8, {"tp": 2, "pp": 2}),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def on_host(**degrees: int) -> ParallelConfig:
    return ParallelConfig(zero=2, offload_optimizer=True, **degrees)


@pytest.mark.parametrize("layout", some_fast(LAYOUTS, "tp2 ep2"))
def test_sgd_equals_one_process(tokens, layout):
    """With momentum, and clipped in each step."""
    n_ranks, degrees = LAYOUTS[layout]
    config = run_config(tokens, model=MOE_MODEL, parallel=on_host(**degrees))
    errors = largest_error(run_layout(config, n_ranks), run_reference(config))
    assert max(errors.values()) <= BOUND, errors


@pytest.mark.slow
def test_adamw_equals_one_process(tokens):
    config = run_config(tokens, parallel=on_host(), optimizer=AdamWConfig(lr=1e-3))
    ours, reference = run_layout(config, 2), run_reference(config)
    errors = largest_error(ours, reference)
    assert errors["loss"] <= BOUND and errors["grad_norm"] <= 1e-5 and errors["weight"] <= 6e-3, errors
    for name, weight in reference.state["weight"].items():
        assert float((ours.state["weight"][name] - weight).abs().mean()) <= 1e-5, name


@pytest.mark.parametrize("precision", some_fast(["bf16", "fp16"]))
def test_low_precision_equals_one_process_in_that_precision(tokens, precision):
    """Four micro-batches: DeepSpeed's sums of 16 bits on the host would differ by 1e-3."""
    config = run_config(tokens, parallel=on_host(ep=2), precision=precision, micro_batch_size=1)
    errors = largest_error(run_layout(config, 2), run_reference(config))
    assert errors["loss"] <= 1e-4 and errors["grad_norm"] <= 1e-3 and errors["weight"] <= 2e-3, errors


@pytest.mark.parametrize("precision", some_fast(["fp32", "bf16"], "bf16"))
def test_skipped_steps_leave_all_as_it_was(tokens, precision):
    """Nothing of their gradients is in the next update, bit for bit."""
    config = run_config(tokens, parallel=on_host(), precision=precision, optimizer=AdamWConfig(lr=1e-3))
    for plain, skipped in run_ranks(after_skipped_steps, 2, config, timeout_seconds=240, threads=1):
        assert all(torch.equal(skipped[name], each) for name, each in plain.items())


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_resume_may_change_the_key(tmp_path, tokens, first):
    """Checkpoints know nothing of it: in either direction the run goes on bit for bit."""
    whole, parts = (
        write_config(tmp_path, tokens, name, steps=4, parallel=ParallelConfig(zero=2)) for name in ("whole", "parts")
    )
    uninterrupted = train(whole, 2)
    train(parts, 2, "train.steps=2", f"parallel.offload_optimizer={first}".lower())
    assert numbers(train(parts, 2, f"parallel.offload_optimizer={not first}".lower())) == numbers(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "check"), [("host gradients lack a weight", "grad_norm"), ("host gradients are of a copy", "weight")]
)
def test_planted_fault_is_seen(tokens, fault, check):
    """A norm that is not of all gradients; sums over tp that do not reach the update."""
    config = run_config(tokens, model=MOE_MODEL, parallel=on_host(tp=2))
    errors = largest_error(run_layout(config, 2, fault), run_reference(config))
    assert errors[check] > 10 * BOUND, errors
