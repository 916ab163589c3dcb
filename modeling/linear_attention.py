"""Linear attention (Gated DeltaNet): a head keeps one matrix from token to token, instead of all keys and values.

Shape letters: B batch, S sequence, D d_model, G key heads, H value heads, C channels of a key, W of a value, X channels
of all heads, K tokens that the convolution sees.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.config import ModelConfig
from modeling.context import Context
from modeling.dims import Dim, Weight
from modeling.kernels.by_rows import by_rows
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.gated_delta import RuleSizes, continued, gated_delta
from modeling.kernels.rerun import rerun
from modeling.kernels.short_convolution import continued_convolution, short_convolution
from modeling.kv_cache import LayerCache
from modeling.linear import Linear
from modeling.linear_attention_config import LinearAttentionConfig
from modeling.mixer import Mixer


class Projected(NamedTuple):
    """Each token's projections, for the heads whose weights this rank holds, before tokens are mixed."""

    q_BSGC: Tensor
    k_BSGC: Tensor
    v_BSHW: Tensor
    a_BSH: Tensor  # the decay of the state, before bias and softplus
    b_BSH: Tensor  # the strength of writing to the state, before the sigmoid


class HeadWeights(NamedTuple):
    """The weights of the same heads that are not matrices: the convolutions' taps, and the decay's numbers."""

    q_taps_XK: Tensor
    k_taps_XK: Tensor
    v_taps_XK: Tensor
    log_rates_H: Tensor  # fp32
    step_biases_H: Tensor  # fp32


LinearCore = Callable[[Projected, HeadWeights, Context, Fuse], Tensor]


def mix(
    projected: Projected,
    weights: HeadWeights,
    context: Context,
    fuse: Fuse = plainly,
    *,
    sizes: RuleSizes | None = None,
) -> Tensor:
    """Linear attention's output (B, S, H, W): convolutions of queries, keys and values, then the gated delta rule.

    ``sizes`` sets the sizes of the rule's chunks; None takes the defaults.
    """
    taps = (weights.q_taps_XK, weights.k_taps_XK, weights.v_taps_XK)
    q_BSGC, k_BSGC, v_BSHW = (
        fuse(short_convolution, heads.flatten(2), context.positions_BS, taps_XK).view(heads.shape)
        for heads, taps_XK in zip(projected, taps, strict=False)
    )
    rates = (weights.log_rates_H, weights.step_biases_H)
    fading_BSH, writing_BSH = fuse(fading_and_writing, projected.a_BSH, projected.b_BSH, *rates)
    return gated_delta(q_BSGC, k_BSGC, v_BSHW, fading_BSH, writing_BSH, context, sizes)


def fading_and_writing(
    a_BSH: Tensor, b_BSH: Tensor, log_rates_H: Tensor, step_biases_H: Tensor
) -> tuple[Tensor, Tensor]:
    """(g, b) of the gated delta rule, fp32 (B, S, H): the logarithm of the state's decay, and the strength of writing.

    g = -exp(log_rate) x softplus(a + step_bias), as in Mamba (Dao & Gu 2024, arXiv:2405.21060, code of section 7), and
    b = sigmoid(b).
    """
    return -log_rates_H.exp() * F.softplus(a_BSH.float() + step_biases_H), b_BSH.float().sigmoid()


