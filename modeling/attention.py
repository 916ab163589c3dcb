"""Attention over packed documents: from hidden states to heads, and back.

Shape letters: B batch, S sequence, D d_model, H heads, G key-value heads, C d_head.
"""

from collections.abc import Callable

from torch import Tensor, nn

from modeling.config import ModelConfig
from modeling.context import Context
from modeling.kernels.attention import attend
from modeling.kv_cache import LayerCache
from modeling.linear import Linear
from modeling.norm import RMSNorm
from modeling.positions import ALL_POSITIONS
from modeling.rope import rotate

AttentionCore = Callable[[Tensor, Tensor, Tensor, Context, int | None], Tensor]


class Attention(nn.Module):
    """What every kind of attention has in common: the core, the output projection ``o``, and the seams.

    ``core(q_BSHC, k_BSGC, v_BSGC, context, window) -> out_BSHC`` is the seam at which context parallelism enters;
    ``positions`` is tensor parallelism's. A kind of attention makes its weights, and says in ``heads`` what
    its queries, keys and values are.
    """

    o: Linear

    def __init__(self, sliding_window: int | None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.core: AttentionCore = attend
        self.positions = ALL_POSITIONS

    def forward(
        self, hidden_BSD: Tensor, rope: tuple[Tensor, Tensor], context: Context, cache: LayerCache | None = None
    ) -> Tensor:
        """Attention's output (B, S, D). With a cache, ``hidden_BSD`` continues the sequences that it holds."""
        heads = self.heads(self.positions.gather(hidden_BSD), rope)
        core = self.core if cache is None else cache.attend
        out_BSHC = core(*heads, context, self.sliding_window)
        return self.positions.scatter_sum(self.o(out_BSHC.flatten(-2)))

    def heads(self, hidden_BSD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(q_BSHC, k_BSGC, v_BSGC) at all positions, of the heads that the weights hold; a value may have fewer C."""
        raise NotImplementedError


class GroupedQueryAttention(Attention):
    """Query heads that share fewer key-value heads (Ainslie et al. 2023, arXiv:2305.13245), optional QK norm, RoPE."""

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        d_head: int,
        qk_norm: bool,
        sliding_window: int | None,
        norm_eps: float,
    ) -> None:
        super().__init__(sliding_window)
        self.d_head = d_head
        self.q = Linear(n_heads * d_head, d_model, ("heads", "d_model"))
        self.k = Linear(n_kv_heads * d_head, d_model, ("kv_heads", "d_model"))
        self.v = Linear(n_kv_heads * d_head, d_model, ("kv_heads", "d_model"))
        self.o = Linear(d_model, n_heads * d_head, ("d_model", "heads"), is_residual=True)
        self.q_norm = RMSNorm(d_head, norm_eps, "d_head") if qk_norm else None
        self.k_norm = RMSNorm(d_head, norm_eps, "d_head") if qk_norm else None

    def heads(self, hidden_BSD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(q_BSHC, k_BSGC, v_BSGC), the first two normed and turned."""
        q_BSHC = self.q(hidden_BSD).unflatten(-1, (-1, self.d_head))
        k_BSGC = self.k(hidden_BSD).unflatten(-1, (-1, self.d_head))
        v_BSGC = self.v(hidden_BSD).unflatten(-1, (-1, self.d_head))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHC, k_BSGC = self.q_norm(q_BSHC), self.k_norm(k_BSGC)
        return rotate(q_BSHC, rope), rotate(k_BSGC, rope), v_BSGC


def build_attention(config: ModelConfig, layer: int) -> Attention:
    """The attention of layer number ``layer`` (from 0); today that of every layer alike."""
    return GroupedQueryAttention(
        d_model=config.d_model,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.head_dim,
        qk_norm=config.qk_norm,
        sliding_window=config.sliding_window,
        norm_eps=config.norm_eps,
    )
