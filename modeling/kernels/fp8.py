"""Matrix products whose factors have 8 bits, as GPUs since Hopper compute them at twice bf16's rate.

A factor is cut to E4M3 (Micikevicius et al. 2022, arXiv:2209.05433, section 3), the gradient that comes in too, as in
DeepSeek-V3 (arXiv:2412.19437, section 3.3.2). Each row along what the product sums over has a scale of its own, which
brings its largest number next to E4M3's, 448. Two choices keep a layout from changing what is computed:

- scales are powers of two, so a scale alone rounds nothing: which numbers a rank sees beside a number matters only
  where that is 2^-14 of its row's largest or less, and loses bits. So a dense weight's gradient, too, has factors of 8
  bits: it sums over tokens, which layouts share out over ranks and micro-batches, and a scale is one channel's of a
  micro-batch's tokens;
- scales belong to rows, not to tiles, whose edges a cut weight would move; torch's grouped product takes no others.

Gradients by experts' weights are products in bf16: 8 bits would gain less there than cutting the rows once more costs.
Weights, masters, what is kept for the backward pass, and every reduction are as in bf16. Where there is no such GPU the
same factors are multiplied in bf16, which holds each of them exactly, and only sums differ: in their order, and in what
Hopper's tensor cores keep of them, but for gradients by weights, whose sums are brought into fp32 on the way
(docs/fp8.md).

Shape letters: R rows, E experts, I what goes in, O what comes out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.kernels.fuse import Fuse, in_parts, plainly

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # E4M3's largest number, 1.75 * 2^8
LARGEST_EXPONENT = 8
LARGEST_FRACTION = 0.75
BIAS = 127  # of a float's exponent in 32 bits
FRACTION_BITS = 23
MOST = 120  # a scale lies within 2^-MOST and 2^MOST: it and its inverse are normal numbers
UNIT = 16  # tensor cores take rows of whole units of 16 bytes, along both sides of a factor


class Fp8Products:
    """``Products`` with factors of 8 bits. Rows and weights are bf16.

    ``fuse``: how factors are cut to 8 bits, in one kernel or in many.
    """

    def __init__(self, fuse: Fuse = plainly) -> None:
        self.fuse = fuse

    def linear(self, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """As Products.linear; the bias is added in bf16."""
        out = Fp8Linear.apply(inputs.flatten(0, -2), weight_OI, self.fuse).view(*inputs.shape[:-1], weight_OI.shape[0])
        return out if bias_O is None else out + bias_O

    def linear_grad(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """As Products.linear_grad."""
        grad_RI = product(grad.flatten(0, -2), weight_OI, self.fuse, across=True)
        return grad_RI.view(*grad.shape[:-1], weight_OI.shape[1])

    def weight_grad(self, grad_RO: Tensor, rows_RI: Tensor) -> Tensor:
        """As Products.weight_grad."""
        return sum_over_rows(grad_RO, rows_RI, self.fuse)

    def grouped(self, rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
        """As Products.grouped."""
        return Fp8Grouped.apply(rows_RI, ends_E, weight_EOI, self.fuse)


class Fp8Linear(Function):
    """(rows_RI, weight_OI, fuse) -> rows @ weight.T (R, O)."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight_OI: Tensor, fuse: Fuse) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows_RI, weight_OI)
        ctx.fuse = fuse
        return product(rows_RI, weight_OI, fuse)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows_RI, weight_OI = ctx.saved_tensors
        wants_rows, wants_weight, _ = ctx.needs_input_grad
        grad_rows_RI = product(grad_RO, weight_OI, ctx.fuse, across=True) if wants_rows else None
        return grad_rows_RI, sum_over_rows(grad_RO, rows_RI, ctx.fuse) if wants_weight else None, None


