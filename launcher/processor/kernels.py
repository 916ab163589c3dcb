"""Kernels in C++ as kinds of work: each call counts as one, and its rate is measured by calling it."""

from collections.abc import Callable

import torch
from torch import Tensor

from launcher.processor.ops import EIGHTHS
from launcher.processor.timing import MOVED, one_after_another, typical_seconds
from modeling.context import Context
from modeling.kernels import attention_passes, expert_passes, row_passes
from modeling.kernels.expert_passes import Given, Gradients, Matrices
from modeling.kernels.expert_turns import GatesAndUps
from modeling.kernels.experts import row_multiple_of
from modeling.kernels.row_counts import rounded_up
from modeling.kernels.stand_ins import Pass
from modeling.kernels.terms import Bands
from modeling.pieces import QUERY_BLOCK

TURNED_HEADS = 8  # heads of a token, where rotations are timed
LEAST_TOKENS = 1 << 10  # that attention is timed with
BLOCK = 32  # rows that the experts' kernels take at once (blocks.h)
UNEVEN = (-20, -4, 12, 28)  # rows of each timed expert beyond the mean: on average they fill half of a last block

Timed = Callable[[], object]


def kernel_seconds(kind: str, dtype: torch.dtype, shape: tuple[int, ...], level: str) -> float | None:
    """Seconds of one FLOP of such a kernel, or of one byte if it has no products; None for other kinds of work."""
    match kind.split():
        case ["attention", ("forward" | "backward") as each]:
            return attention_seconds(each, dtype, shape)
        case ["experts", ("forward" | "backward") as each]:
            return experts_seconds(each, dtype, shape)
        case [name] if name in ROWS:
            return rows_seconds(name, dtype, shape[0], MOVED[level])
    return None


