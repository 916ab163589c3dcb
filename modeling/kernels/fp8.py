"""Matrix products whose factors have 8 bits, which GPUs since Hopper compute at twice bf16's rate.

A factor is quantized to E4M3 (modeling.kernels.cuts), incoming gradients too, as in DeepSeek-V3 (arXiv:2412.19437,
section 3.3.2). Each row along the dim that the product sums over has its own scale, which brings its largest number
close to E4M3's largest, 448. Two choices keep the parallel layout from changing what is computed:

- scales are powers of two, so a scale alone rounds nothing: which other numbers of a row a rank sees matters only for a
  number that is 2^-14 of the row's largest or less, which loses bits. So even a dense weight's gradient has factors of
  8 bits, though it sums over tokens, which layouts divide among ranks and micro-batches: there a scale is for one
  channel of a micro-batch's tokens;
- scales belong to rows, not to tiles, whose edges would move when a weight is sharded; torch's grouped product takes no
  other scales.

Gradients by experts' weights are products in bf16: 8 bits would gain less there than it costs to quantize the rows once
more. Weights, master weights, tensors saved for the backward pass, and every reduction are as in bf16. Without such a
GPU the same factors are multiplied in bf16, which holds each of them exactly, and only sums differ: in their order, and
in the precision of Hopper's tensor cores, except in gradients by weights, whose sums are promoted to fp32 on the way
(docs/fp8.md).

Shape letters: R rows, E experts, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.kernels.cuts import Cut, Cuts, put_back
from modeling.kernels.fuse import Fuse, plainly


class Fp8Products:
    """``Products`` with factors of 8 bits. Rows and weights are bf16."""

    def __init__(self, fuse: Fuse = plainly, *, keeps_weights: bool = False) -> None:
        """``fuse`` computes the quantization.

        ``keeps_weights`` keeps quantized weights until they change (``Cuts``).
        """
        self.cuts = Cuts(fuse, keeps_weights=keeps_weights)

    def linear(self, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``inputs @ weight.T + bias`` (..., O), factors in 8 bits; the bias is added in bf16."""
        out = Fp8Linear.apply(inputs.flatten(0, -2), weight_OI, self.cuts).view(*inputs.shape[:-1], weight_OI.shape[0])
        return out if bias_O is None else out + bias_O

    def linear_grad(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """``grad @ weight`` (..., I), both in 8 bits."""
        grad_RI = product_back(grad.flatten(0, -2), weight_OI, self.cuts)
        return grad_RI.view(*grad.shape[:-1], weight_OI.shape[1])

    def weight_grad(self, grad_RO: Tensor, rows_RI: Tensor) -> Tensor:
        """``grad.T @ rows`` (O, I), both in 8 bits."""
        return sum_over_rows(grad_RO, rows_RI, self.cuts)

    def grouped(self, rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
        """Each row times its expert's matrix (R, O), both in 8 bits."""
        return Fp8Grouped.apply(rows_RI, ends_E, weight_EOI, self.cuts)

    def weights_changed(self) -> None:
        """To be called whenever the weights' values have changed: they are quantized again when next used."""
        self.cuts.weights_changed()

    def kept(self) -> list[Tensor]:
        """The quantized weights that are kept, and their factors."""
        return [tensor for _, made in (self.cuts.kept or {}).values() for tensor in made]


class Fp8Linear(Function):
    """(rows_RI, weight_OI, cuts) -> rows @ weight.T (R, O)."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight_OI: Tensor, cuts: Cuts) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows_RI, weight_OI)
        ctx.cuts = cuts
        return product(rows_RI, weight_OI, cuts)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows_RI, weight_OI = ctx.saved_tensors
        wants_rows, wants_weight, _ = ctx.needs_input_grad
        grad_rows_RI = product_back(grad_RO, weight_OI, ctx.cuts) if wants_rows else None
        return grad_rows_RI, sum_over_rows(grad_RO, rows_RI, ctx.cuts) if wants_weight else None, None


class Fp8Grouped(Function):
    """(rows_RI, ends_E, weight_EOI, cuts) -> each row times its expert's matrix (R, O)."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, cuts: Cuts) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows_RI, ends_E, weight_EOI)
        ctx.cuts = cuts
        return grouped_product(rows_RI, ends_E, weight_EOI, cuts)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows_RI, ends_E, weight_EOI = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        grad_rows_RI = grouped_product_back(grad_RO, ends_E, weight_EOI, ctx.cuts)
        if len(rows_RI) == 0:  # torch does not take empty factors here
            return grad_rows_RI, None, torch.zeros_like(weight_EOI), None
        return grad_rows_RI, None, F.grouped_mm(grad_RO.t(), rows_RI, offs=ends_E), None


def product(rows_RI: Tensor, weight_OI: Tensor, cuts: Cuts) -> Tensor:
    """The product rows @ weight.T (R, O) in bf16, with both factors quantized to 8 bits along I."""
    return multiplied(cuts.of_rows(rows_RI), cuts.of_weight(weight_OI, across=False), rows_RI.dtype, fast=True)


def product_back(grad_RO: Tensor, weight_OI: Tensor, cuts: Cuts) -> Tensor:
    """The product grad @ weight (R, I) in bf16, with both factors quantized to 8 bits along O."""
    return multiplied(cuts.of_gradient(grad_RO), cuts.of_weight(weight_OI, across=True), grad_RO.dtype, fast=True)


def sum_over_rows(grad_RO: Tensor, rows_RI: Tensor, cuts: Cuts) -> Tensor:
    """grad.T @ rows (O, I) in bf16, with both factors quantized to 8 bits along R, however long that is."""
    if len(rows_RI) == 0:
        return grad_RO.new_zeros(grad_RO.shape[1], rows_RI.shape[1])
    return multiplied(cuts.of_gradient_across(grad_RO), cuts.of_rows_across(rows_RI), grad_RO.dtype, fast=False)


def multiplied(rows: Cut, weight: Cut, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """The product rows (R, I) @ weight (O, I).T of quantized factors, in ``dtype``.

    ``fast`` is passed to ``scaled_product``. On a CPU the factors are multiplied in bf16.
    """
    if rows[0].is_cpu or len(rows[0]) == 0:
        return F.linear(put_back(*rows), put_back(*weight))
    return scaled_product(*rows, *weight, dtype, fast=fast)


def scaled_product(
    rows_8: Tensor, rows_R1: Tensor, weight_8: Tensor, weight_O1: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """rows_8 (R, I) @ weight_8 (O, I).T, times both factors, by torch's operator for GPUs.

    With ``fast``, sums stay in the tensor cores, which keep fewer bits of them, instead of being promoted to fp32.
    """
    row = F.ScalingType.RowWise
    return F.scaled_mm(rows_8, weight_8.t(), rows_R1, row, weight_O1.t(), row, output_dtype=dtype, use_fast_accum=fast)


def grouped_product(rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, cuts: Cuts) -> Tensor:
    """Each row times its expert's matrix (R, O) in bf16, with both factors quantized to 8 bits along I."""
    return multiplied_by_expert(cuts.of_rows(rows_RI), ends_E, cuts.of_weight(weight_EOI, across=False), rows_RI.dtype)


def grouped_product_back(grad_RO: Tensor, ends_E: Tensor, weight_EOI: Tensor, cuts: Cuts) -> Tensor:
    """The gradient by the rows (R, I) in bf16, with both factors quantized to 8 bits along O."""
    return multiplied_by_expert(
        cuts.of_gradient(grad_RO), ends_E, cuts.of_weight(weight_EOI, across=True), grad_RO.dtype
    )


def multiplied_by_expert(rows: Cut, ends_E: Tensor, weight: Cut, dtype: torch.dtype) -> Tensor:
    """Each row times its expert's matrix (R, O), from quantized rows (R, I) and weights (E, O, I)."""
    (rows_8, rows_R1), (weight_8, weight_EO1) = rows, weight
    if rows_8.is_cpu or len(rows_8) == 0:
        return F.grouped_mm(put_back(*rows), put_back(*weight).transpose(1, 2), offs=ends_E)
    # F.scaled_grouped_mm's operator has no rule for fake tensors (torch 2.13); this one, of the same kernel, has.
    # Sums stay in the tensor cores: brought into fp32 registers on the way, they take longer than a product in bf16
    # (H200, torch 2.11, 128 experts of 512 rows, 2,048 x 768: 244 TFLOP/s, 572 in bf16, 699 this way).
    scales = (rows_R1[:, 0], weight_EO1[..., 0])
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        rows_8, weight_8.transpose(1, 2), *scales, offs=ends_E, out_dtype=dtype, use_fast_accum=True
    )
