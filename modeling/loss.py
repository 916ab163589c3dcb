"""The vocabulary head and the token cross-entropy, chunk by chunk, without all logits in memory at once.

Shape letters: T tokens, D d_model, V vocab_size.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from modeling.dims import Weight
from modeling.kernels import row_passes
from modeling.kernels.by_rows import pieces
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.stand_ins import stand_in

IGNORE = -100  # a target that does not count
# Logits that exist at once: 64 MiB on a CPU in 16 bits (half as many logits in 32); 3 GiB on CUDA, where each logit
# takes 12 bytes with its intermediate values. There 2048 tokens of a vocabulary of 131072 make the products large
# enough, and the weight's gradient (fp32, read and written once a chunk) is passed over 4 times in 8192 tokens, where
# 2^24 logits took 64 passes; more logits would save little.
CPU_CHUNK_LOGITS = 1 << 25
CUDA_CHUNK_LOGITS = 1 << 28
# On a CPU a chunk has at most this many tokens in 16 bits, half as many in 32: larger products are no faster, and
# logits take memory (docs/measurements.md).
CPU_CHUNK_TOKENS = 512
# On a CPU elementwise work after a product takes this many elements at a time (1 MiB in fp32), which stay in a core's
# own cache: a softmax of 512 x 16384 logits took 5 ms in pieces of 16 tokens and 20 in pieces of 256 (AMX, one thread,
# 2026-11-23).
CPU_CACHED = 1 << 18


# (logits_TV, targets_T, wants_gradient) -> each target's cross-entropy, each target's z-loss (its logits' logsumexp,
# squared), and a gradient or None. Both losses are zero where a target is IGNORE. The gradient, by the logits, is that
# of the trained total: cross-entropies plus coefficient times z-losses. The logits, in the hidden states' dtype, may be
# overwritten by it.
Losses = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor | None]]


class ChunkedCrossEntropy(Function):
    """(hidden_TD, weight_VD, targets_T, chunk_logits, losses, fuse) -> the sums of cross-entropies and z-losses.

    Both are fp64 scalars. The first one's gradient is that of the trained total, z-losses included; the second one has
    none. ``losses`` turns one chunk's logits into losses. Gradients are computed in the forward pass, while the logits
    are at hand, and the backward pass only scales them. The weight's gradient is summed over chunks in fp32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        chunk_logits: int | None,
        losses: Losses,
        fuse: Fuse = plainly,
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_weight_VD = torch.empty_like(weight_VD, dtype=torch.float32) if wants_weight else None
        total, z_total = (torch.zeros((), dtype=torch.float64, device=hidden_TD.device) for _ in range(2))
        chunk = chunk_tokens(chunk_logits, weight_VD)
        add_weight_gradient = WeightGradient(grad_weight_VD, weight_VD)
        # On a CPU one tensor for all chunks' logits: a new one each time costs a fault for each of its pages.
        room_TV = hidden_TD.new_empty((min(chunk, len(hidden_TD)), len(weight_VD))) if hidden_TD.is_cpu else None
        for start in range(0, hidden_TD.shape[0], chunk):
            part = slice(start, start + chunk)
            if room_TV is None:
                logits_TV = F.linear(hidden_TD[part], weight_VD)
            else:
                logits_TV = torch.mm(hidden_TD[part], weight_VD.T, out=room_TV[: len(hidden_TD[part])])
            losses_T, z_losses_T, grad_TV = losses(logits_TV, targets_T[part], wants_hidden or wants_weight)
            total += losses_T.sum(dtype=torch.float64)
            z_total += z_losses_T.sum(dtype=torch.float64)
            if grad_TV is None:
                continue
            grad_TV = grad_TV.to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                torch.mm(grad_TV, weight_VD, out=grad_hidden_TD[part])
            add_weight_gradient(grad_TV, hidden_TD[part])
        add_weight_gradient.end()
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
        ctx.weight_dtype, ctx.fuse = weight_VD.dtype, fuse
        ctx.mark_non_differentiable(z_total)
        return total, z_total

    @staticmethod
    def backward(  # type: ignore[override]
        ctx, grad_total: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        if grad_hidden_TD is not None:
            grad_hidden_TD = grad_hidden_TD * grad_total.to(torch.float32).to(grad_hidden_TD.device)
        if grad_weight_VD is not None:
            grad_weight_VD = scaled(grad_weight_VD, grad_total.to(torch.float32), ctx.weight_dtype, ctx.fuse)
        return grad_hidden_TD, grad_weight_VD, None, None, None, None


class WeightGradient:
    """Sums each chunk's product grad_VT @ hidden_TD in ``sum_VD`` (fp32, uninitialized; None: no gradient is needed).

    On a CPU all 16-bit products reuse one tensor, and are widened piece by piece: a new tensor of the weight's size
    costs more for its pages than the product itself. All other products are added in fp32 as they are made: a GPU sums
    products of 16 bits in fp32 anyway, and to round them to 16 bits first would cost one more write and read.
    """

    def __init__(self, sum_VD: Tensor | None, weight_VD: Tensor) -> None:
        self.sum_VD = sum_VD
        reuses = sum_VD is not None and weight_VD.is_cpu and weight_VD.dtype != torch.float32
        self.product_VD = torch.empty_like(weight_VD) if reuses else None
        self.is_empty = True

    def __call__(self, grad_TV: Tensor, hidden_TD: Tensor) -> None:
        """Adds one chunk's part, grad_TV^T hidden_TD, to the sum."""
        if self.sum_VD is None:
            return
        is_first, self.is_empty = self.is_empty, False
        if self.product_VD is None:
            beta = 0 if is_first else 1  # with 0 the sum's old values are not read
            if grad_TV.dtype == self.sum_VD.dtype:
                torch.addmm(self.sum_VD, grad_TV.T, hidden_TD, beta=beta, out=self.sum_VD)
            else:
                torch.addmm(self.sum_VD, grad_TV.T, hidden_TD, out_dtype=self.sum_VD.dtype, beta=beta, out=self.sum_VD)
            return
        torch.mm(grad_TV.T, hidden_TD, out=self.product_VD)
        for part in cached_rows(self.product_VD):
            if is_first:
                self.sum_VD[part] = self.product_VD[part]
            else:
                self.sum_VD[part].add_(self.product_VD[part])

    def end(self) -> None:
        """To be called after the last chunk: zeroes the sum if there were no chunks at all."""
        if self.is_empty and self.sum_VD is not None:
            self.sum_VD.zero_()


def cached_rows(matrix: Tensor) -> Iterator[slice]:
    """Slices of a matrix's rows, each small enough for a CPU's cache; on other devices one slice of all rows."""
    return pieces(len(matrix), max(1, CPU_CACHED // matrix.shape[1] if matrix.is_cpu else len(matrix)))


def scaled(matrix: Tensor, factor: Tensor, dtype: torch.dtype, fuse: Fuse = plainly) -> Tensor:
    """``matrix`` times ``factor``, rounded once to ``dtype``. On a GPU ``fuse`` computes it.

    torch's own kernel for two dtypes reads number by number: 2.1 ms for 128,256 x 4,096 on an H200 (torch 2.11), whose
    memory could move as much in 0.75 ms.
    """
    if not matrix.is_cpu and fuse is not plainly:
        return fuse(product_in, matrix, factor, dtype=dtype)
    out = torch.empty_like(matrix, dtype=dtype)
    if not matrix.is_cpu:
        return torch.mul(matrix, factor, out=out)  # in fp32, and rounded as it is written: no second matrix of fp32
    for part in cached_rows(matrix):
        out[part] = matrix[part] * factor
    return out


def product_in(matrix: Tensor, factor: Tensor, *, dtype: torch.dtype) -> Tensor:
    """``matrix`` times ``factor`` in ``dtype``: the function that ``scaled`` has compiled."""
    return (matrix * factor).to(dtype)


def chunk_tokens(chunk_logits: int | None, weight_VD: Tensor) -> int:
    """The number of tokens in a chunk: ``chunk_logits`` logits in all, or (None) as many as are fast on the device."""
    vocab_size = weight_VD.shape[0]
    if chunk_logits is not None:
        return max(1, chunk_logits // vocab_size)
    if weight_VD.is_cpu:
        return cpu_chunk_tokens(vocab_size, is_wide=weight_VD.dtype == torch.float32)
    return max(1, CUDA_CHUNK_LOGITS // vocab_size)


def cpu_chunk_tokens(vocab_size: int, *, is_wide: bool) -> int:
    """The number of tokens in a chunk on a CPU. ``is_wide`` says that logits have 32 bits."""
    n_tokens = min(CPU_CHUNK_TOKENS, CPU_CHUNK_LOGITS // vocab_size)
    return max(1, n_tokens // 2 if is_wide else n_tokens)


def losses_and_gradient(
    logits_TV: Tensor, targets_T: Tensor, wants_gradient: bool, z_loss: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The losses and the gradient of one chunk over the whole vocabulary (``Losses``).

    The gradient overwrites the logits.

    ``z_loss`` is the coefficient of the z-loss.
    """
    if row_passes.fits(logits_TV) and logits_TV.is_contiguous():
        ways = {"ignored": IGNORE, "z_loss": z_loss, "writes": wants_gradient}
        losses_T, logs_T = row_passes.cross_entropies(logits_TV, targets_T, **ways)
    else:
        name = "cross_entropies_written" if wants_gradient else "cross_entropies"
        losses_T, logs_T = stand_in(
            lambda: row_passes.kernel(name, logits_TV),
            logits_TV,
            lambda: losses_by_torch(logits_TV, targets_T, wants_gradient, z_loss),
            lambda: (
                torch.empty_like(targets_T, dtype=torch.float32),
                torch.empty_like(targets_T, dtype=torch.float32),
            ),
        )
    return losses_T, logs_T.square(), logits_TV if wants_gradient else None


def losses_by_torch(logits_TV: Tensor, targets_T: Tensor, wants_gradient: bool, z_loss: float) -> tuple[Tensor, Tensor]:
    """Each target's cross-entropy and logsumexp. The logits are overwritten by the gradient if it is wanted."""
    found: list[tuple[Tensor, Tensor]] = []
    for rows in cached_rows(logits_TV):
        softmax_TV = torch.empty_like(logits_TV[rows], dtype=torch.float32).copy_(logits_TV[rows])
        losses_T, logs_T, counts_T = token_losses(softmax_TV, targets_T[rows], logits_TV.dtype.itemsize == 2)
        found.append((losses_T, logs_T))
        if wants_gradient:
            logits_TV[rows] = logits_gradient(softmax_TV, targets_T[rows], counts_T, z_slope(logs_T, z_loss))
    losses_T, logs_T = (torch.cat(each) for each in zip(*found, strict=True))
    return losses_T, logs_T


def fused_losses(logits_TV: Tensor, targets_T: Tensor, *, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """``losses_and_gradient`` as a pure function, which compiles to one kernel that reads the logits twice.

    The largest logit and the sum of exponentials are written so that inductor finds both in one online pass (Milakov
    and Gimelshein 2018, arXiv:1805.02867, section 3). ``logsumexp`` would take two passes.
    """
    counts_T, index_T1 = targets_T != IGNORE, targets_T.clamp(min=0)[:, None]
    wide_TV = logits_TV.float()
    largest_T1 = wide_TV.amax(-1, keepdim=True)
    exponentials_TV = (wide_TV - largest_T1).exp()
    sums_T1 = exponentials_TV.sum(-1, keepdim=True)
    logs_T = (sums_T1.log() + largest_T1).squeeze(1)
    losses_T = (logs_T - wide_TV.gather(1, index_T1).squeeze(1)) * counts_T
    softmax_TV = exponentials_TV / sums_T1
    slope_T = z_slope(logs_T, z_loss)
    scaled_TV = softmax_TV if slope_T is None else softmax_TV * (1 + slope_T[:, None])
    one_hot_TV = torch.arange(logits_TV.shape[1], device=logits_TV.device) == index_T1
    grad_TV = (scaled_TV - one_hot_TV.float()) * counts_T[:, None]
    return losses_T, (logs_T * counts_T).square(), grad_TV.to(logits_TV.dtype)


def token_losses(logits_TV: Tensor, targets_T: Tensor, were_narrow: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Each target's cross-entropy and logsumexp (fp32, zero where it is IGNORE), and which targets count (bool).

    Overwrites the fp32 logits by their softmax. ``were_narrow`` says that they were computed in 16 bits. Then on a CPU
    a single kernel makes the softmax, whose exponentials may be off by 20 units in the last place; in fp32 that was
    visible in the gradients of sinks.
    """
    counts_T = targets_T != IGNORE
    picked_T = logits_TV.gather(1, targets_T.clamp(min=0)[:, None]).squeeze(1)
    largest_T1 = logits_TV.amax(-1, keepdim=True)
    if were_narrow and logits_TV.is_cpu:
        torch.softmax(logits_TV, -1, out=logits_TV)  # in place: it reads a row before it writes it
        sums_T1 = 1 / logits_TV.amax(-1, keepdim=True)  # of exponentials, the largest of which is 1
    else:
        sums_T1 = logits_TV.sub_(largest_T1).exp_().sum(-1, keepdim=True)
        logits_TV.div_(sums_T1)
    logs_T = (sums_T1.log() + largest_T1).squeeze(1)
    return (logs_T - picked_T) * counts_T, logs_T * counts_T, counts_T


def z_slope(logs_T: Tensor, z_loss: float) -> Tensor | None:
    """The gradient of coefficient times z-loss by each logsumexp (T,); None where the coefficient is 0."""
    return 2 * z_loss * logs_T if z_loss else None


def logits_gradient(softmax_TV: Tensor, targets_T: Tensor, counts_T: Tensor, z_slope_T: Tensor | None) -> Tensor:
    """The gradient of the trained total by the logits (T, V): softmax times (1 + ``z_slope_T``), minus one-hot.

    It overwrites the softmax.
    """
    if z_slope_T is not None:
        softmax_TV.mul_(1 + z_slope_T[:, None])
    softmax_TV.scatter_add_(1, targets_T.clamp(min=0)[:, None], -torch.ones_like(softmax_TV[:, :1]))
    return softmax_TV.mul_(counts_T[:, None])


def capped(losses: Losses, cap: float) -> Losses:
    """``losses`` of capped logits: ``cap`` times the tanh of a logit over it. Gradients are by the uncapped logits.

    It takes two more fp32 tensors of the size of the chunk's logits.
    """

    def of_capped(logits_TV: Tensor, targets_T: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        tanh_TV = logits_TV.float().div_(cap).tanh_()
        slope_TV = 1 - tanh_TV.square() if wants_gradient else None
        losses_T, z_losses_T, grad_TV = losses(tanh_TV.mul_(cap), targets_T, wants_gradient)
        return losses_T, z_losses_T, grad_TV if slope_TV is None or grad_TV is None else grad_TV.mul_(slope_TV)

    return of_capped


class Head(nn.Module):
    """The vocabulary projection and the loss over it. Its weight may be the embedding's own parameter.

    ``z_loss`` is the coefficient of the z-loss (PaLM, arXiv:2204.02311, section 5), which keeps the logits' logsumexp
    near zero. With ``logit_cap``, logits are capped before the losses (Gemma 2, arXiv:2408.00118, section 2).

    ``watch`` lets `roundtable replay` see each target's loss. It is called once in each pass with targets, on the
    function that computes a chunk's losses, and returns the function to call instead, chunk after chunk.
    """

    def __init__(self, vocab_size: int, d_model: int, z_loss: float = 0.0, logit_cap: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.stated = {"weight": Weight(("vocab", "d_model"))}
        self.chunk_logits: int | None = None  # logits that exist at once; None: what is fast on the device
        self.z_loss = z_loss
        self.logit_cap = logit_cap
        self.watch: Callable[[Losses], Losses] | None = None
        self.fuse: Fuse = plainly

    def forward(self, hidden_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The sums of the cross-entropies and of the z-losses over the targets that count; without targets, the logits.

        The sums are fp64. The gradient of coefficient times z-losses comes with that of the cross-entropies. Logits are
        (B, S, V).
        """
        if targets_BS is None:
            logits_BSV = F.linear(hidden_BSD, self.weight)
            return logits_BSV if self.logit_cap is None else torch.tanh(logits_BSV / self.logit_cap) * self.logit_cap
        # Gradients are made in the forward pass, where torch.no_grad() cannot be seen: a detached weight needs none.
        weight_VD = self.weight if torch.is_grad_enabled() else self.weight.detach()
        rows = (hidden_BSD.flatten(0, 1), weight_VD, targets_BS.flatten())
        losses = self.chunk_losses if self.logit_cap is None else capped(self.chunk_losses, self.logit_cap)
        losses = losses if self.watch is None else self.watch(losses)
        return ChunkedCrossEntropy.apply(*rows, self.chunk_logits, losses, self.fuse)

    def chunk_losses(
        self, logits_TV: Tensor, targets_T: Tensor, wants_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One chunk's losses and gradient (``Losses``)."""
        if self.fuses(logits_TV) and wants_gradient:
            return self.fuse(fused_losses, logits_TV, targets_T, z_loss=self.z_loss)
        return losses_and_gradient(logits_TV, targets_T, wants_gradient, self.z_loss)

    def fuses(self, logits_TV: Tensor) -> bool:
        """Whether one compiled kernel computes a chunk's losses: on CUDA.

        On a CPU, pieces that fit the cache are faster.
        """
        return logits_TV.is_cuda and self.fuse is not plainly
