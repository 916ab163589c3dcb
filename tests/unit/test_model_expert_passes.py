"""The experts' passes in C++ (expert_tiles.cpp, expert_vectors.cpp): against fp32 and bf16 by a library's products.

Those for bf16 are tested on matrix units and on vectors of bf16 where the processor has these, and where it has vectors
once more with plain loops in their place.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cpp_passes import KINDS, NEEDS_COMPILER, NEEDS_VECTORS, broken_for_units, broken_for_vectors, on_units
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.training import cpp_kernels
from launcher.training.cpu_room import product_bytes
from modeling.kernels import attention_passes, expert_passes, native, row_passes, tiles
from modeling.kernels import built as kernels_built
from modeling.kernels.expert_turns import GatesAndUps
from modeling.kernels.experts import Ways, count_pairs, experts_over_rows, place_rows

WHY_NOT = expert_passes.why_not
BF16, FP32 = torch.bfloat16, torch.float32
NAMES = ("out_TD", "hidden_TD", "weights_TK", "gate_EFD", "up_EFD", "down_EDF")
# (tokens, d_model, d_ff, experts, top_k, unit of rows): rows that fill blocks of 32 and that do not, experts of one
# block and of many, and of more rows than are gathered at once.
SIZES = (
    (1, 32, 32, 2, 1, 1),
    (31, 64, 32, 4, 2, 1),
    (100, 32, 96, 3, 3, 16),
    (300, 96, 160, 3, 2, 1),
    (3000, 64, 96, 2, 1, 1),
)


@pytest.fixture(scope="module", params=["vectors", *KINDS])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """fp32 by vectors, or bf16 on units that multiply it, or by plain loops in the units' place."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "vectors":
            take(patch, BF16, on_units(expert_passes.TILES, request.param))
        elif NEEDS_COMPILER is not None:
            pytest.skip(NEEDS_COMPILER)
        yield FP32 if request.param == "vectors" else BF16


def take(patch: pytest.MonkeyPatch, dtype: torch.dtype, library: ctypes.CDLL) -> None:
    """From now on the passes for this dtype are those of ``library``."""
    usual, why_not = expert_passes.library, expert_passes.why_not
    patch.setattr(expert_passes, "library", lambda of: library if of == dtype else usual(of))
    patch.setattr(expert_passes, "why_not", lambda of: None if of == dtype else why_not(of))


class Drawn:
    """A layer, tokens and gradients; some experts have no token where ``n_used`` is less than all."""

    def __init__(self, sizes: tuple[int, ...], seed: int = 0, n_used: int | None = None) -> None:
        n_tokens, d_model, d_ff, n_experts, top_k, unit = sizes
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

        self.hidden_TD, self.grad_TD = draw(n_tokens, d_model), draw(n_tokens, d_model)
        self.matrices = (
            draw(n_experts, d_ff, d_model, scale=d_model**-0.5),
            draw(n_experts, d_ff, d_model, scale=d_model**-0.5),
            draw(n_experts, d_model, d_ff, scale=d_ff**-0.5),
        )
        scores_TE = torch.rand(n_tokens, n_used or n_experts, generator=generator)
        self.weights_TK, self.indices_TK = (each.clone() for each in scores_TE.topk(top_k))
        self.unit = unit

    def passes(self, dtype: torch.dtype, kept_share: float = 1.0) -> dict[str, Tensor]:
        """The output and every gradient, by NAMES."""
        counts_E = count_pairs(self.indices_TK, len(self.matrices[0]))
        rows = place_rows(self.indices_TK, counts_E, self.unit)
        given = [each.clone().to(dtype).requires_grad_() for each in (self.hidden_TD, *self.matrices)]
        weights_TK = self.weights_TK.to(torch.bfloat16).to(dtype).requires_grad_()
        ways = Ways(kept_share=kept_share)
        out_TD = experts_over_rows(given[0], rows, weights_TK, *given[1:], ways=ways)
        out_TD.backward(self.grad_TD.to(dtype))
        found = (out_TD.detach(), given[0].grad, weights_TK.grad, *(each.grad for each in given[1:]))
        return dict(zip(NAMES, found, strict=True))


