"""Rates of single kernels at the two models' shapes, each alone: what an estimate of a step is made of.

Shape letters: T tokens, H heads, G key-value heads, C d_head, R rows, E experts, I what goes in, O what comes out.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import gpu_device
from gpu_part import Check, Place
from modeling.context import Context
from modeling.dtypes import DTYPES
from modeling.kernels.attention import attend, fits_rows, row_attention, varlen_attention
from modeling.kernels.cuts import E4M3, Cuts
from modeling.kernels.experts import compiled_gathered_sum, gathered_sum
from modeling.kernels.fp8 import scaled_product
from modeling.kernels.fuse import compiled, plainly
from modeling.optimizers.muon import MuonConfig
from modeling.optimizers.orthogonal import orthogonal
from parallel.zero import accumulation
from parallel.zero.norm import sum_by_rows

# Documents of one row of 8,192 tokens.
DOCUMENTS = {"one": (8192,), "five": (3000, 1200, 37, 2155, 1800), "sixteen": (512,) * 16}
DENSE = ((4096, 6144), (4096, 14336), (14336, 4096), (2048, 5120))  # (I, O): Llama 3 8B's, and one of A3B's
EXPERTS = ((2048, 768), (768, 2048))  # of 128
N_EXPERTS, TOP_K = 128, 8


def checks() -> list[Check]:
    """Of part 3."""
    return [
        Check("kernels: attention", check_attention, 90),
        Check("kernels: products", check_products, 60),
        Check("kernels: cutting to 8 bits", check_cutting, 60),
        Check("kernels: grouped products", check_grouped, 60),
        Check("kernels: rows of experts", check_rows, 60),
        Check("kernels: sums of gradients", check_sums, 60),
        Check("kernels: Muon's iterations", check_orthogonal, 60),
        Check("kernels: a launch", check_launch, 30),
    ]


def median_seconds(function: Callable[[], object], place: Place) -> float:
    """Of ten calls."""
    return gpu_device.seconds_of(function, place.device, repeats=place.small(10, 2), warm_up=place.small(3, 1))


def rate(name: str, flops: float, function: Callable[[], object], place: Place) -> None:
    """Writes down the call's TFLOP/s."""
    place.figure(name, flops / median_seconds(function, place) / 1e12, "TFLOP/s")


def drawn(place: Place, *shape: int) -> Tensor:
    """Random numbers in bf16, on the device."""
    return torch.randn(shape, device=place.device, dtype=torch.bfloat16)


