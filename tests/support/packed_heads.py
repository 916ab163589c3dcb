"""Random rows of packed documents, and random queries, keys and values for them."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from modeling.context import PADDING, Context

FEW = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def contexts(draw: st.DrawFn) -> Context:
    """Rows of packed documents, some ending in padding."""
    seq_len = draw(st.integers(1, 24))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        positions: list[int] = []
        documents: list[int] = []
        while len(positions) < seq_len:
            length = draw(st.integers(1, seq_len - len(positions)))
            is_padding = len(positions) + length == seq_len and bool(positions) and draw(st.booleans())
            positions += [0] * length if is_padding else range(length)
            documents += [PADDING if is_padding else len(set(documents))] * length
        rows.append((positions, documents))
    positions_BS = torch.tensor([row[0] for row in rows])
    documents_BS = torch.tensor([row[1] for row in rows])
    return Context(positions_BS, documents_BS, has_padding=bool((documents_BS == PADDING).any()))


def heads(
    context: Context, n_heads: int, n_kv_heads: int, seed: int, dtype: torch.dtype = torch.float32, d_v: int = 8
) -> list[Tensor]:
    """Random queries, keys and values (B, S, heads, 8), values of ``d_v`` channels, that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    batch, seq_len = context.positions_BS.shape
    shapes = [(batch, seq_len, n, width) for n, width in ((n_heads, 8), (n_kv_heads, 8), (n_kv_heads, d_v))]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
