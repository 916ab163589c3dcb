"""The number of bytes that a pipeline sends, in closed form."""

from itertools import pairwise

from parallel.pipeline.config import PipelineConfig, stage_ranks

FP32_BYTES = 4


def sent_bytes(
    config: PipelineConfig, pp: int, pp_rank: int, n_micro_batches: int, hidden_bytes: int, tied_elements: int = 0
) -> int:
    """Bytes that one pp rank sends to others in one training step.

    ``hidden_bytes`` is the size of one micro-batch's hidden states on this rank. Between two consecutive stages on
    different ranks, the earlier sends every micro-batch's hidden states and the later their gradients.
    ``tied_elements`` are this rank's elements of an embedding that is used at both ends of the pipeline (0: it is not);
    the ranks of the first and of the last stage exchange its fp32 gradients.
    """
    ranks = stage_ranks(config, pp)
    sends = sum((a == pp_rank) + (b == pp_rank) for a, b in pairwise(ranks) if a != b)
    tied = FP32_BYTES * tied_elements if ranks[0] != ranks[-1] and pp_rank in (ranks[0], ranks[-1]) else 0
    return sends * n_micro_batches * hidden_bytes + tied