class LinearAttention(Mixer):
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464, section 3.4), with several value heads to a key head.

    That is the layer of Qwen3-Next. ``core(projected, weights, context, fuse) -> out_BSHW`` mixes the tokens, and is
    where context parallelism enters; tensor parallelism enters through ``positions``.
    """

    def __init__(self, config: ModelConfig, linear: LinearAttentionConfig, layer: int) -> None:
        super().__init__(layer)
        d_model, k_heads, v_heads = config.d_model, "linear_k_heads", "linear_v_heads"
        self.d_k, self.d_v = linear.d_k, linear.d_v
        self.in_q = Linear(linear.k_width, d_model, (k_heads, "d_model"))
        self.in_k = Linear(linear.k_width, d_model, (k_heads, "d_model"))
        self.in_v = Linear(linear.v_width, d_model, (v_heads, "d_model"))
        self.in_z = Linear(linear.v_width, d_model, (v_heads, "d_model"))
        self.in_a = Linear(linear.n_v_heads, d_model, ("per_linear_head", "d_model"))
        self.in_b = Linear(linear.n_v_heads, d_model, ("per_linear_head", "d_model"))
        self.q_taps = Taps(linear.k_width, k_heads, linear.conv_size)
        self.k_taps = Taps(linear.k_width, k_heads, linear.conv_size)
        self.v_taps = Taps(linear.v_width, v_heads, linear.conv_size)
        self.log_rates = HeadNumbers(Weight(("per_linear_head",), "log_rates"), linear.n_v_heads)
        self.step_biases = HeadNumbers(Weight(("per_linear_head",), "step_biases"), linear.n_v_heads)
        self.norm = GatedNorm(linear.d_v, config.norm_eps)
        self.out = Linear(d_model, linear.v_width, ("d_model", v_heads), is_residual=True)
        self.core: LinearCore = mix

    def forward(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """The layer's output (B, S, D).

        With a cache, ``hidden_BSD`` are new tokens that continue the cached sequences.
        """
        hidden_BSD = self.positions.gather(hidden_BSD)
        q_BSGC, k_BSGC = (each(hidden_BSD).unflatten(-1, (-1, self.d_k)) for each in (self.in_q, self.in_k))
        v_BSHW, z_BSHW = (each(hidden_BSD).unflatten(-1, (-1, self.d_v)) for each in (self.in_v, self.in_z))
        projected = Projected(q_BSGC, k_BSGC, v_BSHW, self.in_a(hidden_BSD), self.in_b(hidden_BSD))
        weights = HeadWeights(self.q_taps(), self.k_taps(), self.v_taps(), self.log_rates(), self.step_biases())
        if cache is None:
            out_BSHW = self.core(projected, weights, context, self.fuse)
        else:
            out_BSHW = carry_on(projected, weights, context, cache)
        return self.positions.scatter_sum(self.out(self.norm(out_BSHW, z_BSHW).flatten(-2)))


def carry_on(projected: Projected, weights: HeadWeights, context: Context, cache: LayerCache) -> Tensor:
    """What ``mix`` returns, for new tokens that continue the cache's sequences.

    The cache then includes these tokens.
    """
    *earlier, state_BHCW = cache.carried or (None,) * 4
    pairs = zip(earlier, projected, weights, strict=False)
    found = [
        (continued_convolution(before, heads.flatten(2), context.positions_BS, taps_XK), heads.shape)
        for before, heads, taps_XK in pairs
    ]
    q_BSGC, k_BSGC, v_BSHW = (out_BSX.view(shape) for (out_BSX, _), shape in found)
    rates = (weights.log_rates_H, weights.step_biases_H)
    numbers = fading_and_writing(projected.a_BSH, projected.b_BSH, *rates)
    out_BSHW, state_BHCW = continued(state_BHCW, q_BSGC, k_BSGC, v_BSHW, *numbers, context.positions_BS)
    cache.carry((*(kept for (_, kept), _ in found), state_BHCW), context.positions_BS.shape[1])
    return out_BSHW


class Taps(nn.Module):
    """The weights of a causal convolution in which each channel has its own taps.

    The last tap is for the token itself.
    """

    def __init__(self, n_channels: int, dim: Dim, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_channels, size))
        self.stated = {"weight": Weight((dim, "taps"), "taps")}

    def forward(self) -> Tensor:
        """taps_XK: a copy, since under ZeRO 3 the weight itself is whole only during this call."""
        return self.weight.clone()


class HeadNumbers(nn.Module):
    """One trained number for each value head."""

    def __init__(self, stated: Weight, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))
        self.stated = {"weight": stated}

    def forward(self) -> Tensor:
        """The numbers, fp32 (H,): a copy, since under ZeRO 3 the weight itself is whole only during this call."""
        return self.weight.to(torch.float32, copy=True)


class GatedNorm(nn.Module):
    """RMSNorm of each head's output, multiplied by silu of a gate. Computed in fp32."""

    def __init__(self, d_v: int, norm_eps: float) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.fuse: Fuse = plainly
        self.weight = nn.Parameter(torch.empty(d_v))
        self.stated = {"weight": Weight(("linear_d_v",), "ones")}

    def forward(self, out_BSHW: Tensor, gate_BSHW: Tensor) -> Tensor:
        """The normed and gated rows, of the shape and dtype of ``out_BSHW``."""
        return self.fuse(gated_norm, out_BSHW, gate_BSHW, self.weight, norm_eps=self.norm_eps)


def gated_norm_again(
    out_BSHW: Tensor, gate_BSHW: Tensor, weight_W: Tensor, *, norm_eps: float, piece_bytes: int = 0
) -> Tensor:
    """``gated_norm`` where chains are not compiled.

    It saves only its inputs, and computes again in the backward pass.
    """
    return rerun(partial(gated_norm, norm_eps=norm_eps), out_BSHW, gate_BSHW, weight_W)


@by_rows(gated_norm_again)
def gated_norm(out_BSHW: Tensor, gate_BSHW: Tensor, weight_W: Tensor, *, norm_eps: float) -> Tensor:
    """``out_BSHW`` normed, weighted and gated, in its own dtype: the computation of ``GatedNorm``."""
    wide = out_BSHW.float()
    normed = weight_W * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)).to(out_BSHW.dtype)
    return (normed * F.silu(gate_BSHW.float())).to(out_BSHW.dtype)
