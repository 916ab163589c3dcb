"""Compiled chains against the plain functions that they are compiled from: values, gradients, bytes, compilations.

Tolerances: in fp32 a kernel sums in another order and rounds less often, a few units of the last place; in bf16 the
plain functions round between their operations, which one kernel does not, so it differs by roundings of 2^-8.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.errors import UserError
from launcher.trace.ops import work_of
from launcher.training import compiling
from launcher.training.compiling import missing_compiler, usable_fuse, why_not
from modeling.attention import gated_output
from modeling.context import PADDING, Context
from modeling.feed_forward import activated, gated
from modeling.fused import fuse_chains
from modeling.kernels import fuse
from modeling.kernels.by_rows import ByRows
from modeling.kernels.experts import (
    ExpertBiases,
    Ways,
    WeightedSumRows,
    compiled_gathered_sum,
    compiled_sum_of_two,
    compiled_weighted_sum,
    experts_grouped,
    gathered_sum,
    place_rows,
    to_rows_twice,
    weighted,
)
from modeling.kernels.fuse import Chain, compiled, known_chains, plainly
from modeling.kernels.short_convolution import short_convolution
from modeling.loss import IGNORE, fused_losses, losses_and_gradient
from modeling.moe import build_moe
from modeling.moe_config import MoEConfig, ScoreName, SequenceAuxBalance
from modeling.norm import layer_norm, rms_norm
from modeling.rope import rotate, scaled

CPU = torch.device("cpu")
# On a machine without a compiler these tests say why they see nothing.
NO_COMPILER = missing_compiler("cpu")
pytestmark = [
    pytest.mark.skipif(NO_COMPILER is not None, reason=f"nothing can be compiled: {NO_COMPILER}"),
    pytest.mark.xdist_group("fuse"),  # a chain is compiled once in a process
]

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
EPS = {"norm_eps": 1e-6}
PLACES = torch.randperm(40, generator=torch.Generator().manual_seed(3)).view(20, 2)
PLACES_IN_DOCUMENTS = torch.cat([torch.arange(length) for length in (5, 1, 10, 16)]).view(2, 16)
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...] | Tensor], dict[str, Any]]] = {
    "rms_norm": (rms_norm, [(2, 16, 96), (96,)], {**EPS, "adds_one": False}),
    "rms_norm adds one": (rms_norm, [(2, 16, 4, 32), (32,)], {**EPS, "adds_one": True}),
    "layer_norm": (layer_norm, [(2, 16, 96), (96,), (96,)], {**EPS, "adds_one": False}),
    "rotate": (rotate, [(2, 16, 4, 32), (2, 16, 8), (2, 16, 8)], {}),
    "scaled": (scaled, [(2, 16, 4, 32), (2, 16, 1)], {}),
    "gates of channels": (gated_output, [(2, 16, 4, 32), (2, 16, 4, 32)], {}),
    "gates of heads": (gated_output, [(2, 16, 4, 1), (2, 16, 4, 32)], {}),
    "gated silu": (gated, [(2, 16, 96), (2, 16, 96)], {"activation": "silu"}),
    "gated gelu": (gated, [(2, 16, 96), (2, 16, 96)], {"activation": "gelu_tanh"}),
    "activated": (activated, [(2, 16, 96)], {"activation": "relu"}),
    "activated by a square": (activated, [(2, 16, 96)], {"activation": "relu2"}),
    "layer_norm adds one": (layer_norm, [(2, 16, 96), (96,), (96,)], {**EPS, "adds_one": True}),
    "convolution": (short_convolution, [(2, 16, 96), PLACES_IN_DOCUMENTS, (96, 4)], {}),
    "weighted": (weighted, [(40, 96), (40, 96), (40, 1)], {"swiglu_limit": None, "rows_vary": True}),
    "weighted limit": (weighted, [(40, 96), (40, 96), (40, 1)], {"swiglu_limit": 1.0, "rows_vary": True}),
}
QUICK = ("rms_norm",)


def drawn(shapes: Sequence[tuple[int, ...] | Tensor], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [each if isinstance(each, Tensor) else torch.randn(each, generator=generator).to(dtype) for each in shapes]


def both_ways(run: Any, function: Callable[..., Any], tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The value, and the gradient by each tensor."""
    leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
    out = run(function, *leaves, **options)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, over each tensor's largest value."""
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in wanted]
    pairs = zip(found, wanted, strict=True)
    return max(float((one.float() - two.float()).abs().max() / two.float().abs().max()) for one, two in pairs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if name in QUICK and dtype == torch.float32 else [pytest.mark.slow])
        for name in CASES
        for dtype in TOLERANCE
    ],
)
def test_a_compiled_chain_equals_the_plain_function(name: str, dtype: torch.dtype) -> None:
    function, shapes, options = CASES[name]
    tensors = drawn(shapes, dtype)
    wanted = both_ways(plainly, function, tensors, options)
    assert error(both_ways(compiled, function, tensors, options), wanted) < TOLERANCE[dtype]


