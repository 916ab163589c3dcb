"""Faults in fp8 matrix products. Planted by prove_faults.plant."""

from typing import Any

from torch import Tensor


def leave_16_bits() -> None:
    """The layout's layers multiply in 16 bits even with train.precision=fp8."""
    import launcher.training.loop as loop
    from modeling.kernels.products import AS_THEY_ARE

    loop.products_of = lambda *ignored, **also: AS_THEY_ARE


def put_gradients_back_at_twice_their_size() -> None:
    """The factors of numbers cut to 8 bits by columns are twice as large as they should be."""
    import modeling.kernels.cuts as cuts

    cut = cuts.cut_across

    def wrong(numbers: Tensor) -> Any:
        numbers_8, factors = cut(numbers)
        return numbers_8, 2 * factors

    cuts.cut_across = wrong


def put_rows_back_by_their_neighbours() -> None:
    """Each row of tokens is scaled back by the factor of the row before it."""
    import modeling.kernels.cuts as cuts

    cut = cuts.cut

    def wrong(numbers: Tensor) -> Any:
        numbers_8, factors = cut(numbers)
        return numbers_8, factors.roll(1, 0) if numbers.dim() == 2 else factors

    cuts.cut = wrong


def put_weights_gradients_back_by_their_neighbours() -> None:
    """In weights' gradients, each output is scaled back by the factor of the output before it."""
    import modeling.kernels.fp8 as fp8
    from modeling.kernels.cuts import Cuts, cut_across

    sound = fp8.sum_over_rows

    def wrong(grad_RO: Tensor, rows_RI: Tensor, cuts: Cuts) -> Tensor:
        factors_O1 = cut_across(grad_RO)[1]
        return (sound(grad_RO, rows_RI, cuts) * (factors_O1.roll(1, 0) / factors_O1)).to(grad_RO.dtype)

    fp8.sum_over_rows = wrong


def keep_weights_cut_for_good() -> None:
    """After an update, the kept 8-bit weights are still those of the step before."""
    from modeling.kernels.cuts import Cuts

    Cuts.weights_changed = lambda self: None
