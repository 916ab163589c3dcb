"""The configuration of the layout: plain values, no torch. dp follows from the number of processes."""

from dataclasses import dataclass, field
from typing import Literal

from parallel.pipeline.config import OneFOneB, PipelineConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the axes, and what ZeRO shards over dp: 1 optimizer state, 2 gradients too, 3 parameters too."""

    tp: int = 1  # heads, d_ff, vocabulary; positions between layers
    pp: int = 1  # layers
    pipeline: PipelineConfig = field(default_factory=OneFOneB)  # how micro-batches pass through the stages of pp
    cp: int = 1  # positions of a sequence
    cp_attention: Literal["ulysses", "ring"] = "ulysses"  # all-to-all over heads, or a ring of positions
    ep: int = 1  # experts, folded over dp x cp x tp
    zero: int = 1