def test_a_rotation_keeps_nothing_of_what_it_turns() -> None:
    """It is linear in that; planted: the same is said of gates, whose gradient then is another."""
    heads, *tables = drawn([(2, 16, 4, 32), (2, 16, 8), (2, 16, 8)], torch.float32)
    grad = torch.randn(heads.shape, generator=torch.Generator().manual_seed(1))
    (wanted,) = torch.autograd.grad(rotate(heads.requires_grad_(), *tables), heads, grad)
    given = heads.detach().clone().requires_grad_()
    projected = given * 1.0
    kept = weakref.ref(projected.untyped_storage())
    turned = compiled(rotate, projected, *tables)
    del projected
    assert kept() is None
    turned.backward(grad)
    assert given.grad is not None and error([given.grad], [wanted]) < TOLERANCE[torch.float32]
    gate, up = drawn([(40, 96), (40, 96)], torch.float32)
    right = torch.autograd.grad(gate_and_up(gate.requires_grad_(), up).sum(), gate)
    wrong = torch.autograd.grad(compiled(fuse.linear(gate_and_up), gate, up).sum(), gate)
    assert error([*wrong], [*right]) > 0.1


def gate_and_up(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def test_planted_chain_without_its_numbers_is_another() -> None:
    """A chain is told by its numbers and shapes, too, whatever was compiled before."""
    (tensor,) = drawn([(2, 8)], torch.float32)
    numbers = {"norm_eps": 1e-6, "adds_one": False}
    names = [
        fuse.chain_of(rms_norm, tuple(sorted((numbers | other).items())), by, rows_vary, [each, each[0]])
        for other in ({}, {"adds_one": True})
        for by in (None, ((0,), 2))
        for rows_vary in (False, True)
        for each in (tensor, tensor.bfloat16())
    ]
    assert len(set(names)) == 16
    given = (rms_norm, tuple(sorted(numbers.items())), None, False, [tensor.clone(), tensor[0]])
    assert fuse.chain_of(*given) == names[0]
    torch.use_deterministic_algorithms(True)  # by which torch compiles otherwise, and does not look at it again
    try:
        assert fuse.chain_of(*given) not in names
    finally:
        torch.use_deterministic_algorithms(False)


def test_500_draws_of_rows_compile_nothing_anew() -> None:
    """Experts' rows differ each step. Rows of 0 and 1 are computed plainly: torch compiles these numbers as such."""
    generator = torch.Generator().manual_seed(5)
    before = None
    for step in range(500):
        n_rows = int(torch.randint(0, 400, (), generator=generator)) if step != 3 else 1
        tensors = [tensor.clone() for tensor in drawn([(n_rows, 16), (n_rows, 16), (n_rows, 1)], torch.float32)]
        options = {"swiglu_limit": None, "rows_vary": True}
        wanted = weighted(*tensors, swiglu_limit=None)
        leaves = [tensor.requires_grad_() for tensor in tensors]
        out = compiled(weighted, *leaves, **options)
        out.sum().backward()
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        if step == 5:
            before = counters["stats"]["unique_graphs"], len(known_chains())
    assert (counters["stats"]["unique_graphs"], len(known_chains())) == before


def test_what_is_one_kernel_as_it_is_is_not_compiled() -> None:
    rows = place_rows(torch.tensor([[0, 1], [1, 2]]), torch.tensor([1, 2, 1]), 1)
    hidden_TD, before = torch.randn(2, 4), len(known_chains())
    picked_RD, _ = compiled(to_rows_twice, hidden_TD, rows.rows_TK, rows.tokens_R, sum_by=compiled)
    assert torch.equal(picked_RD, hidden_TD[rows.tokens_R]) and len(known_chains()) == before


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 2])
def test_weights_in_the_sum_of_rows_compiled_are_the_plain_ones(top_k: int) -> None:
    """Both ways, with as many tokens as a draw gives; once compiled, nothing is compiled anew."""
    before = None
    for n_tokens in (30, 17, 64, 5, 128):
        generator = torch.Generator().manual_seed(n_tokens)
        indices_TK = torch.rand(n_tokens, 4, generator=generator).topk(top_k).indices
        rows = place_rows(indices_TK, indices_TK.flatten().bincount(minlength=4), 1)
        given = drawn([(n_tokens * top_k, 16), (n_tokens, top_k)], torch.float32)

        def run(fuse: Any, *leaves: Tensor, rows: Any = rows) -> Tensor:
            return WeightedSumRows.apply(*leaves, rows, fuse)

        found = [both_ways(run, fuse, given, {}) for fuse in (compiled, plainly)]
        assert error(*found) < TOLERANCE[torch.float32]
        summed = compiled(compiled_weighted_sum, *given, rows.rows_TK, rows_vary=True)
        assert error([summed], [found[1][0]]) < TOLERANCE[torch.float32]
        if n_tokens == 17:
            before = counters["stats"]["unique_graphs"], len(known_chains())
    assert (counters["stats"]["unique_graphs"], len(known_chains())) == before


