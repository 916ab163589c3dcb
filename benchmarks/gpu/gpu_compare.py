"""How numbers of a device are held against a formula's, row by row."""

from torch import Tensor

# Of a token's or a matrix' row's norm. A number in bf16 is rounded by up to 2^-9 of itself and one in fp16 by 2^-12;
# kernels round the softmax's weights, or an expert's inner value, before the second product, and the result.
BOUNDS = {"bf16": 2e-2, "fp16": 2.5e-3, "fp32": 1e-5}


def compare(what: str, ours: Tensor, theirs: Tensor, bound: float, floor: float | Tensor = 0.0) -> None:
    """Raises where a row differs by more than ``bound`` of its norm, the rows' mean norm and its floor; a NaN does.

    The mean is that of rows that are not zero: a row's rounding is that of the terms that cancel in it, which are as
    large beside rows without a gradient (tokens of documents of one) as without such rows.
    """
    assert ours.shape == theirs.shape, f"{what}: shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    if ours.numel() == 0:
        return
    ours, theirs = (each.double().reshape(-1, each.shape[-1]) for each in (ours, theirs))
    errors, norms = (ours - theirs).norm(dim=-1), theirs.norm(dim=-1)
    usual = norms[norms > 0].mean().nan_to_num()
    shares = errors / (norms + usual + floor + 1e-30)
    worst = int(shares.nan_to_num(float("inf")).argmax())
    is_within = bool((shares <= bound).all())
    assert is_within, f"{what}: row {worst} differs by {float(shares[worst]):.2e} of its norm, above {bound:.0e}"
