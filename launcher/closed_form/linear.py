"""Linear attention by closed forms: its matrices, the work of its rule, and the memory of its activations."""

from modeling.kernels.fused_delta import RuleWork
from modeling.kernels.gated_delta import CHUNK
from modeling.linear_attention_config import LinearAttentionConfig
from parallel.recompute import Recompute

FP32, HALF = 4, 2  # bytes of an element
# Tensors that the rule's backward pass in torch operations holds at once. SQUARES have CHUNK numbers for a token and
# value head: scores, decay factors, the triangular system, and their gradients. CHANNELS are as wide as a key and a
# value.
SQUARES, CHANNELS = 9, 6
CONVOLVED = 6.0  # reads and writes of the convolved channels in a pass, a mean over three; the gradient has the most


def projected_width(linear: LinearAttentionConfig) -> int:
    """Width of the projections of a hidden state: queries, keys, values, gates, and two numbers for each value head."""
    return 2 * linear.k_width + 2 * linear.v_width + 2 * linear.n_v_heads


def matrices(linear: LinearAttentionConfig, d_model: int) -> list[tuple[int, int, bool]]:
    """(inputs, outputs, whether tp divides the outputs rather than the inputs) of each projection of a layer."""
    return [(d_model, projected_width(linear), True), (linear.v_width, d_model, False)]


def rule_flops(linear: LinearAttentionConfig) -> float:
    """FLOPs of one token's forward pass through the chunked rule: products with the state, and within the chunk."""
    state = 3 * 2.0 * linear.d_k * linear.d_v  # it is read under the key and the query, and written to
    within = 2.0 * CHUNK * (linear.d_k + linear.d_v) / 2 + 2.0 * CHUNK * linear.d_v  # the system, and its use
    return linear.n_v_heads * (state + within) + linear.n_k_heads * 2 * 2.0 * CHUNK * linear.d_k


def elements(linear: LinearAttentionConfig) -> float:
    """Elements that one token reads and writes in convolutions, the rule and the gated norm."""
    mixed = 2 * linear.k_width + linear.v_width
    return CONVOLVED * mixed + 4.0 * linear.v_width


def width(linear: LinearAttentionConfig, mode: Recompute, tp: int, element: int) -> float:
    """Elements that one token keeps for the backward pass in a layer of linear attention, on a rank of tp.

    They are inputs and outputs of the convolutions, gates, and the rule's output before and after its norm.
    ``element``: bytes of one. In 16 bits the rule's kernels keep normalised queries and keys instead of the
    convolutions' outputs, and also the solved triangular systems, sums of decays, and norms.
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
    """Bytes for one token during the rule's backward pass, which recomputes the rule (in fp32 chunk by chunk)."""
    if element == HALF:
        return HALF * rule_work(linear, is_backward=True).room / tp
    return FP32 * linear.n_v_heads * (SQUARES * CHUNK + CHANNELS * (linear.d_k + linear.d_v)) / tp


def rule_work(linear: LinearAttentionConfig, *, is_backward: bool) -> RuleWork:
    """The work of the rule's kernels for one token."""
    make = RuleWork.backward if is_backward else RuleWork.forward
    return make(1, linear.n_k_heads, linear.n_v_heads, linear.d_k, linear.d_v)
