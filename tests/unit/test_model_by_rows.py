"""Norms and rotations by rows (modeling.kernels.by_rows): the plain functions' numbers, whatever the pieces.

Bounds: fp32 sums over rows in another order, 1e-6 of a tensor's norm; 16 bits round each element once, where the plain
functions round in between, 2^-7.
"""

import weakref
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from launcher.training.compiling import fuse_of, usable_fuse
from modeling.config import ModelConfig
from modeling.kernels import by_rows
from modeling.kernels.by_rows import PIECE_BYTES, ByRows
from modeling.kernels.fuse import Fuse, compiled, plainly
from modeling.norm import rms_norm
from modeling.rope import rotate

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
CASES: dict[str, tuple[Any, list[tuple[int, ...]], dict[str, Any]]] = {
    "norm": (rms_norm, [(3, 7, 24), (24,)], {"norm_eps": 1e-6, "adds_one": False}),
    "norm of heads": (rms_norm, [(2, 5, 3, 8), (8,)], {"norm_eps": 1e-5, "adds_one": False}),
    "norm, adds one": (rms_norm, [(4, 24), (24,)], {"norm_eps": 1e-6, "adds_one": True}),
    "norm of no rows": (rms_norm, [(0, 24), (24,)], {"norm_eps": 1e-6, "adds_one": False}),
    "rotation": (rotate, [(2, 5, 3, 8), (2, 5, 4), (2, 5, 4)], {}),
    "rotation by one row of angles": (rotate, [(2, 5, 3, 8), (1, 5, 4), (1, 5, 4)], {}),
    "rotation of some channels": (rotate, [(2, 5, 3, 8), (2, 5, 3), (2, 5, 3)], {}),
}


def both_ways(fuse: Any, name: str, dtype: torch.dtype) -> list[Tensor]:
    """The value, and the gradients by what is trained."""
    function, shapes, numbers = CASES[name]
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    angles = function is rotate
    tensors = [tensor if angles and place else tensor.to(dtype) for place, tensor in enumerate(tensors)]
    leaves = tensors[:1] if angles else tensors
    for leaf in leaves:
        leaf.requires_grad_()
    out = fuse(function, *tensors, **numbers)
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of a tensor, in its norm."""
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in wanted]
    pairs = [(one.float(), two.float()) for one, two in zip(found, wanted, strict=True) if two.numel()]
    return max([float((one - two).norm() / two.norm()) for one, two in pairs if two.norm() > 0], default=0.0)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("piece_bytes", [1, 200, PIECE_BYTES])
def test_numbers_are_the_plain_functions(name: str, dtype: torch.dtype, piece_bytes: int) -> None:
    assert error(both_ways(ByRows(piece_bytes), name, dtype), both_ways(plainly, name, dtype)) < BOUNDS[dtype]


@pytest.mark.parametrize("name", ["norm", "rotation"])
def test_planted_last_rows_left_out_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_rows.pieces
    monkeypatch.setattr(by_rows, "pieces", lambda n, n_rows: list(whole(n, n_rows))[: max(1, n // n_rows)])
    rows = 4 * 24 * 4 if name == "norm" else 4 * 3 * 8 * 4  # four rows at a time, which do not divide them all
    assert not error(both_ways(ByRows(rows), name, torch.float32), both_ways(plainly, name, torch.float32)) < 1e-2


def test_planted_scratch_that_two_values_share_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value that lives at once has a name of its own: of 16 bits the rows and their gradients, both widened."""
    take = by_rows.SCRATCH.take
    monkeypatch.setattr(by_rows.SCRATCH, "take", lambda name, shape, like: take("norm", shape, like))
    assert not error(both_ways(ByRows(), "norm", torch.bfloat16), both_ways(plainly, "norm", torch.bfloat16)) < 0.1


