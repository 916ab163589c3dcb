"""Norms and rotations by rows, in C++ and by torch's operations: the plain functions' numbers, whatever the pieces.

Bounds: fp32 sums over rows in another order, 1e-6 of a tensor's norm; 16 bits round each element once, where the plain
functions round in between, 2^-7.
"""

import weakref
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cpp_passes import NEEDS_COMPILER, broken_for_vectors, macros
from launcher.training.compiling import fuse_of, usable_fuse
from modeling.config import ModelConfig
from modeling.kernels import by_rows, named, native, row_passes, threads
from modeling.kernels.by_rows import PIECE_BYTES, ByRows
from modeling.kernels.fuse import Fuse, compiled, plainly
from modeling.norm import rms_norm
from modeling.rope import rotate

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
CASES: dict[str, tuple[Any, list[tuple[int, ...]], dict[str, Any]]] = {
    "norm": (rms_norm, [(3, 7, 24), (24,)], {"norm_eps": 1e-6, "adds_one": False}),
    "norm of heads": (rms_norm, [(2, 5, 3, 8), (8,)], {"norm_eps": 1e-5, "adds_one": False}),
    "norm, adds one": (rms_norm, [(4, 24), (24,)], {"norm_eps": 1e-6, "adds_one": True}),
    # wider than what numbers.h sums or rounds at once, and not by whole steps
    "wide norm": (rms_norm, [(5, 203), (203,)], {"norm_eps": 1e-6, "adds_one": False}),
    "wide norm, adds one": (rms_norm, [(5, 203), (203,)], {"norm_eps": 1e-6, "adds_one": True}),
    "rotation of wide heads": (rotate, [(2, 5, 3, 150), (2, 5, 70), (2, 5, 70)], {}),
    "norm of no rows": (rms_norm, [(0, 24), (24,)], {"norm_eps": 1e-6, "adds_one": False}),
    "rotation": (rotate, [(2, 5, 3, 8), (2, 5, 4), (2, 5, 4)], {}),
    "rotation by one row of angles": (rotate, [(2, 5, 3, 8), (1, 5, 4), (1, 5, 4)], {}),
    "rotation of some channels": (rotate, [(2, 5, 3, 8), (2, 5, 3), (2, 5, 3)], {}),
}


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed in C++."""
    monkeypatch.setattr(row_passes, "fits", lambda *tensors: False)


@pytest.fixture
def in_cpp() -> None:
    """What C++ can compute is; skips where the machine has no compiler, and fails where it cannot compile this."""
    if NEEDS_COMPILER is not None:
        pytest.skip(NEEDS_COMPILER)
    assert row_passes.why_not() is None


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
@pytest.mark.usefixtures("by_torch")
def test_numbers_are_the_plain_functions(name: str, dtype: torch.dtype, piece_bytes: int) -> None:
    assert error(both_ways(ByRows(piece_bytes), name, dtype), both_ways(plainly, name, dtype)) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.usefixtures("in_cpp")
def test_cpp_has_the_plain_functions_numbers(
    name: str, dtype: torch.dtype, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bit depends on the threads."""
    calls = watch(monkeypatch)
    alone = both_ways(ByRows(), name, dtype)
    monkeypatch.setattr(threads, "LEAST_NUMBERS", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: n_threads)
    found = both_ways(ByRows(), name, dtype)
    assert all(torch.equal(one, other) for one, other in zip(alone, found, strict=True)) and len(calls) == 4
    assert error(found, both_ways(plainly, name, dtype)) < BOUNDS[dtype]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list to which each pass in C++ adds its name."""
    calls: list[str] = []
    for name in ("norm", "norm_gradients", "rotate"):
        monkeypatch.setattr(row_passes, name, partial(told, getattr(row_passes, name), calls))
    return calls


def told(function: Any, calls: list[str], *given: Any, **named: Any) -> Any:
    calls.append(function.__name__)
    return function(*given, **named)


@pytest.mark.usefixtures("in_cpp")
def test_a_profile_names_cpp_and_without_one_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(4, 24), torch.ones(24)
    with torch.profiler.profile() as profile:
        row_passes.norm(hidden, weight, norm_eps=1e-6, adds_one=False)
    assert "roundtable::norm" in {event.name for event in profile.events() or ()}
    monkeypatch.setattr(named, "record_function", None)  # is not called
    row_passes.norm(hidden, weight, norm_eps=1e-6, adds_one=False)
    monkeypatch.delattr("torch.autograd.profiler._is_profiler_enabled")
    with pytest.raises(TypeError):
        row_passes.norm(hidden, weight, norm_eps=1e-6, adds_one=False)


@pytest.mark.parametrize("n_rows", [255, 256, 700])
@pytest.mark.usefixtures("in_cpp")
def test_cpp_sums_gradients_by_blocks_of_rows(n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several blocks, of which the last is not full."""
    monkeypatch.setitem(CASES, "many rows", (rms_norm, [(n_rows, 40), (40,)], {"norm_eps": 1e-6, "adds_one": False}))
    assert error(both_ways(ByRows(), "many rows", torch.float32), both_ways(plainly, "many rows", torch.float32)) < 1e-6