class Fp8Grouped(Function):
    """(rows_RI, ends_E, weight_EOI, fuse) -> each row times its expert's matrix (R, O)."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, fuse: Fuse) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows_RI, ends_E, weight_EOI)
        ctx.fuse = fuse
        return grouped_product(rows_RI, ends_E, weight_EOI, fuse)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows_RI, ends_E, weight_EOI = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        grad_rows_RI = grouped_product(grad_RO, ends_E, weight_EOI, ctx.fuse, across=True)
        if len(rows_RI) == 0:  # of which torch makes no product
            return grad_rows_RI, None, torch.zeros_like(weight_EOI), None
        return grad_rows_RI, None, F.grouped_mm(grad_RO.t(), rows_RI, offs=ends_E), None


def product(rows: Tensor, weight: Tensor, fuse: Fuse, *, across: bool = False) -> Tensor:
    """rows_RI @ weight_OI.T (R, O) in bf16, both factors cut to 8 bits along I. ``across``: the weight is (I, O)."""
    cut_weight = cut_across if across else cut
    if rows.is_cpu or len(rows) == 0:
        return F.linear(put_back(*cut(rows)), put_back(*cut_weight(weight)))
    rows_8, rows_R1 = fuse(cut, rows, rows_vary=True)
    weight_8, weight_O1 = fuse(cut_weight, weight)
    return scaled_product(rows_8, rows_R1, weight_8, weight_O1, rows.dtype, fast=True)


def sum_over_rows(grad_RO: Tensor, rows_RI: Tensor, fuse: Fuse) -> Tensor:
    """grad_RO.T @ rows_RI (O, I) in bf16, both factors cut to 8 bits along R, whatever its length."""
    if len(rows_RI) == 0:
        return grad_RO.new_zeros(grad_RO.shape[1], rows_RI.shape[1])
    if rest := -len(rows_RI) % UNIT:
        grad_RO, rows_RI = (F.pad(each, (0, 0, 0, rest)) for each in (grad_RO, rows_RI))
    if rows_RI.is_cpu:
        return F.linear(put_back(*cut_across(grad_RO)), put_back(*cut_across(rows_RI)))
    grad_8, grad_O1 = fuse(cut_across, grad_RO, rows_vary=True)
    rows_8, rows_I1 = fuse(cut_across, rows_RI, rows_vary=True)
    return scaled_product(grad_8, grad_O1, rows_8, rows_I1, grad_RO.dtype, fast=False)


def scaled_product(
    rows_8: Tensor, rows_R1: Tensor, weight_8: Tensor, weight_O1: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """rows_8 (R, I) @ weight_8 (O, I).T, times both factors, by torch's operator for GPUs.

    ``fast``: sums stay in the tensor cores, which keep fewer bits of them, instead of coming into fp32 on the way.
    """
    row = F.ScalingType.RowWise
    return F.scaled_mm(rows_8, weight_8.t(), rows_R1, row, weight_O1.t(), row, output_dtype=dtype, use_fast_accum=fast)


def grouped_product(rows: Tensor, ends_E: Tensor, weight: Tensor, fuse: Fuse, *, across: bool = False) -> Tensor:
    """Each row times its expert's matrix (R, O) in bf16, both factors cut to 8 bits along I.

    The weight is (E, O, I); ``across``: (E, I, O).
    """
    cut_weight = cut_across if across else cut
    if rows.is_cpu or len(rows) == 0:
        return F.grouped_mm(put_back(*cut(rows)), put_back(*cut_weight(weight)).transpose(1, 2), offs=ends_E)
    rows_8, rows_R1 = fuse(cut, rows, rows_vary=True)
    weight_8, weight_EO1 = fuse(cut_weight, weight)
    # F.scaled_grouped_mm's operator has no rule for fake tensors (torch 2.13); this one, of the same kernel, has.
    # Sums stay in the tensor cores: brought into fp32 registers on the way, they take longer than a product in bf16
    # (H200, torch 2.11, 128 experts of 512 rows, 2,048 x 768: 244 TFLOP/s, 572 in bf16, 699 this way).
    scales = (rows_R1[:, 0], weight_EO1[..., 0])
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        rows_8, weight_8.transpose(1, 2), *scales, offs=ends_E, out_dtype=rows.dtype, use_fast_accum=True
    )


def cut(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(..., I) in E4M3, contiguous, and fp32 factors (..., 1), powers of two, that bring the numbers back.

    Rows of zeros stay zeros. Of a row that is not finite the factor is NaN, and so is what is made of it: E4M3 has no
    infinity, and would hide it behind its largest number.
    """
    largest = numbers.abs().amax(-1, keepdim=True).float().view(torch.int32)
    exponent = (largest >> FRACTION_BITS) - BIAS
    above = (largest & ((1 << FRACTION_BITS) - 1)) > int(LARGEST_FRACTION * (1 << FRACTION_BITS))
    shift = (LARGEST_EXPONENT - exponent - above.to(torch.int32)).clamp(-MOST, MOST)
    factors = power_of_two(-shift).masked_fill(exponent == BIAS + 1, torch.nan)
    return (numbers.float() * power_of_two(shift)).to(E4M3).contiguous(), factors


@in_parts  # the largest numbers first, then all of them
def cut_across(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """``cut`` of the matrices' transposes: of (..., I, O) in (..., O, I), with factors (..., O, 1)."""
    return cut(numbers.transpose(-1, -2))


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, exactly, from int32."""
    return ((exponent + BIAS) << FRACTION_BITS).view(torch.float32)


def put_back(numbers_8: Tensor, factors: Tensor) -> Tensor:
    """What products in 8 bits multiply, in bf16, which holds it exactly."""
    return (numbers_8.float() * factors).bfloat16()