def by_library(drawn: Drawn, dtype: torch.dtype) -> dict[str, Tensor]:
    """The passes by a library's products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_passes, "fits", lambda *_: False)
        return drawn.passes(dtype)


@contextmanager
def without_old_numbers() -> Iterator[None]:
    """New tensors are NaN, so that what is read but was not written is no number, not what another test left there."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(drawn: Drawn, dtype: torch.dtype, kept_share: float = 1.0) -> None:
    """Raises AssertionError where a tensor lies farther from a library's in fp32 than rounding may take it.

    In fp32 that is sums in another order, 1e-6 of the tensor's norm. In bf16 oneDNN's passes round once more between
    products than these, so what they lose is a bound. Few numbers may by chance lie a half farther.
    """
    wanted, usual = by_library(drawn, FP32), by_library(drawn, dtype)
    with without_old_numbers():
        found = drawn.passes(dtype, kept_share)
    for name in NAMES:
        far, usual_far = (float((each[name].float() - wanted[name]).norm()) for each in (found, usual))
        norm = float(wanted[name].norm())
        most = 1e-6 * norm if dtype == FP32 else min(1.5 * usual_far, 2**-6 * norm)
        assert far <= most, (name, far / norm, usual_far / norm)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_output_and_gradients_are_as_near_to_fp32(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    check(Drawn(sizes), dtype)


def test_experts_without_rows_get_gradients_of_zero(dtype: torch.dtype) -> None:
    drawn = Drawn((64, 32, 32, 5, 2, 1), n_used=3)
    check(drawn, dtype)
    found = drawn.passes(dtype)
    assert all(found[name][3:].count_nonzero() == 0 for name in ("gate_EFD", "up_EFD", "down_EDF"))


@pytest.mark.parametrize("kept_share", [0.9, 0.5, 0.1, 0.0])
def test_gates_that_are_computed_again_change_no_bit(dtype: torch.dtype, kept_share: float) -> None:
    """Of whole experts, and of one expert's later rows."""
    drawn = Drawn((700, 64, 96, 4, 2, 1))
    usual, found = drawn.passes(dtype), drawn.passes(dtype, kept_share)
    assert all(torch.equal(usual[name], found[name]) for name in NAMES)


@pytest.mark.parametrize("computed", ["forward", "backward"])
def test_a_library_and_these_passes_keep_the_same_rows(
    dtype: torch.dtype, computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass by a library, the other in C++: what observes operations may be there in one pass alone."""
    drawn, fits, asked = Drawn((700, 64, 96, 4, 2, 1)), expert_passes.fits, list[bool]()
    wanted, usual = by_library(drawn, FP32), by_library(drawn, dtype)
    monkeypatch.setattr(expert_passes, "fits", lambda *given: fits(*given) and turn(asked) == computed)
    found = drawn.passes(dtype, 0.6)
    assert len(asked) == 2
    for name in NAMES:
        far, usual_far = (float((each[name].float() - wanted[name]).norm()) for each in (found, usual))
        assert far <= max(1e-6 * float(wanted[name].norm()), 1.5 * usual_far), name


def turn(asked: list[bool]) -> str:
    """The pass that asks now: the forward pass comes first."""
    asked.append(True)
    return "forward" if len(asked) == 1 else "backward"


def test_no_more_is_kept_than_there_is_room_for() -> None:
    """Whole experts, the largest first, then whole blocks of the largest that did not fit."""
    sizes_E, room = [40, 100, 0, 90], torch.empty(150, 2)
    assert GatesAndUps(room, sizes_E).kept_E == [40, 100, 0, 0]
    assert GatesAndUps(room[:110], sizes_E).kept_E == [0, 100, 0, 0]
    assert GatesAndUps(room[:99], sizes_E).kept_E == [0, 0, 0, 90]
    assert GatesAndUps(room[:80], sizes_E).kept_E == [40, 32, 0, 0]
    assert GatesAndUps(room[:39], sizes_E).kept_E == [0, 32, 0, 0]
    assert GatesAndUps(room[:0], sizes_E).kept_E == [0, 0, 0, 0]


def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    drawn, n_threads = Drawn((500, 64, 32, 7, 2, 1)), torch.get_num_threads()
    usual = drawn.passes(dtype)
    try:
        torch.set_num_threads(3)
        found = drawn.passes(dtype)
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(usual[name], found[name]) for name in NAMES)


def test_experts_are_shared_evenly_among_threads() -> None:
    sizes_E = [5, 0, 90, 40, 41, 10]
    shares = expert_passes.shares_of(sizes_E, 2)
    assert sorted(chain(*shares)) == [0, 2, 3, 4, 5] and all(share == sorted(share) for share in shares)
    assert sorted(sum(sizes_E[expert] for expert in share) for share in shares) == [91, 95]
    assert expert_passes.shares_of([0, 0, 3], 4) == [[2]] and expert_passes.shares_of([0], 2) == []


def test_a_token_does_not_depend_on_others(dtype: torch.dtype) -> None:
    """Bit for bit; what is not a number, or infinite, stays with its token."""
    drawn = Drawn((90, 64, 64, 3, 2, 1))
    usual = drawn.passes(dtype)
    drawn.hidden_TD[5], drawn.hidden_TD[7, 0], drawn.hidden_TD[8] = float("nan"), float("inf"), 3e38
    found, others = drawn.passes(dtype), [token for token in range(90) if token not in (5, 7, 8)]
    for name in ("out_TD", "hidden_TD", "weights_TK"):
        assert torch.equal(usual[name][others], found[name][others]), name
        assert found[name][5].isnan().all() and not found[name][7].isfinite().any(), name


@pytest.mark.parametrize("gate", [-200.0, -88.5, -20.0, 0.0, 20.0, 200.0])
def test_gates_of_any_size(dtype: torch.dtype, gate: float) -> None:
    """Sigmoids do not overflow: gates are set by a first hidden value of 1 and a first column of the gates' matrix.

    The units take numbers below 2^-126 as zero, of which a sum may have many. By vectors exponentials below it are 0,
    which here multiply gates twice.
    """
    drawn = Drawn((40, 32, 32, 1, 1, 1))
    drawn.hidden_TD[:, 0] = 1.0
    drawn.matrices[0].zero_()
    drawn.matrices[0][:, :, 0] = gate
    wanted, found = by_library(drawn, FP32), drawn.passes(dtype)
    for name in NAMES:
        most = max(2e-2 * float(wanted[name].abs().max()), 2.0 ** (-118 if dtype == BF16 else -105))
        assert torch.allclose(found[name].float(), wanted[name], rtol=2e-2, atol=most), name


ON_UNITS = {
    "a step of each product is left out": ("step < steps; step++", "step + 1 < steps; step++"),
    "a block's last row is left out": ("rows = n - block * BLOCK;", "rows = n - block * BLOCK - 1;"),
    "weights multiply nothing": ("set1_ps(is_real ? weights[at] : 0.0f)", "set1_ps(is_real ? 1.0f : 0.0f)"),
    "later rows' gradients replace the first ones'": ("is_first ? product(", "true ? product("),
    "down's gradient is not transposed": ("    transpose(low);\n    transpose(high);\n", ""),
    "ups take the place of gates": ("layer.gate_EFD + (expert * F + f)", "layer.up_EFD + (expert * F + f)"),
    "a gate's slope lacks a term": ("fmadd_ps(_mm512_sub_ps(gate, active), share, share)", "mul_ps(share, share)"),
    "another row is gathered": ("from = row < n ? matrix + rows[row]", "from = row < n ? matrix + rows[row / 2]"),
    "kept gates of another expert": ("(layer.kept_E[expert] + first)", "(first)"),
    "an expert's later rows are not multiplied again": ("if (n_kept < n)", "if (n_kept == 0)"),
    "of later blocks none is kept": ("places.n_kept - block * BLOCK", "places.n_kept - 2 * block * BLOCK"),
}
KEPT_IN_PART = 0.6  # the share of the rows of two experts: all of one, and some of the other


BY_VECTORS = {
    "a number of each product is left out": ("inner < n_inner; inner++", "inner + 1 < n_inner; inner++"),
    "the first part of the inner dim alone": ("inner < n_inner; inner += INNER", "inner < 1; inner += INNER"),
    "rows beyond whole eights are left out": ("multiply_rows<1, true>", "multiply_rows<ROWS, true>"),
    "products replace what was there": ("ADDS || inner > 0", "inner > 0"),
    "weights multiply nothing": ("given[f] * weight;", "given[f];"),
    "later rows' gradients replace the first ones'": ("product<true>(grad_gate", "product<false>(grad_gate"),
    "gradients of a call before stay": ("std::fill_n(each, F * D, 0.0f)", "0"),
    "ups take the place of gates": ("layer.gate_EFD + expert", "layer.up_EFD + expert"),
    "a gate's slope lacks a term": ("(gates[f] - active) * share + share", "share"),
    "another row is gathered": ("matrix + rows[row] * width", "matrix + rows[row / 2] * width"),
    "kept gates of another expert": ("(layer.kept_E[expert] + first)", "(first)"),
    "an expert's later rows are not multiplied again": ("if (n_kept < n)", "if (n_kept == 0)"),
    "large gates are taken for small ones": ("return x < 0 ? small * share : share", "return share"),
}


@pytest.mark.skipif(NEEDS_COMPILER is not None, reason=str(NEEDS_COMPILER))
@pytest.mark.parametrize("fault", BY_VECTORS)
def test_planted_faults_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    further = native.FUSED
    take(monkeypatch, FP32, broken_for_vectors(expert_passes.VECTORS, further, tmp_path, BY_VECTORS[fault]))
    with pytest.raises(AssertionError):
        check(Drawn((2501, 224, 96, 2, 1, 1)), FP32, KEPT_IN_PART)


@pytest.mark.skipif(NEEDS_VECTORS is not None, reason=str(NEEDS_VECTORS))
@pytest.mark.parametrize("fault", ON_UNITS)
def test_planted_faults_on_units_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take(monkeypatch, BF16, broken_for_units(expert_passes.TILES, tmp_path, ON_UNITS[fault]))
    with pytest.raises(AssertionError):
        check(Drawn((2500, 64, 96, 2, 1, 1)), BF16, KEPT_IN_PART)


def test_other_layers_are_left_to_libraries(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other dtypes, odd widths, and wide experts."""
    calls: list[int] = []
    monkeypatch.setattr(expert_passes, "call", lambda *_: calls.append(1))
    Drawn((8, 32, 32, 2, 1, 1)).passes(torch.float16)
    Drawn((8, 48, 32, 2, 1, 1)).passes(dtype)
    Drawn((8, 32, 40, 2, 1, 1)).passes(dtype)
    assert not calls and not expert_passes.suits(2048, 768, 2) and not expert_passes.suits(384, 256, 4)
    assert expert_passes.suits(384, 192, 4)
    Drawn((8, 32, 32, 2, 1, 1)).passes(dtype)
    assert len(calls) == 2


@pytest.fixture
def experts_in_16_bits() -> RunConfig:
    """A run whose experts are of a size for which C++ is faster."""
    return load_config("configs/quickstart.yaml", ["train.precision=bf16", "model.d_model=64", "model.moe.d_ff=32"])


def test_without_a_compiler_one_line_says_so(
    experts_in_16_bits: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of experts and attention only on processors that have the units; of norms and rotations always."""
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(expert_passes, "why_not", WHY_NOT)
    monkeypatch.setattr(tiles, "library", tiles.library.__wrapped__)
    monkeypatch.setattr(row_passes, "why_not", lambda: None)
    monkeypatch.setattr(attention_passes, "why_not", lambda: None)
    for module in (tiles, kernels_built):
        monkeypatch.setattr(module, "LEFT_OUT", {})
    lines: list[str] = []
    for options in (None, tiles.VECTORS):
        monkeypatch.setattr(tiles, "options", lambda options=options: options)
        tiles.problem.cache_clear()
        cpp_kernels.tell_of_missing_kernels(experts_in_16_bits, torch.device("cpu"), lines.append)
    tiles.problem.cache_clear()
    told = "kernels in C++ are not used, so steps take longer"
    problem = f"{tmp_path}/none cannot be run (No such file or directory); install g++, or set CXX"
    assert lines == [f"{told}: {problem}"]
    monkeypatch.setattr(row_passes, "why_not", lambda: problem)
    in_fp32 = replace(experts_in_16_bits, train=replace(experts_in_16_bits.train, precision="fp32"))
    cpp_kernels.tell_of_missing_kernels(in_fp32, torch.device("cpu"), lines.append)
    cpp_kernels.tell_of_missing_kernels(in_fp32, torch.device("cuda"), lines.append)
    assert lines == [f"{told}: {problem}"] * 2
    assert cpp_kernels.experts_suit(experts_in_16_bits) and cpp_kernels.experts_suit(in_fp32)


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("fp32", ["rows", "attention_vectors", "expert_vectors"]),
        ("bf16", ["rows", "attention_tiles", "attention_vectors", "expert_tiles"]),
        ("fp8", ["rows", "attention_tiles", "attention_vectors"]),
        ("fp16", ["rows"]),
    ],
)
def test_a_run_compiles_what_it_uses(experts_in_16_bits: RunConfig, precision: str, names: list[str]) -> None:
    config = replace(experts_in_16_bits, train=replace(experts_in_16_bits.train, precision=precision))
    assert [kernel.source.stem for kernel in cpp_kernels.kernels_of(config)] == names


def test_a_plan_counts_products_of_onednn_only_where_they_are(
    experts_in_16_bits: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.training.cpu_room.is_built_by_rows", lambda dtype: True)
    monkeypatch.setattr(expert_passes, "why_not", lambda dtype: "there is no compiler")
    assert product_bytes(experts_in_16_bits) > 0
    monkeypatch.setattr(expert_passes, "why_not", lambda dtype: None)
    assert product_bytes(experts_in_16_bits) == 0