def test_rows_that_are_summed_one_after_another_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients by a norm's weight, over many rows in one piece: more of them at once, and the sum is less exact."""
    hidden, weight = torch.randn(1 << 17, 8, generator=torch.Generator().manual_seed(0)), torch.ones(8)
    grad = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))

    def far(rows: int) -> float:
        monkeypatch.setattr(by_rows, "SUMMED_ROWS", rows)
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        out = ByRows(1 << 30)(rms_norm, *leaves, norm_eps=1e-6, adds_one=False)
        (found,) = torch.autograd.grad(out, leaves[1:], grad)
        scale = (hidden.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        wanted = (grad.double() * hidden.double() * scale).sum(0)
        return float((found - wanted).norm() / wanted.norm())

    assert far(by_rows.SUMMED_ROWS) < 2e-6 < far(1 << 17)


def test_the_least_eps_leaves_rows_of_zeros_finite_gradients() -> None:
    """What overflows in the plain function is the reciprocal root, cubed: it does at a tenth of the least eps."""
    (least,) = (each.ge for each in get_args(get_type_hints(ModelConfig, include_extras=True)["norm_eps"])[1:])

    def is_finite(fuse: Fuse, norm_eps: float) -> bool:
        hidden, weight = torch.zeros(3, 24, requires_grad=True), torch.ones(24, requires_grad=True)
        out = fuse(rms_norm, hidden, weight, norm_eps=norm_eps, adds_one=False)
        return all(bool(each.isfinite().all()) for each in torch.autograd.grad(out.sum(), (hidden, weight)))

    assert is_finite(ByRows(), least) and is_finite(plainly, least) and not is_finite(plainly, least / 10)


def test_a_layer_norms_mean_is_put_back() -> None:
    """Gradients that are all alike, times weights that are: what a layer norm takes off of them whole."""
    hidden = torch.randn(9, 24, generator=torch.Generator().manual_seed(2))
    found = []
    for fuse in (ByRows(), plainly):
        leaf = hidden.clone().requires_grad_()
        out = fuse(rms_norm, leaf, torch.ones(24), norm_eps=1e-6, adds_one=False)
        found.append(torch.autograd.grad(out, leaf, torch.full_like(out, 3.0))[0])
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-6


@pytest.mark.parametrize(("frozen", "kept"), [(0, 1), (1, 0)])
def test_what_is_not_trained_has_no_gradient(frozen: int, kept: int) -> None:
    tensors = [torch.randn(5, 24), torch.randn(24)]
    tensors[kept].requires_grad_()
    found = []
    for fuse in (ByRows(100), plainly):
        fuse(rms_norm, *tensors, norm_eps=1e-6, adds_one=False).square().sum().backward()
        assert tensors[frozen].grad is None and tensors[kept].grad is not None
        found.append(tensors[kept].grad)
        tensors[kept].grad = None
    assert error(found[:1], found[1:]) < 1e-6


def test_a_rotation_keeps_nothing_of_what_it_turns() -> None:
    given = torch.randn(2, 5, 3, 8, requires_grad=True)
    projected = given * 1.0
    kept = weakref.ref(projected.untyped_storage())
    turned = ByRows()(rotate, projected, torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    del projected
    assert kept() is None
    turned.sum().backward()


def test_a_norm_keeps_its_input_and_a_number_of_each_row() -> None:
    """Plainly it keeps the scaled rows, too."""
    sizes = {}
    for name, fuse in (("by rows", ByRows()), ("plainly", plainly)):
        hidden, weight = torch.randn(64, 24, requires_grad=True), nn.Parameter(torch.ones(24))
        saved: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.setdefault(tensor.untyped_storage()._cdata, tensor.numel()) and tensor,
            lambda tensor: tensor,
        ):
            fuse(rms_norm, hidden, weight, norm_eps=1e-6, adds_one=False)
        sizes[name] = sum(saved.values())
    assert sizes["by rows"] == 64 * 24 + 64 + 24 < sizes["plainly"]


def test_a_cpu_takes_it_where_nothing_is_compiled() -> None:
    assert fuse_of("auto", "cpu") == fuse_of("off", "cpu") == ByRows() and fuse_of("on", "cpu") is compiled
    assert fuse_of("off", "meta") is fuse_of("off", "cuda") is plainly and fuse_of("auto", "cuda") is compiled
    assert usable_fuse("auto", torch.device("cpu"), print, 77) == ByRows(77)