PLANTED = {
    "one is not added": ("(1 + weight[i])", "weight[i]"),
    "the weight comes before the rounding": ("return wide(out[i]) * weight", "return wide(rows[i]) * scale * weight"),
    "the mean of the gradients stays": ("- wide(rows[i]) * scale * mean)", ")"),
    "blocks' sums begin with what was there": (
        "if (row % BLOCK == 0) std::memset(sums",
        "if (row == 0) std::memset(sums",
    ),
    "angles have the other sign": ("- wide(second[i]) * turn", "+ wide(second[i]) * turn"),
    "later channels are left out": ("(width - 2 * n_pairs) * sizeof", "0 * sizeof"),
    "all tokens have the first one's angles": ("token % n_tables", "0 * n_tables"),
    "bits are cut off": ("0x7fff + (bits >> 16 & 1)", "0"),
    "a sum is left out": ("+ (sums[2] + sums[3])", "+ sums[2]"),
    "tables are not rounded": ("cosine[i] = wide(rounded<Number>(cosines[at + i]))", "cosine[i] = cosines[at + i]"),
    "what is below 2^-126 becomes zero": ("constexpr int BELOW_NORMAL = 0x20", "constexpr int BELOW_NORMAL = 0"),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.usefixtures("in_cpp")
def test_planted_faults_of_cpp_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bounds of fp32 and bf16, of all cases; of roundings, by the very bits."""
    if "2^-126" in fault and not macros() >= {"__AVX512BF16__", "__AVX512DQ__"}:
        pytest.skip("no instruction rounds to bf16 on this processor, or this compiler does not know it")
    monkeypatch.setitem(CASES, "many rows", (rms_norm, [(700, 40), (40,)], {"norm_eps": 1e-6, "adds_one": False}))
    assert not differing_bits() and not wrong_cases()
    library = broken_for_vectors(row_passes.SOURCE, native.EXACT, tmp_path, PLANTED[fault])
    monkeypatch.setattr(row_passes, "library", lambda: library)
    assert wrong_cases() or differing_bits()


def wrong_cases() -> list[tuple[str, torch.dtype]]:
    """The cases beyond their bound."""
    pairs = [(name, dtype) for name in CASES for dtype in BOUNDS]
    return [
        pair for pair in pairs if not error(both_ways(ByRows(), *pair), both_ways(plainly, *pair)) < BOUNDS[pair[1]]
    ]


def differing_bits() -> int:
    """How many values in bf16 have other bits than plain norms, or than rotations by rounded tables."""
    found, wanted = (both_ways(fuse, "norm", torch.bfloat16)[0] for fuse in (ByRows(), plainly))
    tiny, wanted_tiny = (norm_of_tiny_numbers(fuse) for fuse in (ByRows(), plainly))
    turned, wanted_turned = turned_by_tables(torch.float32), turned_by_tables(torch.bfloat16)
    return int((found != wanted).sum() + (tiny != wanted_tiny).sum() + (turned != wanted_turned).sum())


def turned_by_tables(dtype: torch.dtype) -> torch.Tensor:
    """Heads in bf16, turned by tables that were rounded to ``dtype`` before."""
    generator = torch.Generator().manual_seed(2)
    heads = torch.randn(2, 5, 3, 80, generator=generator).bfloat16()
    tables = (torch.randn(2, 5, 40, generator=generator).to(dtype) for _ in range(2))
    turned: torch.Tensor = ByRows()(rotate, heads, *tables)
    return turned


def norm_of_tiny_numbers(fuse: Fuse) -> torch.Tensor:
    """The norm of a row whose numbers go down to the least ones that bf16 has."""
    hidden = torch.exp2(torch.linspace(-133, 0, 101)).bfloat16()[None]
    weight = torch.linspace(-1, 1, 101).bfloat16()
    normed: torch.Tensor = fuse(rms_norm, hidden, weight, norm_eps=1e-6, adds_one=False)
    return normed


@pytest.mark.usefixtures("in_cpp")
def test_tiny_numbers_are_rounded_as_by_torch() -> None:
    found = norm_of_tiny_numbers(ByRows())
    assert 0 < found.abs()[found != 0].min() < 2.0**-126
    assert torch.equal(found, norm_of_tiny_numbers(plainly))


@pytest.mark.usefixtures("in_cpp")
def test_what_is_not_a_number_stays_so() -> None:
    """Bits of a NaN that carry into its sign must not become a number."""
    hidden = torch.tensor([[0x7FFF, 0x3F80], [0x7F81, 0x3F80], [-1, 0x3F80]], dtype=torch.int16).view(torch.bfloat16)
    assert ByRows()(rms_norm, hidden, torch.ones(2, dtype=torch.bfloat16), norm_eps=1e-6, adds_one=False).isnan().all()


@pytest.mark.usefixtures("in_cpp")
def test_other_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16, weights of another dtype, and whatever is observed; without a compiler all."""
    calls = watch(monkeypatch)
    norm = partial(ByRows(), rms_norm, norm_eps=1e-6, adds_one=True)
    hidden, weight = torch.randn(3, 8), torch.randn(8)
    norm(hidden.half(), weight.half())
    norm(hidden.bfloat16(), weight)
    with FlopCounterMode(display=False):
        norm(hidden, weight)
    with FakeTensorMode() as mode:
        norm(mode.from_tensor(hidden), mode.from_tensor(weight))
    assert not calls
    norm(hidden, weight)
    assert calls == ["norm"]
    monkeypatch.setattr(row_passes, "why_not", lambda: "no compiler")
    norm(hidden, weight)
    assert calls == ["norm"]


@pytest.mark.parametrize(
    ("tables", "channels"),
    [((3, 5, 4), 8), ((2, 4, 4), 8), ((1, 6, 4), 8), ((2, 5, 5), 8)],
    ids=["batch", "sequence", "one row's sequence", "channels"],
)
@pytest.mark.usefixtures("in_cpp")
def test_angles_that_do_not_fit_are_refused(tables: tuple[int, ...], channels: int) -> None:
    """C++ would read beside them."""
    with pytest.raises((RuntimeError, AssertionError)):
        ByRows()(rotate, torch.randn(2, 5, 3, channels), torch.randn(tables), torch.randn(tables))


@pytest.mark.usefixtures("in_cpp")
def test_a_weight_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError):
        ByRows()(rms_norm, torch.randn(3, 24), torch.randn(23), norm_eps=1e-6, adds_one=False)


