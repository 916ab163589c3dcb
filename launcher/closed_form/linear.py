"""A layer of linear attention by closed forms: its matrices, the work of its rule, and what a token leaves in it."""

from modeling.kernels.fused_delta import RuleWork
from modeling.kernels.gated_delta import CHUNK
from modeling.linear_attention_config import LinearAttentionConfig
from parallel.recompute import Recompute

FP32, HALF = 4, 2  # bytes of an element
# Tensors of a chunk that the backward pass of the rule has at once in torch's operations, each n numbers for a token
# and value head: scores, how far they fade, the triangular system, and their gradients. And such of the channels of a
# key and a value.
SQUARES, CHANNELS = 9, 6
CONVOLVED = 6.0  # times that a pass reads or writes what is convolved, on the mean over three: its gradient takes most


def projected_width(linear: LinearAttentionConfig) -> int:
    """Outputs of the products of a token's hidden state: queries, keys, values, gates, and two numbers a head."""
    return 2 * linear.k_width + 2 * linear.v_width + 2 * linear.n_v_heads


def matrices(linear: LinearAttentionConfig, d_model: int) -> list[tuple[int, int, bool]]:
    """(inputs, outputs, whether tp divides the outputs rather than the inputs) of each projection of a layer."""
    return [(d_model, projected_width(linear), True), (linear.v_width, d_model, False)]


def rule_flops(linear: LinearAttentionConfig) -> float:
    """FLOPs of the products of one token's forward pass, in chunks: with the chunk's matrix, and within the chunk."""
    state = 3 * 2.0 * linear.d_k * linear.d_v  # it is read under the key and the query, and written to
    within = 2.0 * CHUNK * (linear.d_k + linear.d_v) / 2 + 2.0 * CHUNK * linear.d_v  # the system, and its use
    return linear.n_v_heads * (state + within) + linear.n_k_heads * 2 * 2.0 * CHUNK * linear.d_k


def elements(linear: LinearAttentionConfig) -> float:
    """Read and written by convolutions, by the rule and by the gated norm."""
    mixed = 2 * linear.k_width + linear.v_width
    return CONVOLVED * mixed + 4.0 * linear.v_width


def width(linear: LinearAttentionConfig, mode: Recompute, tp: int, element: int) -> float:
    """Elements that one token leaves: what convolutions are given and put out, gates, the rule's output, normed too.

    ``element``: bytes of one. In 16 bits the rule's kernels keep unit queries and keys for those that convolutions put
    out, and more: the systems that they solved, sums of fading, and lengths.
    """
    mixed, values, numbers = 2 * linear.k_width + linear.v_width, linear.v_width, 2 * linear.n_v_heads
    kept = 0.0
    if element == HALF:
        kept = linear.n_v_heads * (CHUNK + FP32 / HALF) + 2 * linear.n_k_heads * FP32 / HALF
    match mode:
        case "none" | "feed_forward":  # a head's two numbers as they are, and in fp32 for the rule
            return (2 * mixed + 3 * values + 3 * numbers + kept) / tp
        case "selective":
            units = 2 * linear.k_width if element == HALF else 0
            return (mixed + units + 2 * values + numbers + kept) / tp
        case "full":
            return 0.0


def working_bytes(linear: LinearAttentionConfig, tp: int, element: int) -> float:
    """Bytes of one token in the backward pass of the rule, which computes again; in fp32 chunk by chunk."""
    if element == HALF:
        return HALF * rule_work(linear, is_backward=True).room / tp
    return FP32 * linear.n_v_heads * (SQUARES * CHUNK + CHANNELS * (linear.d_k + linear.d_v)) / tp


def rule_work(linear: LinearAttentionConfig, *, is_backward: bool) -> RuleWork:
    """What the kernels of the rule do for one token."""
    make = RuleWork.backward if is_backward else RuleWork.forward
    return make(1, linear.n_k_heads, linear.n_v_heads, linear.d_k, linear.d_v)
