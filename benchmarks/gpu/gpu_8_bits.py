"""Products whose factors have 8 bits, on the device, against those of the cut factors in fp32 on the CPU.

Shape letters: R rows, E experts, I what goes in, O what comes out.
"""

from functools import partial

import torch
from torch import Tensor

from gpu_compare import BOUNDS, compare
from gpu_part import Check, Place
from modeling.kernels import fp8
from modeling.kernels.cuts import Cuts, cut, put_back


def checks() -> list[Check]:
    """Of part 1."""
    return [
        Check(f"{kind} of 8 bits, {name}", partial(check, across))
        for name, across in (("forward", False), ("gradients by rows", True))
        for kind, check in (("products", check_product), ("grouped products", check_by_expert))
    ] + [
        Check("products of 8 bits, forward, long sums", check_long_sums),
        Check("products of 8 bits, gradients by weights", check_weight_grad),
    ]


def check_product(across: bool, place: Place) -> None:
    """A product of factors cut to 8 bits is that of the cut ones, but for its rounding."""
    rows_RI, weight_EOI = drawn_factors(place)
    weight_OI = weight_EOI[0]
    there_RI, there = (each.to(place.device) for each in (rows_RI, weight_OI.t().contiguous() if across else weight_OI))
    ours = (fp8.product_back if across else fp8.product)(there_RI, there, Cuts())
    compare_product(ours, put_back_in_fp32(rows_RI) @ put_back_in_fp32(weight_OI).t(), place)


def check_long_sums(place: Place) -> None:
    """Over the widest rows of an 8B model: sums that stay in the tensor cores lose more, the longer they are."""
    n_rows, n_out, n_inner = place.small((2048, 1024, 14336), (96, 32, 128))
    generator = torch.Generator().manual_seed(3)
    rows_RI = torch.randn(n_rows, n_inner, generator=generator).bfloat16()
    weight_OI = (torch.randn(n_out, n_inner, generator=generator) * n_inner**-0.5).bfloat16()
    ours = fp8.product(rows_RI.to(place.device), weight_OI.to(place.device), Cuts())
    compare_product(ours, put_back_in_fp32(rows_RI) @ put_back_in_fp32(weight_OI).t(), place)


def check_weight_grad(place: Place) -> None:
    """A sum over rows that are no whole units of 16."""
    n_rows, n_out, n_in = place.small((8191, 1024, 2048), (95, 32, 64))
    generator = torch.Generator().manual_seed(4)
    grad_RO, rows_RI = (torch.randn(n_rows, width, generator=generator).bfloat16() for width in (n_out, n_in))
    ours = fp8.sum_over_rows(grad_RO.to(place.device), rows_RI.to(place.device), Cuts())
    compare_product(ours, put_back_in_fp32(grad_RO.t()) @ put_back_in_fp32(rows_RI.t()).t(), place)


def check_by_expert(across: bool, place: Place) -> None:
    """The same, each row by its expert's matrix; one expert has no row, one has one."""
    rows_RI, weight_EOI = drawn_factors(place)
    n_experts, n_rows = len(weight_EOI), len(rows_RI)
    ends_E = torch.linspace(0, n_rows, n_experts).to(torch.int32)  # the first has none
    ends_E[1] = 1
    there_RI, there = (
        each.to(place.device) for each in (rows_RI, weight_EOI.transpose(1, 2).contiguous() if across else weight_EOI)
    )
    product = fp8.grouped_product_back if across else fp8.grouped_product
    ours = product(there_RI, ends_E.to(place.device), there, Cuts())
    bounds = [0, *ends_E.tolist()]
    cut_RI, cut_EOI = put_back_in_fp32(rows_RI), put_back_in_fp32(weight_EOI)
    theirs = [cut_RI[first:end] @ matrix.t() for first, end, matrix in zip(bounds, bounds[1:], cut_EOI, strict=False)]
    compare_product(ours, torch.cat(theirs), place)


def drawn_factors(place: Place) -> tuple[Tensor, Tensor]:
    """rows_RI and weight_EOI, bf16, on the CPU."""
    n_rows, n_experts, width, n_inner = place.small((4096, 16, 768, 2048), (96, 4, 32, 64))
    generator = torch.Generator().manual_seed(2)
    rows_RI = torch.randn(n_rows, n_inner, generator=generator).bfloat16()
    return rows_RI, (torch.randn(n_experts, width, n_inner, generator=generator) * n_inner**-0.5).bfloat16()


def put_back_in_fp32(numbers: Tensor) -> Tensor:
    """What is multiplied, in fp32."""
    return put_back(*cut(numbers)).float()


def compare_product(ours: Tensor, theirs: Tensor, place: Place) -> None:
    """By row, and the whole as a figure: rounding to bf16 alone makes 1.7e-3 of the norm."""
    mine = ours.cpu().float()
    place.figure("rounding", float((mine - theirs).norm() / theirs.norm()), "of the product's norm")
    compare("product", mine, theirs, BOUNDS["bf16"])
