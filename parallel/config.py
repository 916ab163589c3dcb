"""The configuration of the layout: plain values, no torch. dp follows from the number of processes."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from parallel.pipeline.config import OneFOneB, PipelineConfig

Degree = Annotated[int, Interval(ge=1, le=2**16)]
EpChunks = Annotated[int, Interval(ge=1, le=64)]  # each one is a message of its own


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the axes, and what ZeRO shards over dp: 1 optimizer state, 2 gradients too, 3 parameters too."""

    tp: Degree = 1  # tensor parallelism: cuts heads, d_ff and the vocabulary; between layers, positions
    # gradients by hidden states are summed over tp while those of the weights are computed (not zero 3, zbv, dualpipev)
    tp_overlap: bool = False
    pp: Degree = 1  # pipeline parallelism: cuts the layers into stages
    pipeline: PipelineConfig = field(default_factory=OneFOneB)  # how micro-batches pass through the stages of pp
    cp: Degree = 1  # context parallelism: cuts each sequence's positions
    # how attention sees all positions under cp: all-to-all over heads, or a ring of positions
    cp_attention: Literal["ulysses", "ring"] = "ulysses"
    ep: Degree = 1  # expert parallelism: cuts the experts, folded over dp x cp x tp
    # tokens on their way to their experts, while the balance loss and the shared expert (not with zero 3) are computed
    ep_overlap: bool = True
    # a rank's experts are cut into so many parts, and tokens of one travel while another's are multiplied (ep above 1)
    ep_chunks: EpChunks = 1
    # fp32 masters and optimizer states are the host's, and so is the update (DeepSpeed's ZeRO-Offload; zero 2 alone)
    offload_optimizer: bool = False
    # what is sharded over the ranks: 0 nothing (fp32 only), 1 optimizer state, 2 gradients too, 3 parameters too
    zero: Annotated[int, Interval(ge=0, le=3)] = 1
    # how ZeRO 1 reduces gradients over replicas: at the step's end, whole, to every rank; each rank's part alone, in
    # buckets, during the last backward pass; or during each one, into fp32 sums of that part: no whole ones are held
    grad_reduce: Literal["step", "last_micro_batch", "micro_batch"] = "step"
    # how each micro-batch's travel: widened to fp32, or as the bf16 numbers that they are, which receivers sum in fp32
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