@pytest.mark.usefixtures("in_cpp")
def test_what_torch_makes_by_default_changes_nothing() -> None:
    """A caller may have set another dtype or device for new tensors."""
    leaf, weight = torch.randn(4, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    found = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "meta")):
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                out = ByRows()(rms_norm, leaf, weight, norm_eps=1e-6, adds_one=False)
                found.append([out, *torch.autograd.grad(out, (leaf, weight), leaf.detach())])
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.usefixtures("in_cpp")
def test_tensors_that_are_not_contiguous(dtype: torch.dtype) -> None:
    """Heads cut out of a wider projection, and gradients that are one number everywhere."""
    wide, weight = torch.randn(2, 5, 3, 20).to(dtype), torch.randn(8).to(dtype)
    angles = torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    of_norm: dict[str, Any] = {"norm_eps": 1e-6, "adds_one": False}
    cases: list[tuple[Any, tuple[Tensor, ...], dict[str, Any]]] = [
        (rms_norm, (weight,), of_norm),
        (rotate, angles, {}),
    ]
    for function, given, numbers in cases:
        found = []
        for fuse in (ByRows(), plainly):
            leaf = wide.clone().requires_grad_()
            out = fuse(function, leaf[..., 4:12], *given, **numbers)
            out.sum().backward()
            assert leaf.grad is not None
            found.append([out.detach(), leaf.grad])
        assert error(*found) < BOUNDS[dtype]


@pytest.mark.parametrize("name", ["norm", "rotation"])
@pytest.mark.usefixtures("by_torch")
def test_planted_last_rows_left_out_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_rows.pieces
    monkeypatch.setattr(by_rows, "pieces", lambda n, n_rows: list(whole(n, n_rows))[: max(1, n // n_rows)])
    rows = 4 * 24 * 4 if name == "norm" else 4 * 3 * 8 * 4  # four rows at a time, which do not divide them all
    assert not error(both_ways(ByRows(rows), name, torch.float32), both_ways(plainly, name, torch.float32)) < 1e-2


@pytest.mark.usefixtures("by_torch")
def test_planted_scratch_that_two_values_share_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value that lives at once has a name of its own: of 16 bits the rows and their gradients, both widened."""
    take = by_rows.SCRATCH.take
    monkeypatch.setattr(by_rows.SCRATCH, "take", lambda name, shape, like: take("norm", shape, like))
    assert not error(both_ways(ByRows(), "norm", torch.bfloat16), both_ways(plainly, "norm", torch.bfloat16)) < 0.1


@pytest.mark.usefixtures("by_torch")
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


@pytest.mark.usefixtures("by_torch")
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
