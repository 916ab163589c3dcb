"""What an estimate counts for sums of gradients, against each micro-batch's reads and writes, added up here."""

import pytest

from launcher.config.tree import RunConfig, TrainConfig
from launcher.estimate.step import ACCUMULATE, update_ops
from launcher.plan.closed_forms import step_of_rank
from launcher.plan.memory import rank_memory
from modeling.precision_config import Precision
from parallel.config import ParallelConfig
from small_models import example_config


def counted(zero: int, precision: Precision, n_micro_batches: int) -> tuple[dict[str, int], int]:
    """Bytes of a step by operation, and how many weights there are."""
    config = RunConfig(
        model=example_config("llama"),
        train=TrainConfig(precision=precision, global_batch_size=2 * n_micro_batches, micro_batch_size=2),
        parallel=ParallelConfig(zero=zero),
    )
    step = step_of_rank(config, 1, 0)
    ops = [op for op in update_ops(step, rank_memory(step)) if op.part == "gradients: sums"]
    times = {ACCUMULATE: n_micro_batches}
    return {op.work.name: op.work.bytes * times.get(op.work.name, 1) for op in ops}, sum(step.weights.values())


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_zero1_in_bf16_writes_the_first_gradients_over_the_last_step_s_sums(precision: Precision, n: int) -> None:
    found, n_weights = counted(1, precision, n)
    first = 2 + 4  # read in 16 bits, written in 32
    later = 2 + 4 + 4  # and the sum is read
    assert found == {ACCUMULATE: n_weights * (first + (n - 1) * later)}


@pytest.mark.parametrize("n", [1, 4])
def test_others_add_to_zeros(n: int) -> None:
    found, n_weights = counted(2, "bf16", n)
    assert found == {ACCUMULATE: n_weights * n * (2 + 4 + 4), "gradients zeroed": n_weights * 4}
