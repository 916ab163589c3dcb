"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotating the two halves of a head as Llama does.

Shape letters: B batch, S sequence, H heads, C channels of a head, R those of them that are rotated.
"""

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from modeling.kernels.by_rows import by_rows, rotate_by_rows
from modeling.kernels.fuse import in_parts, linear
from modeling.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)


@dataclass(frozen=True)
class Rotary:
    """The angles by which each pair of a head's channels is rotated from one position to the next."""

    dim: int  # channels that are rotated, even
    theta: float  # base of the frequencies
    scaling: RopeScaling | None = None

    def tables(self, positions_BS: Tensor, bound: int | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each position's angles: two fp32 tensors (B, S, R/2).

        ``bound``: all positions are below it. Where it is None, or above the original length, a scaling that depends on
        the length of the pass looks up the largest position, for which a CUDA device's host waits.
        """
        length = None
        if isinstance(self.scaling, DynamicScaling | LongRopeScaling):
            is_short = bound is not None and bound <= self.scaling.original_seq_len
            length = bound if is_short else int(positions_BS.max()) + 1
        angles_BSR = positions_BS[..., None].float() * self.frequencies(positions_BS.device, length)
        if not isinstance(self.scaling, YarnScaling | LongRopeScaling):
            return angles_BSR.cos(), angles_BSR.sin()
        factor = cosine_factor(self.scaling)
        return angles_BSR.cos() * factor, angles_BSR.sin() * factor

    def query_factors(self, positions_BS: Tensor, bound: int | None = None) -> Tensor | None:
        """What the queries at each position are multiplied by: fp32 (B, S, 1); None where it is 1 at all of them.

        It grows with the number of whole original lengths before the position (``YarnScaling.query_growth``), so that
        attention stays as sharp among more keys. A layer in which no channel turns has none. ``bound``: all positions
        are below it; None: not known.
        """
        scaling = self.scaling
        if not isinstance(scaling, YarnScaling) or scaling.query_growth == 0 or self.dim == 0:
            return None
        if bound is not None and bound <= scaling.original_seq_len:
            return None
        lengths_BS = (positions_BS // scaling.original_seq_len).float()
        return (1 + scaling.query_growth * torch.log(1 + lengths_BS))[..., None]

    def frequencies(self, device: torch.device, length: int | None = None) -> Tensor:
        """Each pair's angle from one position to the next, in radians: fp32 (R/2,).

        ``length``: positions of the pass.
        """
        exponents_R = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        plain_R = 1.0 / self.theta**exponents_R
        match self.scaling:
            case None:
                return plain_R
            case LinearScaling(factor=factor):
                return plain_R / factor
            case Llama3Scaling() as scaling:
                return mixed(plain_R, scaling.factor, llama3_kept(plain_R, scaling))
            case DynamicScaling() as scaling:
                return 1.0 / (self.theta * self.dynamic_growth(scaling, length or 1)) ** exponents_R
            case YarnScaling() as scaling:
                return mixed(plain_R, scaling.factor, self.yarn_kept(plain_R, scaling))
            case LongRopeScaling() as scaling:
                factors = scaling.long_factor if (length or 1) > scaling.original_seq_len else scaling.short_factor
                # Filled in on the device: copying them there would make the host wait.
                factors_R = torch.stack([plain_R.new_full((), each) for each in factors[: self.dim // 2]])
                return 1.0 / (factors_R * self.theta**exponents_R)
            case _:
                assert_never(self.scaling)

    def dynamic_growth(self, scaling: DynamicScaling, length: int) -> float:
        """The factor of the base in a pass of ``length`` positions; 1 up to the original length."""
        ratio = max(1.0, length / scaling.original_seq_len)
        return (scaling.factor * ratio - scaling.factor + 1) ** (self.dim / max(1, self.dim - 2))

    def yarn_kept(self, plain_R: Tensor, scaling: YarnScaling) -> Tensor:
        """How much of each frequency is kept, from 0 to 1: a ramp between the channels of beta_fast and beta_slow."""

        def channel(turns: float) -> float:  # where a pair makes this many turns in the original sequence
            ratio = scaling.original_seq_len / (turns * 2 * math.pi)
            return self.dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001  # as in transformers
        channels_R = torch.arange(len(plain_R), dtype=torch.float32, device=plain_R.device)
        return 1 - ((channels_R - low) / (high - low)).clamp(0, 1)


def mixed(plain_R: Tensor, factor: float, kept_R: Tensor) -> Tensor:
    """The frequencies as they are where ``kept_R`` is 1, divided by ``factor`` where it is 0, linear in between."""
    return plain_R / factor * (1 - kept_R) + plain_R * kept_R


def llama3_kept(plain_R: Tensor, scaling: Llama3Scaling) -> Tensor:
    """How much of each frequency is kept, from 0 to 1: a ramp over its number of turns in the original sequence."""
    turns_R = scaling.original_seq_len * plain_R / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return ((turns_R - low) / (high - low)).clamp(0, 1)


def cosine_factor(scaling: YarnScaling | LongRopeScaling) -> float:
    """The factor of cosines and sines, whose square multiplies the scores of the channels that are rotated."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if isinstance(scaling, LongRopeScaling):
        ratio = max(1.0, scaling.longest_seq_len / scaling.original_seq_len)
        return math.sqrt(1 + math.log(ratio) / math.log(max(2, scaling.original_seq_len)))
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return mscale(scaling.factor, scaling.mscale) / mscale(scaling.factor, scaling.mscale_all_dim)
    return mscale(scaling.factor, 1.0)


def score_factor(scaling: RopeScaling | None) -> float:
    """The factor by which DeepSeek's latent attention multiplies all scores; 1 for other scalings than its YaRN."""
    if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None:
        return 1.0
    return mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def mscale(factor: float, weight: float) -> float:
    """YaRN's factor for attention at sequences ``factor`` times as long (section 3.4, eq.

    22), ``weight`` from DeepSeek.
    """
    return 0.1 * weight * math.log(factor) + 1.0


@by_rows(rotate_by_rows)
@linear
@in_parts
def rotate(heads_BSHC: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """``heads_BSHC`` with the channel pairs (c, c + R/2) of the first R channels rotated by their position's angles."""
    cos, sin = (table[:, :, None, :].to(heads_BSHC.dtype) for table in (cos_BSR, sin_BSR))
    n_turning = 2 * cos.shape[-1]
    first, second = heads_BSHC[..., :n_turning].chunk(2, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, heads_BSHC[..., n_turning:]], dim=-1)


@linear
def scaled(heads_BSHC: Tensor, factors_BS1: Tensor) -> Tensor:
    """``heads_BSHC`` multiplied by their position's factor, which is rounded to their dtype first."""
    return heads_BSHC * factors_BS1[..., None].to(heads_BSHC.dtype)