def rows_seconds(name: str, dtype: torch.dtype, width: int, n_bytes: int) -> float:
    """Seconds of a byte that one of ``row_passes`` moves, where it moves about ``n_bytes`` in rows of ``width``."""
    size = row_passes.MOVES[name] * width * dtype.itemsize
    n_rows = max(1, n_bytes // size)
    return typical_seconds(ROWS[name](dtype, n_rows, width)) / (size * n_rows)


def norm(dtype: torch.dtype, n_rows: int, width: int) -> Timed:
    """A call of a norm's forward pass."""
    weight_D, rows = torch.ones(width, dtype=dtype), one_after_another(lambda: made(dtype, n_rows, width))
    return lambda: row_passes.norm(next(rows), weight_D, norm_eps=1e-6, adds_one=False)


def norm_gradients(dtype: torch.dtype, n_rows: int, width: int) -> Timed:
    """A call of a norm's backward pass."""
    grads_and_rows = one_after_another(lambda: made(dtype, 2, n_rows, width))
    factor_D, scales_N1 = torch.ones(width), torch.ones(n_rows, 1)

    def work() -> object:
        grads_ND, rows_ND = next(grads_and_rows).unbind()
        return row_passes.norm_gradients(grads_ND, rows_ND, factor_D, scales_N1, by_rows=True, by_weight=True)

    return work


def rotate(dtype: torch.dtype, n_rows: int, width: int) -> Timed:
    """A call that turns heads of so many channels."""
    n_heads = TURNED_HEADS if n_rows % TURNED_HEADS == 0 else 1
    n_tokens = n_rows // n_heads
    cos_1SR, sin_1SR = made(torch.float32, 2, 1, n_tokens, width // 2).unbind()  # as a layer's tables are
    heads = one_after_another(lambda: made(dtype, 1, n_tokens, n_heads, width))
    return lambda: row_passes.rotate(next(heads), cos_1SR, sin_1SR, 1)


def cross_entropies(dtype: torch.dtype, n_rows: int, width: int, *, writes: bool = False) -> Timed:
    """A call that computes cross-entropies of logits, and with ``writes`` overwrites these by their gradients."""
    targets_T, logits = torch.zeros(n_rows, dtype=torch.long), one_after_another(lambda: made(dtype, n_rows, width))
    return lambda: row_passes.cross_entropies(next(logits), targets_T, ignored=-1, z_loss=0.0, writes=writes)


def cross_entropies_written(dtype: torch.dtype, n_rows: int, width: int) -> Timed:
    """The same with gradients."""
    return cross_entropies(dtype, n_rows, width, writes=True)


ROWS = {each.__name__: each for each in (norm, norm_gradients, rotate, cross_entropies, cross_entropies_written)}
assert ROWS.keys() == row_passes.MOVES.keys()


def attention_seconds(each: Pass, dtype: torch.dtype, shape: tuple[int, ...]) -> float:
    """Seconds of a FLOP of a pass of attention by one key-value head, with the window that gives so many keys a piece.

    FLOPs are those of all pairs of the pieces, as ``attention_passes.kernel`` counts them.
    """
    n_heads, d_head, seq_len, n_keys = shape
    n_rows = max(1, LEAST_TOKENS // seq_len)
    positions_BS = torch.arange(seq_len).expand(n_rows, -1)
    context = Context(positions_BS, torch.zeros_like(positions_BS))
    window = None if n_keys >= seq_len else max(1, n_keys - QUERY_BLOCK + 1)
    pieces = context.document_pieces(window, QUERY_BLOCK)
    added = Bands(*context.band(window, QUERY_BLOCK, None, None)).added(None)

    def passed() -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        q_BQHC, grad_BQHC = made(dtype, 2, n_rows, seq_len, n_heads, d_head).unbind()
        k_BSGC, v_BSGC = made(dtype, 2, n_rows, seq_len, 1, d_head).unbind()
        return (q_BQHC, k_BSGC, v_BSGC), attention_passes.forward(q_BQHC, k_BSGC, v_BSGC, pieces, added), grad_BQHC

    passes = one_after_another(passed)

    def run() -> object:
        heads, (out_BQHC, lse_BHQ), grad_BQHC = next(passes)
        if each == "forward":
            return attention_passes.forward(*heads, pieces, added)
        return attention_passes.backward(grad_BQHC, *heads, out_BQHC, lse_BHQ, pieces, added)

    kernel = attention_passes.kernel(each, *next(passes)[0], pieces)
    assert kernel is not None
    return typical_seconds(run) / kernel.flops


def experts_seconds(each: Pass, dtype: torch.dtype, shape: tuple[int, ...]) -> float:
    """Seconds of a FLOP of a pass of the experts over about as many rows each, some eighths of which keep their gates.

    Rows are uneven, and rounded up as a layer's are.
    """
    d_model, d_ff, rows, kept = shape
    sizes_E = uneven_sizes(rows, dtype)
    n_experts, n_rows = len(sizes_E), sum(sizes_E)
    tokens_R, weights_R1 = torch.randperm(n_rows), made(dtype, n_rows, 1)
    grad_TD, rows_RD, grad_weights_R = made(dtype, n_rows, d_model), made(dtype, n_rows, d_model), made(dtype, n_rows)

    def matrices() -> Matrices:
        gate_EFD, up_EFD = made(dtype, 2, n_experts, d_ff, d_model).unbind()
        return Matrices(gate_EFD, up_EFD, made(dtype, n_experts, d_model, d_ff))

    def layer() -> tuple[Tensor, Matrices, GatesAndUps]:
        gate_up_RI = made(dtype, n_rows * kept // EIGHTHS, 2 * d_ff)
        return made(dtype, n_rows, d_model), matrices(), GatesAndUps(gate_up_RI, sizes_E)

    layers, gradients = one_after_another(layer), Gradients(matrices(), rows_RD, grad_weights_R)

    def run() -> None:
        hidden_TD, weights, gates_and_ups = next(layers)
        if each == "forward":
            expert_passes.forward(weights, hidden_TD, tokens_R, gates_and_ups.gates, rows_RD)
        else:
            given = Given(weights, hidden_TD, grad_TD, tokens_R, weights_R1)
            expert_passes.backward(given, gates_and_ups.gates, gradients)

    hidden_TD, weights, gates_and_ups = next(layers)
    kernel = expert_passes.kernel(each, hidden_TD, weights, gates_and_ups.gates)
    assert kernel is not None
    return typical_seconds(run) / kernel.flops


def uneven_sizes(rows: int, dtype: torch.dtype) -> list[int]:
    """Each timed expert's rows, of about ``rows``."""
    drawn = [max(1, rows + each * min(rows, BLOCK) // BLOCK) for each in UNEVEN]
    unit = row_multiple_of(torch.empty(0, dtype=dtype), rows)
    if unit == 1:
        return drawn
    padded: list[int] = rounded_up(torch.tensor(drawn), unit).tolist()
    return padded


def made(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers from 0 to 1."""
    return torch.rand(shape).to(dtype)
