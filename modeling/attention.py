"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) over packed documents.

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
    """Projections, optional QK norm, RoPE, and the attention core.

    ``core(q_BSHC, k_BSGC, v_BSGC, context, window) -> out_BSHC`` is the seam at which context parallelism enters;
    ``positions`` is tensor parallelism's.
    """

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
        super().__init__()
        self.d_head = d_head
        self.sliding_window = sliding_window
        self.q = Linear(n_heads * d_head, d_model, ("heads", "d_model"))
        self.k = Linear(n_kv_heads * d_head, d_model, ("kv_heads", "d_model"))
        self.v = Linear(n_kv_heads * d_head, d_model, ("kv_heads", "d_model"))
        self.o = Linear(d_model, n_heads * d_head, ("d_model", "heads"), is_residual=True)
        self.q_norm = RMSNorm(d_head, norm_eps, "d_head") if qk_norm else None
        self.k_norm = RMSNorm(d_head, norm_eps, "d_head") if qk_norm else None
        self.core: AttentionCore = attend
        self.positions = ALL_POSITIONS

    def forward(
        self, hidden_BSD: Tensor, rope: tuple[Tensor, Tensor], context: Context, cache: LayerCache | None = None
    ) -> Tensor:
        """Attention's output (B, S, D). With a cache, ``hidden_BSD`` continues the sequences that it holds."""
        hidden_BSD = self.positions.gather(hidden_BSD)
        q_BSHC = self.q(hidden_BSD).unflatten(-1, (-1, self.d_head))
        k_BSGC = self.k(hidden_BSD).unflatten(-1, (-1, self.d_head))
        v_BSGC = self.v(hidden_BSD).unflatten(-1, (-1, self.d_head))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHC, k_BSGC = self.q_norm(q_BSHC), self.k_norm(k_BSGC)
        q_BSHC, k_BSGC = rotate(q_BSHC, rope), rotate(k_BSGC, rope)
        if cache is None:
            out_BSHC = self.core(q_BSHC, k_BSGC, v_BSGC, context, self.sliding_window)
        else:
            out_BSHC = cache.attend(q_BSHC, k_BSGC, v_BSGC, context, self.sliding_window)
        return self.positions.scatter_sum(self.o(out_BSHC.flatten(-2)))


def build_attention(config: ModelConfig, layer: int) -> Attention:
    """The attention of layer number ``layer`` (from 0); today that of every layer alike."""
    return Attention(
        d_model=config.d_model,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_head=config.head_dim,
        qk_norm=config.qk_norm,
        sliding_window=config.sliding_window,
        norm_eps=config.norm_eps,
    )
