"""How rotary frequencies are changed for sequences longer than those first trained on: plain values, no torch.

``modeling.rope`` has the formulas.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

Factor = Annotated[float, Interval(ge=1.0, le=1e6)]
Rotations = Annotated[float, Interval(ge=1e-3, le=1e6)]
Length = Annotated[int, Interval(ge=1, le=2**40)]
Scale = Annotated[float, Interval(ge=1e-3, le=1000.0)]
Growth = Annotated[float, Interval(ge=0.0, le=100.0)]


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by one factor: positions are interpolated (Chen et al. 2023, arXiv:2306.15595)."""

    # linear: all frequencies are divided by factor; llama3: the low ones; yarn: the low ones, and attention is sharper;
    # dynamic: the base grows in passes over sequences longer than original_seq_len; longrope: each by a factor of its
    # own, in such passes by another
    name: Literal["linear"] = "linear"
    factor: Factor = 8.0  # by which the sequence may be longer


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low frequencies divided by a factor, high ones kept (Llama 3.1, arXiv:2407.21783, as its code has it)."""

    name: Literal["llama3"] = "llama3"
    factor: Factor = 8.0
    low_freq_factor: Rotations = 1.0  # turns in original_seq_len; slower frequencies are divided by the whole factor
    high_freq_factor: Rotations = 4.0  # turns in original_seq_len; faster frequencies are kept
    original_seq_len: Length = 8192  # tokens of the sequences first trained on


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3): by parts, and attention scores scaled up."""

    name: Literal["yarn"] = "yarn"
    factor: Factor = 8.0
    original_seq_len: Length = 8192
    beta_fast: Rotations = 32.0  # turns in original_seq_len; faster frequencies are kept
    beta_slow: Rotations = 1.0  # turns in original_seq_len; slower frequencies are divided by the whole factor
    # factor of the cosines and sines; None: 0.1 ln(factor) + 1, or by mscale and mscale_all_dim where both are given
    attention_factor: Scale | None = field(default=None, metadata={"usual": 1.0})
    mscale: Scale | None = field(default=None, metadata={"usual": 1.0})  # DeepSeek's weight of ln(factor)
    # DeepSeek's weight of ln(factor) in all channels: latent attention's scores are scaled by it
    mscale_all_dim: Scale | None = field(default=None, metadata={"usual": 1.0})
    truncate: bool = True  # the bounds between the parts fall on whole channels
    # queries are multiplied by 1 + query_growth ln(1 + floor(position / original_seq_len)), as in Ministral 3
    query_growth: Growth = field(default=0.0, metadata={"strong": 0.1})


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK: a base that grows with a sequence's length beyond the original one, where nothing changes.

    As in transformers (bloc97 and emozilla, 2023): in a pass over positions up to N - 1, the base is multiplied by
    (factor N / original_seq_len - factor + 1) ** (R / (R - 2)), where R channels of a head are rotated.
    """

    name: Literal["dynamic"] = "dynamic"
    factor: Factor = 8.0
    original_seq_len: Length = 8192


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a factor for each pair of channels, and attention is sharper.

    As in transformers: in a pass over positions up to N - 1, all frequencies are divided by ``short_factor``, or by
    ``long_factor`` where N is above ``original_seq_len``.
    """

    name: Literal["longrope"] = "longrope"
    original_seq_len: Length = 8192
    longest_seq_len: Length = 131072  # tokens of the longest sequences that it is made for
    # what each pair's frequency is divided by, within original_seq_len
    short_factor: tuple[Scale, ...] = field(default=(), metadata={"usual": 1.0})
    long_factor: tuple[Scale, ...] = field(default=(), metadata={"usual": 1.0})  # and beyond
    # factor of the cosines and sines; None: sqrt(1 + ln(longest / original) / ln(original))
    attention_factor: Scale | None = field(default=None, metadata={"usual": 1.0})


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | LongRopeScaling


def rope_scaling_problems(scaling: RopeScaling | None, rope_dim: int, rope_theta: float) -> Iterator[str]:
    """One message for each broken rule, in a model that rotates ``rope_dim`` channels of a head."""
    match scaling:
        case Llama3Scaling(low_freq_factor=low, high_freq_factor=high) if high <= low:
            yield (
                f"model.rope_scaling.high_freq_factor={high} must be above model.rope_scaling.low_freq_factor={low}; "
                f"try {4 * low}"
            )
        case DynamicScaling() if rope_dim == 2:
            yield (
                "model.rope_scaling.name=dynamic is not possible where 2 channels of a head turn (its exponent is the "
                "channels over two less); try model.rope_scaling=null"
            )
        case YarnScaling(beta_fast=fast, beta_slow=slow):
            if fast < slow:
                yield (
                    f"model.rope_scaling.beta_fast={fast} must be at least model.rope_scaling.beta_slow={slow}; "
                    f"try {32 * slow}"
                )
            if rope_theta <= 1:
                yield (
                    f"model.rope_theta={rope_theta} must be above 1 where model.rope_scaling.name=yarn "
                    "(its frequencies must differ); try 10000.0"
                )
        case LongRopeScaling():
            yield from long_rope_problems(scaling, rope_dim // 2)
        case _:
            return


def long_rope_problems(scaling: LongRopeScaling, n_pairs: int) -> Iterator[str]:
    """One message for each list of factors that does not have one for each pair of channels, and for a bad length."""
    for key, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
        if len(factors) != n_pairs:
            yield (
                f"model.rope_scaling.{key} has {len(factors)} numbers, and must have one for each of the {n_pairs} "
                "pairs of channels that turn; try model.rope_scaling=null"
            )
    if scaling.original_seq_len < 2:
        yield (
            f"model.rope_scaling.original_seq_len={scaling.original_seq_len} must be at least 2 where "
            "model.rope_scaling.name=longrope (attention's factor is by its logarithm); try 2"
        )
