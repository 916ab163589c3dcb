"""The short causal convolution of linear attention, which stays within each document.

Shape letters: B batch, S sequence, X channels, K tokens that one token sees.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.kernels.by_rows import by_rows, pieces
from modeling.kernels.fuse import rows_meet
from modeling.kernels.scratch import SCRATCH


def short_convolution_by_channels(
    inputs_BSX: Tensor, positions_BS: Tensor, taps_XK: Tensor, *, piece_bytes: int
) -> Tensor:
    """``short_convolution`` on a CPU, computed for some channels of one sequence at a time."""
    n_channels = max(1, piece_bytes // (4 * inputs_BSX.shape[1]))
    return _Convolution.apply(inputs_BSX, positions_BS, taps_XK, n_channels)


def convolution_gradients(
    inputs_BSX: Tensor, positions_BS: Tensor, taps_XK: Tensor, grad_BSX: Tensor
) -> tuple[Tensor, None, Tensor]:
    """The gradients of ``short_convolution`` by inputs and taps, written so that they compile into few kernels."""
    wide_BSX, wide_XK, wide_grad_BSX = inputs_BSX.float(), taps_XK.float(), grad_BSX.float()
    sum_BSX = convolved(inputs_BSX, positions_BS, taps_XK)
    share_BSX = sum_BSX.sigmoid()
    by_sum_BSX = wide_grad_BSX * share_BSX * (1 + sum_BSX * (1 - share_BSX))
    by_inputs_BSX = by_sum_BSX * wide_XK[:, -1]
    by_taps = [(by_sum_BSX * wide_BSX).sum((0, 1))]
    for back in range(1, min(taps_XK.shape[1], inputs_BSX.shape[1])):
        later_BSX = by_sum_BSX[:, back:] * (positions_BS[:, back:] >= back)[..., None]
        by_inputs_BSX = by_inputs_BSX + F.pad(later_BSX * wide_XK[:, -1 - back], (0, 0, 0, back))
        earlier_BSX = F.pad(wide_BSX[:, :-back], (0, 0, back, 0))  # sums over equally many rows share one kernel
        by_taps.append((by_sum_BSX * earlier_BSX * (positions_BS >= back)[..., None]).sum((0, 1)))
    by_taps += [torch.zeros_like(by_taps[0])] * (taps_XK.shape[1] - len(by_taps))
    return by_inputs_BSX.to(inputs_BSX.dtype), None, torch.stack(by_taps[::-1], dim=1).to(taps_XK.dtype)


@rows_meet(convolution_gradients)
@by_rows(short_convolution_by_channels)
def short_convolution(inputs_BSX: Tensor, positions_BS: Tensor, taps_XK: Tensor) -> Tensor:
    """The silu of each channel's weighted sum over the token (the last tap) and up to K - 1 before it in its document.

    Of the shape and dtype of ``inputs_BSX``, computed in fp32. ``positions_BS`` are the tokens' places in their
    documents.
    """
    return F.silu(convolved(inputs_BSX, positions_BS, taps_XK)).to(inputs_BSX.dtype)


def convolved(inputs_BSX: Tensor, positions_BS: Tensor, taps_XK: Tensor) -> Tensor:
    """The weighted sums before silu, fp32."""
    wide_BSX, wide_XK = inputs_BSX.float(), taps_XK.float()
    sum_BSX = wide_BSX * wide_XK[:, -1]
    for back in range(1, min(taps_XK.shape[1], inputs_BSX.shape[1])):
        is_seen_BS1 = (positions_BS[:, back:] >= back)[..., None]
        earlier_BSX = wide_BSX[:, :-back] * is_seen_BS1 * wide_XK[:, -1 - back]
        sum_BSX = sum_BSX + F.pad(earlier_BSX, (0, 0, back, 0))
    return sum_BSX


def continued_convolution(
    earlier_BKX: Tensor | None, inputs_BSX: Tensor, positions_BS: Tensor, taps_XK: Tensor
) -> tuple[Tensor, Tensor]:
    """The convolution of tokens that continue a sequence, and the last K - 1 inputs, which the next call needs.

    ``earlier_BKX`` are those inputs as returned for the tokens before; None means that there were none.
    """
    n_kept = taps_XK.shape[1] - 1
    if earlier_BKX is None:
        earlier_BKX = inputs_BSX.new_zeros(len(inputs_BSX), n_kept, inputs_BSX.shape[2])
    whole_BSX = torch.cat([earlier_BKX, inputs_BSX], dim=1)
    places_BS = F.pad(positions_BS, (n_kept, 0))
    out_BSX = short_convolution(whole_BSX, places_BS, taps_XK)[:, n_kept:]
    return out_BSX, whole_BSX[:, whole_BSX.shape[1] - n_kept :].clone()


class _Convolution(Function):
    """(inputs_BSX, positions_BS, taps_XK, channels of a piece) -> their ``short_convolution``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, inputs_BSX: Tensor, positions_BS: Tensor, taps_XK: Tensor, n_channels: int
    ) -> Tensor:
        ctx.save_for_backward(inputs_BSX, positions_BS, taps_XK)
        ctx.n_channels = n_channels
        out_BSX = torch.empty_like(inputs_BSX, memory_format=torch.contiguous_format)
        for row, part in rows_and_channels(inputs_BSX, n_channels):
            sum_SX = Sum(inputs_BSX[row, :, part], positions_BS[row], taps_XK[part]).before_silu()
            out_BSX[row, :, part] = F.silu(sum_SX, inplace=True)
        return out_BSX

    @staticmethod
    def backward(ctx: Any, grad_BSX: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs_BSX, positions_BS, taps_XK = ctx.saved_tensors  # read only once, as recomputation requires
        wants_inputs, _, wants_taps, _ = ctx.needs_input_grad
        by_inputs_BSX = torch.empty_like(inputs_BSX, memory_format=torch.contiguous_format) if wants_inputs else None
        by_taps_XK = torch.zeros_like(taps_XK, dtype=torch.float32)
        for row, part in rows_and_channels(inputs_BSX, ctx.n_channels):
            of_sum = Sum(inputs_BSX[row, :, part], positions_BS[row], taps_XK[part])
            grad_SX = of_sum.by_itself(grad_BSX[row, :, part])
            if wants_taps:
                of_sum.add_by_taps(grad_SX, by_taps_XK[part])
            if by_inputs_BSX is not None:
                by_inputs_BSX[row, :, part] = of_sum.by_inputs(grad_SX)
        return by_inputs_BSX, None, by_taps_XK.to(taps_XK.dtype) if wants_taps else None, None


def rows_and_channels(inputs_BSX: Tensor, n_channels: int) -> Iterator[tuple[int, slice]]:
    """Each sequence by itself, and of it ``n_channels`` channels at a time."""
    batch, _, width = inputs_BSX.shape
    return ((row, part) for row in range(batch) for part in pieces(width, n_channels))


class Sum:
    """The weighted sums of some channels of one sequence, before silu, in scratch memory that the next piece reuses."""

    def __init__(self, inputs_SX: Tensor, positions_S: Tensor, taps_XK: Tensor) -> None:
        self.inputs_SX = self.take("inputs", inputs_SX).copy_(inputs_SX)
        self.taps_KX = taps_XK.float().T.contiguous()
        n_seen = min(len(self.taps_KX), len(inputs_SX))
        self.is_seen_S1 = [(positions_S[back:] >= back)[:, None] for back in range(n_seen)]

    def take(self, name: str, inputs_SX: Tensor) -> Tensor:
        """An fp32 scratch tensor of the shape of ``inputs_SX``."""
        return SCRATCH.take(
            f"convolution: {name}", tuple(inputs_SX.shape), inputs_SX.new_empty((), dtype=torch.float32)
        )

    def shifted(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields (how far back, tap_X, the inputs that far back), for all taps but the token's own.

        The inputs are those that the tokens from ``how far back`` on see; where that would be another document they are
        zero.
        """
        for back, is_seen_S1 in enumerate(self.is_seen_S1[1:], 1):
            earlier_SX = self.inputs_SX[:-back]
            seen_SX = torch.mul(earlier_SX, is_seen_S1, out=self.take("seen", earlier_SX))
            yield back, self.taps_KX[-1 - back], seen_SX

    def before_silu(self) -> Tensor:
        """The weighted sums (S, X)."""
        sum_SX = torch.mul(self.inputs_SX, self.taps_KX[-1], out=self.take("sum", self.inputs_SX))
        for back, tap_X, seen_SX in self.shifted():
            sum_SX[back:].addcmul_(seen_SX, tap_X)
        return sum_SX

    def by_itself(self, grad_SX: Tensor) -> Tensor:
        """The gradient by the sums, from that by their silu.

        It is multiplied by p (1 + s (1 - p)), for a sum s and its sigmoid p.
        """
        wide_SX, sum_SX = self.take("gradient", grad_SX).copy_(grad_SX), self.before_silu()
        share_SX = torch.sigmoid(sum_SX, out=self.take("seen", sum_SX))
        wide_SX.mul_(share_SX)
        return wide_SX.mul_(share_SX.mul_(-1).add_(1).mul_(sum_SX).add_(1))

    def add_by_taps(self, grad_SX: Tensor, by_taps_XK: Tensor) -> None:
        """Adds the gradient by the taps to ``by_taps_XK``."""
        product_SX = torch.mul(grad_SX, self.inputs_SX, out=self.take("product", grad_SX))
        by_taps_XK[:, -1] += product_SX.sum(0)
        for back, _, seen_SX in self.shifted():
            by_taps_XK[:, -1 - back] += seen_SX.mul_(grad_SX[back:]).sum(0)

    def by_inputs(self, grad_SX: Tensor) -> Tensor:
        """The gradient by the inputs."""
        by_SX = torch.mul(grad_SX, self.taps_KX[-1], out=self.take("sum", grad_SX))
        for back, is_seen_S1 in enumerate(self.is_seen_S1[1:], 1):
            later_SX = torch.mul(grad_SX[back:], is_seen_S1, out=self.take("seen", grad_SX[back:]))
            by_SX[:-back].addcmul_(later_SX, self.taps_KX[-1 - back])
        return by_SX