def check_attention(place: Place) -> None:
    """32 heads of 128 channels with 8 key-value heads, forward and backward, by each kernel that fits."""
    n_heads, n_kv_heads, d_head = place.small((32, 8, 128), (4, 2, 16))
    for name, lengths in DOCUMENTS.items():
        lengths = tuple(max(1, length // place.small(1, 64)) for length in lengths)
        context = packed(lengths).to(place.device)
        q, k, v = (drawn(place, 1, sum(lengths), n, d_head).requires_grad_() for n in (n_heads, n_kv_heads, n_kv_heads))
        kernels: dict[str, Callable[[], Tensor]] = {}
        if place.device.type == "cuda":
            kernels["FlashAttention"] = lambda q=q, k=k, v=v, c=context: varlen_attention(q, k, v, c, None)
            if context.rows_are_documents and fits_rows(q, v):
                kernels["cuDNN"] = lambda q=q, k=k, v=v: row_attention(q, k, v)
        else:
            kernels["by document"] = lambda q=q, k=k, v=v, c=context: attend(q, k, v, c, None)
        flops = sum(2 * length**2 * n_heads * d_head for length in lengths)
        for kernel, call in kernels.items():
            rate(f"{kernel}, {name}, forward", flops, call, place)
            out = call()
            grad = torch.randn_like(out)
            rate(
                f"{kernel}, {name}, backward",
                2.5 * flops,
                lambda out=out, grad=grad, heads=(q, k, v): torch.autograd.grad(out, heads, grad, retain_graph=True),
                place,
            )


def packed(lengths: Sequence[int]) -> Context:
    """One row of documents."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    return Context(positions, documents)


def check_products(place: Place) -> None:
    """8,192 rows: forward, by rows and by the weight in bf16; forward with factors of 8 bits."""
    n_rows = place.small(8192, 32)
    for n_in, n_out in DENSE:
        n_in, n_out = (each // place.small(1, 64) for each in (n_in, n_out))
        rows, weight, grad = drawn(place, n_rows, n_in), drawn(place, n_out, n_in), drawn(place, n_rows, n_out)
        flops, name = 2.0 * n_rows * n_in * n_out, f"{n_in} to {n_out}"
        rate(f"{name}, forward", flops, lambda a=rows, w=weight: F.linear(a, w), place)
        rate(f"{name}, by rows", flops, lambda g=grad, w=weight: g @ w, place)
        rate(f"{name}, by the weight", flops, lambda g=grad, a=rows: g.t() @ a, place)
        if place.device.type == "cuda":
            ones = [torch.ones(n, 1, device=place.device) for n in (n_rows, n_out)]
            factors = rows.to(E4M3), ones[0], weight.to(E4M3), ones[1]
            for sums, fast in (("sums left", True), ("sums brought out", False)):
                kernel = partial(scaled_product, *factors, torch.bfloat16, fast=fast)
                rate(f"{name}, forward, 8 bits, {sums}", flops, kernel, place)


def check_cutting(place: Place) -> None:
    """8,192 rows cut to 8 bits along their width, and along the rows as transposes, compiled.

    Bytes are read in 16 bits and written in 8, once each.
    """
    for n_in, _ in DENSE[1:3]:
        rows = drawn(place, place.small(8192, 32), n_in // place.small(1, 64))
        cuts = Cuts(compiled if place.device.type == "cuda" else plainly)
        for name, function in (("by rows", cuts.of_gradient), ("across", cuts.of_gradient_across)):
            seconds = median_seconds(partial(function, rows), place)
            place.figure(f"{n_in} wide, {name}", 3 * rows.numel() / seconds / 1e9, "GB/s")


def check_grouped(place: Place) -> None:
    """65,536 rows of 128 experts, as many for each and unevenly: forward, by rows and by the weights."""
    n_experts, n_rows = place.small((N_EXPERTS, 8192 * TOP_K), (8, 256))
    uneven = torch.rand(n_experts, generator=torch.Generator().manual_seed(1)).square()
    counts = {"even": torch.full((n_experts,), n_rows // n_experts), "uneven": (uneven / uneven.sum() * n_rows).long()}
    counts["uneven"][0] += n_rows - counts["uneven"].sum()
    for (n_in, n_out), (kind, counts_E) in itertools.product(EXPERTS, counts.items()):
        n_in, n_out = (each // place.small(1, 16) for each in (n_in, n_out))
        ends_E = counts_E.cumsum(0).to(torch.int32).to(place.device)
        rows, weight, grad = (
            drawn(place, n_rows, n_in),
            drawn(place, n_experts, n_out, n_in),
            drawn(place, n_rows, n_out),
        )
        flops, name = 2.0 * n_rows * n_in * n_out, f"{n_in} to {n_out}, {kind}"
        rate(f"{name}, forward", flops, lambda a=rows, w=weight, e=ends_E: F.grouped_mm(a, w.mT, offs=e), place)
        rate(f"{name}, by rows", flops, lambda g=grad, w=weight, e=ends_E: F.grouped_mm(g, w, offs=e), place)
        rate(f"{name}, by the weights", flops, lambda g=grad, a=rows, e=ends_E: F.grouped_mm(g.t(), a, offs=e), place)


def check_rows(place: Place) -> None:
    """8,192 tokens go to the rows of 8 experts each, and each token's rows are added up: plainly, and compiled twice.

    Bytes are those of the tokens and of the rows, once each.
    """
    n_tokens, d_model = place.small((8192, 2048), (32, 16))
    order_R = torch.randperm(n_tokens * TOP_K, generator=torch.Generator().manual_seed(0)).to(place.device)
    rows_TK = order_R.view(n_tokens, TOP_K)
    tokens_R = torch.empty_like(order_R).index_copy_(0, order_R, torch.arange(len(order_R), device=place.device))
    hidden_TD, rows_RD = drawn(place, n_tokens, d_model), drawn(place, n_tokens * TOP_K, d_model)
    ways: dict[str, Callable[[], Tensor]] = {
        "to rows": lambda: hidden_TD.index_select(0, tokens_R // TOP_K),
        "added up, plainly": lambda: gathered_sum(rows_RD, rows_TK),
        "added up, compiled as a reduction": lambda: compiled(gathered_sum, rows_RD, rows_TK, rows_vary=True),
        "added up, compiled place by place": lambda: compiled(compiled_gathered_sum, rows_RD, rows_TK, rows_vary=True),
    }
    wanted_TD = gathered_sum(rows_RD.float(), rows_TK)
    for name, way in ways.items():
        if name != "to rows":
            torch.testing.assert_close(way().float(), wanted_TD, rtol=2**-6, atol=2**-5)
        n_bytes = hidden_TD.nbytes + rows_RD.nbytes
        place.figure(name, n_bytes / median_seconds(way, place) / 1e9, "GB/s")


def check_sums(place: Place) -> None:
    """A flat fp32 sum takes a gradient in bf16, and its squares are summed: torch's own kernels, and compiled."""
    n_elements = place.small(2**28, 2**12)
    total, gradient = torch.zeros(n_elements, device=place.device), drawn(place, n_elements)
    for name, kind in (("torch's own", accumulation.PLAIN), ("compiled", accumulation.COMPILED)):
        for way, take, n_bytes in (("add", kind.add, 10), ("write", kind.write, 6)):
            seconds = median_seconds(lambda take=take: take(total, gradient), place)
            place.figure(f"{name}, {way}", n_bytes * n_elements / seconds / 1e9, "GB/s")
    total.normal_()
    squares = {
        "torch's own": lambda: torch.linalg.vector_norm(total, dtype=torch.float64).square(),
        "compiled": lambda: sum_by_rows(total, compiled),
    }
    for name, way in squares.items():
        torch.testing.assert_close(way(), squares["torch's own"](), rtol=1e-12, atol=0)
        place.figure(f"{name}, squares", 4 * n_elements / median_seconds(way, place) / 1e9, "GB/s")


def check_orthogonal(place: Place) -> None:
    """A matrix of Llama 3 8B's and experts of A3B's, in fp32 and in bf16; both near what fp64 makes of smaller ones."""
    for matrices in ((4096, 14336), (21, 768, 2048)):
        *stack, rows, columns = matrices
        shape = (*stack, rows // place.small(1, 64), columns // place.small(1, 64))
        drawn_fp32 = torch.randn(shape, device=place.device)
        small = drawn_fp32[..., : shape[-2] // 8, : shape[-1] // 8]
        exact = orthogonal(small.double(), torch.float64)
        for rule, bound in ((MuonConfig(), 1e-4), (MuonConfig(iteration_dtype="bf16"), 4e-2)):
            dtype, name = DTYPES[rule.iteration_dtype], f"{' x '.join(map(str, matrices))}, {rule.iteration_dtype}"
            error = float((orthogonal(small, dtype) - exact).norm() / exact.norm())
            assert error < bound, f"{name}: {error:.1e} of the update's norm from fp64's"
            flops = math.prod(stack) * rule.matrix_work(*shape[-2:]).flops
            rate(name, flops, partial(orthogonal, drawn_fp32, dtype), place)


def check_launch(place: Place) -> None:
    """What one small kernel after the other takes: the host's time for each."""
    number, n_calls = torch.zeros(1, device=place.device), place.small(2000, 20)
    gpu_device.synchronize(place.device)
    started = time.perf_counter()
    for _ in range(n_calls):
        number.add_(1)
    gpu_device.synchronize(place.device)
    place.figure("a launch", (time.perf_counter() - started) / n_calls * 1e6, "us")
