"""The sum of squares behind the gradient norm, piece by piece."""

import math

import pytest
import torch

from modeling.kernels.fuse import Fuse, compiled, plainly
from parallel.zero import norm
from parallel.zero.norm import CPU_PIECE, ROW, sum_by_rows, sum_of_squares


@pytest.mark.parametrize("numel", [0, 1, CPU_PIECE, CPU_PIECE + 1, 3 * CPU_PIECE - 7])
def test_pieces_make_the_whole(numel: int) -> None:
    """To 1e-12 of the sum that fp64 makes at once, of a contiguous gradient and of a transposed one."""
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = float(gradient.double().square().sum())
    assert math.isclose(float(sum_of_squares(gradient)), expected, rel_tol=1e-12)
    matrix = torch.randn(3, numel, generator=torch.Generator().manual_seed(1)).T
    assert math.isclose(float(sum_of_squares(matrix)), float(matrix.double().square().sum()), rel_tol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_seen_in_any_piece(bad: float) -> None:
    for place in (0, CPU_PIECE, 2 * CPU_PIECE):
        gradient = torch.zeros(2 * CPU_PIECE + 1)
        gradient[place] = bad
        assert not math.isfinite(float(sum_of_squares(gradient)))


@pytest.mark.parametrize("fuse", [plainly, pytest.param(compiled, marks=pytest.mark.xdist_group("fuse"))])
def test_rows_make_the_whole(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU sums them: rows at once and in turn, with and without a rest, of a gradient far below fp32's squares."""
    monkeypatch.setattr(norm, "MOST", 3 * ROW)
    for numel in (ROW - 1, ROW, 2 * ROW, 5 * ROW + 3):
        for scale in (1.0, 1e-30):
            flat = scale * torch.randn(numel, generator=torch.Generator().manual_seed(numel))
            expected = float(flat.double().square().sum())
            assert math.isclose(float(sum_by_rows(flat, fuse)), expected, rel_tol=1e-12), (numel, scale)
    flat[ROW + 1] = math.inf
    assert not math.isfinite(float(sum_by_rows(flat, fuse)))


@pytest.mark.parametrize("alone", [0, 100, 10**6])
def test_gradients_that_go_together_count_as_those_that_do_not(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where small ones do: with each its share, with empty ones, and with one that is not finite."""
    monkeypatch.setattr(norm, "is_summed_alone", lambda gradient: gradient.numel() >= alone)
    monkeypatch.setattr(norm.dist, "all_reduce", lambda total: None)
    generator = torch.Generator().manual_seed(0)
    given = [(torch.randn(numel, generator=generator), share) for numel, share in SHARES]
    expected = math.sqrt(sum(share * float(gradient.double().square().sum()) for gradient, share in given))
    found = norm.global_norm(given, torch.device("cpu"))
    assert found.dtype == torch.float32 and math.isclose(float(found), expected, rel_tol=1e-7)
    assert float(norm.global_norm([(torch.empty(0), 1.0)], torch.device("cpu"))) == 0.0
    given[-1][0][1] = math.nan  # though its share is 0
    assert math.isnan(float(norm.global_norm(given, torch.device("cpu"))))


SHARES = [(50, 1.0), (500, 1.0), (0, 1.0), (70, 0.5), (700, 0.5), (8, 0.25), (30, 0.0)]
