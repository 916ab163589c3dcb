"""Cross-entropies in C++ (rows.cpp): losses, z-losses and gradients against fp64.

Bounds: fp32 over a vocabulary, 1e-6 of a tensor's norm; a gradient in bf16 rounds each element once, 2^-8.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cpp_passes import NEEDS_COMPILER, broken_for_vectors
from modeling.kernels import native, row_passes, threads
from modeling.loss import IGNORE, losses_and_gradient

GRADIENT_BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
Z_LOSS = 1e-2
SIZES = ((1, 1), (5, 17), (40, 1030), (3, 5000))  # targets and vocabulary


pytestmark = pytest.mark.skipif(NEEDS_COMPILER is not None, reason=str(NEEDS_COMPILER))


@pytest.fixture(autouse=True)
def in_cpp() -> None:
    """This machine must be able to compile it."""
    assert row_passes.why_not() is None


def drawn(sizes: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits, some far apart, and targets, of which the last does not count where there are several."""
    generator = torch.Generator().manual_seed(3)
    logits_TV = (torch.randn(sizes, generator=generator) * 8).to(dtype)
    targets_T = torch.randint(sizes[1], sizes[:1], generator=generator)
    if len(targets_T) > 1:
        targets_T[-1] = IGNORE
    return logits_TV, targets_T


def wanted(logits_TV: Tensor, targets_T: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, z-losses and the gradient of their sum in fp64, by autograd."""
    leaf_TV, counts_T = logits_TV.double().requires_grad_(), targets_T != IGNORE
    logs_T = leaf_TV.logsumexp(-1) * counts_T
    losses_T = logs_T - leaf_TV.gather(1, targets_T.clamp(min=0)[:, None]).squeeze(1) * counts_T
    (losses_T + z_loss * logs_T.square()).sum().backward()
    assert leaf_TV.grad is not None
    return losses_T.detach(), logs_T.detach().square(), leaf_TV.grad


def check(sizes: tuple[int, int], dtype: torch.dtype, z_loss: float = Z_LOSS) -> None:
    logits_TV, targets_T = drawn(sizes, dtype)
    found = losses_and_gradient(logits_TV.clone(), targets_T, True, z_loss)
    bounds = (1e-6, 1e-6, GRADIENT_BOUNDS[dtype])
    for bound, one, other in zip(bounds, found, wanted(logits_TV, targets_T, z_loss), strict=True):
        assert one is not None
        assert float((one.double() - other).norm()) <= bound * max(float(other.norm()), 1e-3)
    no_gradient = losses_and_gradient(before := logits_TV.clone(), targets_T, False, z_loss)
    assert torch.equal(before, logits_TV) and no_gradient[2] is None
    assert all(torch.equal(one, other) for one, other in zip(found[:2], no_gradient[:2], strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", GRADIENT_BOUNDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("z_loss", [0.0, Z_LOSS])
def test_losses_and_gradients_are_those_of_fp64(sizes: tuple[int, int], dtype: torch.dtype, z_loss: float) -> None:
    check(sizes, dtype, z_loss)


@pytest.mark.parametrize("dtype", GRADIENT_BOUNDS, ids=str)
def test_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_TV, targets_T = drawn((40, 1030), dtype)
    alone = losses_and_gradient(logits_TV.clone(), targets_T, True, Z_LOSS)
    monkeypatch.setattr(threads, "LEAST_NUMBERS", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    found = losses_and_gradient(logits_TV.clone(), targets_T, True, Z_LOSS)
    assert all(torch.equal(one, other) for one, other in zip(alone, found, strict=True))  # type: ignore[arg-type]


def test_logits_that_are_infinite_or_no_numbers() -> None:
    """As torch has them: minus infinity has no weight, and what is not a number fills its row, and no other."""
    logits_TV, targets_T = drawn((6, 40), torch.float32)
    logits_TV[0, targets_T[0] - 1], logits_TV[1, 3], logits_TV[2, 5] = -math.inf, math.nan, math.inf
    losses_T, z_losses_T, grad_TV = losses_and_gradient(logits_TV.clone(), targets_T, True, Z_LOSS)
    assert grad_TV is not None
    usual = wanted(logits_TV[[0, 3, 4]], targets_T[[0, 3, 4]], Z_LOSS)
    for one, other in zip((losses_T, z_losses_T, grad_TV), usual, strict=True):
        assert torch.allclose(one[[0, 3, 4]].double(), other, rtol=1e-5, atol=1e-6)
        assert one[[1, 2]].isnan().all()
    assert grad_TV[0, targets_T[0] - 1] == 0


@pytest.mark.parametrize("target", [40, 10**9, -1, -(10**9)])
@pytest.mark.parametrize("wants_gradient", [True, False])
def test_a_target_beyond_the_vocabulary_is_refused(target: int, wants_gradient: bool) -> None:
    """It would be read and written elsewhere in memory. A damaged token file may hold it."""
    logits_TV, targets_T = drawn((6, 40), torch.float32)
    targets_T[2] = target
    with pytest.raises(IndexError, match=rf"^target {target} is not within the vocabulary of 40 tokens$"):
        losses_and_gradient(logits_TV, targets_T, wants_gradient, Z_LOSS)


@pytest.mark.parametrize("by_torch", [False, True])
def test_what_is_no_number_is_seen_where_a_target_does_not_count(
    by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the losses, too: a loss that is no number stops a run before its weights are touched."""
    if by_torch:
        monkeypatch.setattr(row_passes, "fits", lambda *tensors: False)
    logits_TV, targets_T = drawn((6, 40), torch.float32)
    logits_TV[-1, 3] = math.nan
    assert targets_T[-1] == IGNORE
    losses_T, z_losses_T, grad_TV = losses_and_gradient(logits_TV, targets_T, True, Z_LOSS)
    assert grad_TV is not None
    assert all(each[-1].isnan().all() and each[:-1].isfinite().all() for each in (losses_T, z_losses_T, grad_TV))


PLANTED = {
    "the largest logit is not taken off": ("exponential(wide(logits[i]) - largest)", "exponential(wide(logits[i]))"),
    "only the first block is summed": ("total += sum;", "total += begin ? 0 : sum;"),
    "targets that do not count do": ("targets[row] != ignored", "targets[row] != ignored - 1"),
    "the z-loss has half its slope": ("1 + 2 * z_loss", "1 + z_loss"),
    "one is not taken off the target's": ("* factor - 1 : 0", "* factor : 0"),
    "exponentials are coarse": ("{1.0f / 120, 1.0f / 24, ", "{1.0f / 24, "),
    "gradients are written without being asked for": ("if (!writes) continue;", ""),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # targets that are ignored have a place, lest the fault read outside of the logits
    within = ("[targets[row]]", "[std::max(int64_t(0), targets[row])]")
    library = broken_for_vectors(row_passes.SOURCE, native.EXACT, tmp_path, PLANTED[fault], within)
    monkeypatch.setattr(row_passes, "library", lambda: library)
    with pytest.raises(AssertionError):
        check((40, 1030), torch.float32)
