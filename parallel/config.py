"""The configuration of the layout: plain values, no torch. dp follows from the number of processes."""

from dataclasses import dataclass, field
from typing import Literal

from parallel.pipeline.config import OneFOneB, PipelineConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the axes, and what ZeRO shards over dp: 1 optimizer state, 2 gradients too, 3 parameters too."""

    tp: int = 1  # tensor parallelism: cuts heads, d_ff and the vocabulary; between layers, positions
    pp: int = 1  # pipeline parallelism: cuts the layers into stages
    pipeline: PipelineConfig = field(default_factory=OneFOneB)  # how micro-batches pass through the stages of pp
    cp: int = 1  # context parallelism: cuts each sequence's positions
    # how attention sees all positions under cp: all-to-all over heads, or a ring of positions
    cp_attention: Literal["ulysses", "ring"] = "ulysses"
    ep: int = 1  # expert parallelism: cuts the experts, folded over dp x cp x tp
    # what is sharded over the ranks: 0 nothing (fp32 only), 1 optimizer state, 2 gradients too, 3 parameters too
    zero: int = 1