@pytest.mark.slow
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_router_compiled_behind_its_choice_is_the_plain_one(score: ScoreName) -> None:
    """Weights, both losses' gradients and what is counted, with as many tokens as a draw of padding leaves.

    Planted: a loss scaled otherwise is seen in the router's gradient.
    """
    balance = SequenceAuxBalance(coefficient=0.5)
    moe = build_moe(MoEConfig(n_experts=8, top_k=2, d_ff=16, score=score, balance=balance, z_loss=0.5), 16)
    generator = torch.Generator().manual_seed(0)
    for weight in moe.parameters():
        torch.nn.init.normal_(weight.data, std=0.3, generator=generator)

    def found(run: Any, n_padding: int, z_scale: float = 1.0) -> list[Tensor]:
        fuse_chains(moe, run)
        moe.zero_grad()
        documents_BS = torch.zeros(2, 12, dtype=torch.int64)
        documents_BS[1, 12 - n_padding :] = PADDING
        places_BS = torch.arange(12).repeat(2, 1)
        context = Context(places_BS, documents_BS, 0.5, z_scale, has_padding=n_padding > 0)
        hidden_BSD = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(n_padding)).requires_grad_()
        out_BSD, stats = moe(hidden_BSD, context, 0)
        out_BSD.mean().backward()
        grads = [each.grad for each in (hidden_BSD, *moe.parameters()) if each.grad is not None]
        return [out_BSD.detach(), stats.entropy, stats.balance_loss, stats.z_loss, *grads]

    before = None
    for n_padding in (0, 3, 7, 1, 4):
        assert error(found(compiled, n_padding), found(plainly, n_padding)) < TOLERANCE[torch.float32]
        if n_padding == 7:
            before = counters["stats"]["unique_graphs"], len(known_chains())
    assert (counters["stats"]["unique_graphs"], len(known_chains())) == before
    assert error(found(compiled, 1, z_scale=1.01), found(plainly, 1)) > 1e-4


