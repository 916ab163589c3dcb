"""The configuration of the layout: plain values, no torch. dp follows from the number of processes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the axes, and what ZeRO shards over dp: 1 optimizer state, 2 gradients too, 3 parameters too."""

    tp: int = 1  # heads, d_ff, vocabulary; positions between layers
    ep: int = 1  # experts, folded over dp x tp
    zero: int = 1