class Seen(TorchDispatchMode):
    """The operations by name, and what launcher.trace makes of the compiled ones."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.works: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        if func._schema.name == "roundtable::chain":
            self.works.append(work_of(func, args, kwargs or {}, out))
        return out


def test_who_watches_operations_sees_one_each_way() -> None:
    """Its bytes are those of what it reads and writes: beside the inputs it keeps nothing for the backward pass."""
    function, shapes, options = CASES["rms_norm"]
    tensors = [tensor.requires_grad_() for tensor in drawn(shapes, torch.float32)]
    compiled(function, *tensors, **options).sum().backward()  # torch compiles under no such mode
    with Seen() as seen:
        compiled(function, *tensors, **options).sum().backward()
    assert seen.names.count("roundtable::chain") == 2
    assert not {"aten::pow", "aten::rsqrt", "aten::mean"} & set(seen.names)
    hidden, weight = (tensor.nbytes for tensor in tensors)
    forward, backward = seen.works
    assert (forward.bytes, forward.launches) == (hidden + weight + hidden, 1)
    # The gradient by the weight is a sum over all rows: a second kernel reads what the first one has read.
    assert (backward.bytes, backward.launches) == (2 * (hidden + weight + hidden) + hidden + weight, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_traced_bytes_are_at_least_those_of_the_generated_kernels(name: str) -> None:
    """inductor counts the bytes of the kernels that it writes, each buffer of each kernel once; here for the CPU.

    The traced model is at most a tenth below it, and at most 1.7 times as high, for it counts gradients of shared
    weights as a kernel of their own, which the CPU's code fuses into the other. Of a convolution's gradient a CPU sums
    by each tap in a loop of its own, and a GPU by all in one (benchmarks/gpu/written_kernels.py): its value alone is
    held to what the CPU's code moves.
    """
    function, shapes, options = CASES[name]
    numbers = tuple(sorted((key, value) for key, value in options.items() if key != "rows_vary"))
    tensors = drawn(shapes, torch.float32)
    grad = function(*tensors, **dict(numbers))
    wanted = tuple(place for place, each in enumerate(tensors) if each.is_floating_point())
    wanted = wanted[:1] if fuse.is_linear(function) else wanted
    kept = [grad, *tensors[1:]] if fuse.is_linear(function) else tensors
    both = ((tensors, None), ([*kept, grad], (wanted, len(tensors))))
    for given, by in both[: 1 if function is short_convolution else 2]:
        chain = fuse.chain_named(fuse.chain_of(function, numbers, by, False, given))
        generated = generated_bytes(chain, given)
        traced = chain.moved_bytes(given, chain.fake(given))
        assert 0.9 * generated <= traced <= 1.7 * generated, (chain.label, generated, traced)


def generated_bytes(chain: Chain, tensors: list[Tensor]) -> int:
    """What inductor says that its kernels move."""
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    torch._dynamo.reset()
    metrics.reset()
    inductor_metrics_log.setLevel(logging.INFO)  # without it inductor does not count
    try:
        with config.patch(fx_graph_cache=False), torch._inductor.utils.fresh_cache():
            torch.compile(chain.function, fullgraph=True, dynamic=False)(*tensors)
    finally:
        inductor_metrics_log.setLevel(logging.WARNING)
    torch._dynamo.reset()
    return metrics.num_bytes_accessed


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_the_fused_loss_is_the_loss(z_loss: float) -> None:
    """In fp32, to the rounding of another order of sums: the plain function that CUDA compiles."""
    logits_TV = 4 * torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
    targets_T = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(1))
    targets_T[4] = IGNORE
    found = fused_losses(logits_TV, targets_T, z_loss=z_loss)
    wanted = losses_and_gradient(logits_TV.clone(), targets_T, True, z_loss)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_sums_of_rows_are_sums_of_rows() -> None:
    rows_RD, others_RD = drawn([(40, 8), (40, 8)], torch.float32)
    wanted = torch.stack([rows_RD[row].sum(0) for row in PLACES])
    for add in (gathered_sum, compiled_gathered_sum):
        torch.testing.assert_close(add(rows_RD, PLACES), wanted)
    both = wanted + torch.stack([others_RD[row].sum(0) for row in PLACES])
    torch.testing.assert_close(compiled_sum_of_two(rows_RD, others_RD, PLACES), both)
    torch.testing.assert_close(
        compiled_gathered_sum(rows_RD.bfloat16(), PLACES), wanted.bfloat16(), rtol=2**-7, atol=2**-6
    )


@pytest.mark.slow
def test_experts_with_compiled_gates_are_the_experts() -> None:
    """By grouped products, as CUDA has them; on a CPU those with biases take this way."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(30, 16), (4, 24, 16), (4, 24, 16), (4, 16, 24), (4, 24), (4, 24), (4, 16)]
    hidden_TD, gate, up, down, *biases = (torch.randn(shape, generator=generator) for shape in shapes)
    indices_TK = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(30)])
    weights_TK = torch.rand(30, 2, generator=generator)

    def found(run: Any) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (hidden_TD, weights_TK, gate, up, down)]
        given = (leaves[0], indices_TK, *leaves[1:], ExpertBiases(*biases))
        experts_grouped(*given, swiglu_limit=7.0, ways=Ways(fuse=run)).square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    assert error(found(compiled), found(plainly)) < TOLERANCE[torch.float32]


def test_without_a_compiler_auto_says_so_and_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    told: list[str] = []
    assert usable_fuse("auto", CPU, told.append) == ByRows() and told == []  # auto compiles nothing on a CPU
    fuse_of = compiling.fuse_of
    monkeypatch.setattr(
        compiling, "fuse_of", lambda choice, *rest: compiled if choice == "auto" else fuse_of(choice, *rest)
    )
    assert usable_fuse("auto", CPU, told.append) == ByRows()
    assert told == [
        "train.compile=auto: elementwise kernels are not compiled, so steps take longer: there is no no-such-compiler; "
        "install g++ and Python's headers, or set train.compile=off"
    ]
    with pytest.raises(UserError) as refused:
        usable_fuse("on", CPU, told.append)
    assert refused.value.problems == [
        "train.compile=on needs a compiler that works: there is no no-such-compiler; "
        "install g++ and Python's headers, or set train.compile=off"
    ]
    with pytest.raises(UserError):
        compiling.check_compiler("on")


def test_a_compiler_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by name, and fails when it is called."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("C++ compile error\nPython.h: No such file or directory")

    monkeypatch.setattr(compiling, "compiled", broken)
    assert why_not(CPU) == "RuntimeError: C++ compile error"
    monkeypatch.undo()
    assert why_not(CPU) is None
