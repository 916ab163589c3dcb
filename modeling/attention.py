"""Attention over packed documents: from hidden states to heads, and back.

Shape letters: B batch, S sequence, D d_model, H heads, G key-value heads, C d_head.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from modeling.config import MLAConfig, ModelConfig
from modeling.context import Context
from modeling.dims import Dim
from modeling.dropout import SCORES, ScoreDropout
from modeling.kernels.attention import attend
from modeling.kv_cache import LayerCache
from modeling.linear import Bias, Linear
from modeling.mixer import Mixer
from modeling.norm import RMSNorm
from modeling.rope import Rotary, rotate, scaled, score_factor
from modeling.score_terms import Alibi, Buckets, DistanceBias, ScoreTerms, Sinks

LATENT_NORM_EPS = 1e-6  # of the norms of latents, whatever norm_eps is, as in transformers' class
AttentionCore = Callable[[Tensor, Tensor, Tensor, Context, int | None, ScoreTerms], Tensor]


class Attention(Mixer):
    """Softmax attention: what its kinds have in common, from projected heads to the output projection ``o``.

    A kind of attention makes its weights, and in ``heads`` computes queries, keys and values. One whose cache holds
    less than keys and values defines ``query_and_kept`` and ``keys_and_values`` instead.

    ``core(q_BSHC, k_BSGC, v_BSGC, context, window, terms) -> out_BSHC`` computes attention itself, and is where context
    parallelism enters; tensor parallelism enters through ``positions``.
    """

    o: Linear

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(layer)
        self.sliding_window = config.window_of(layer)
        self.o_bias = Bias(config.d_model, "d_model") if config.o_bias else None
        is_local = self.sliding_window is not None and config.local_rope_theta is not None
        theta = config.local_rope_theta if is_local and config.local_rope_theta is not None else config.rope_theta
        self.rotary = Rotary(config.rope_dim_of(layer), theta, None if is_local else config.rope_scaling)
        self.alibi = Alibi(config.n_heads, range(config.n_heads)) if config.positions == "alibi" else None
        self.sinks = Sinks(config.n_heads) if config.sinks else None
        self.output_gate = build_output_gate(config)
        self.buckets = self.distance_bias = None
        if config.positions == "t5":
            self.buckets = Buckets(config.t5_buckets, config.t5_max_distance)
            self.distance_bias = DistanceBias(config.n_heads, config.t5_buckets)
        self.score_cap = config.score_cap
        self.n_heads = config.n_heads
        self.attention_dropout = config.attention_dropout
        self.core: AttentionCore = attend

    def forward(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Attention's output (B, S, D).

        With a cache, ``hidden_BSD`` are new tokens that continue the cached sequences.
        """
        hidden_BSD = self.positions.gather(hidden_BSD)
        q_BSHC, kept = self.query_and_kept(hidden_BSD, context.rope_tables(self.rotary))
        factors_BS1 = context.query_factors(self.rotary)
        q_BSHC = q_BSHC if factors_BS1 is None else self.fuse(scaled, q_BSHC, factors_BS1)
        core = self.core
        if cache is not None:
            held = cache.extend(kept, context, self.sliding_window)
            kept, core = held.kept, held.attend
        keys_and_values = self.keys_and_values(*kept)
        out_BSHC = core(q_BSHC, *keys_and_values, context, self.sliding_window, self.score_terms(context))
        return self.put_out(out_BSHC, hidden_BSD)

    def put_out(self, out_BSHC: Tensor, hidden_BSD: Tensor) -> Tensor:
        """The layer's output (B, S, D): the heads' outputs, gated where the model has gates, projected by ``o``.

        ``hidden_BSD`` is the input of attention at all positions, from which the gates are computed.
        """
        if self.output_gate is not None:
            gate_BSHX = self.output_gate(hidden_BSD).unflatten(-1, (out_BSHC.shape[-2], -1))
            out_BSHC = self.fuse(gated_output, gate_BSHX, out_BSHC)
        summed_BSD = self.positions.scatter_sum(self.o(out_BSHC.flatten(-2)))
        return summed_BSD if self.o_bias is None else self.o_bias(summed_BSD)

    def turned(self, heads_BSHC: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """``heads_BSHC`` rotated by the tables ``rope`` (``modeling.rope.rotate``).

        Empty tables leave them as they are.
        """
        cos_BSR, sin_BSR = rope
        return heads_BSHC if cos_BSR.shape[-1] == 0 else self.fuse(rotate, heads_BSHC, cos_BSR, sin_BSR)

    def score_terms(self, context: Context) -> ScoreTerms:
        """What is done to the scores besides queries times keys, for the heads whose weights this rank holds."""
        alibi = None if self.alibi is None else self.alibi.of_part(self.positions.rank, self.positions.degree)
        sinks_H = None if self.sinks is None else self.sinks()
        bias_HN = None if self.distance_bias is None else self.distance_bias()
        return ScoreTerms(alibi, sinks_H, bias_HN, self.buckets, self.score_cap, self.score_dropout(context))

    def score_dropout(self, context: Context) -> ScoreDropout | None:
        """The dropout of the attention weights of this rank's heads; None outside training or where there is none."""
        if self.attention_dropout == 0 or context.draws is None:
            return None
        seeds_B = context.draws.of_samples(self.layer, SCORES)
        of_all = ScoreDropout(self.attention_dropout, seeds_B, range(self.n_heads))
        return of_all.of_part(self.positions.rank, self.positions.degree)

    def heads(self, hidden_BSD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(q_BSHC, k_BSGC, v_BSGC) at all positions, for this rank's heads. Values may have fewer channels C."""
        raise NotImplementedError

    def query_and_kept(self, hidden_BSD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """q_BSHC, and the tensors (B, S, ...) that a cache keeps for these positions.

        By default these are keys and values.
        """
        q_BSHC, k_BSGC, v_BSGC = self.heads(hidden_BSD, rope)
        return q_BSHC, (k_BSGC, v_BSGC)

    def keys_and_values(self, *kept: Tensor) -> tuple[Tensor, Tensor]:
        """(k_BSGC, v_BSGC) from the tensors kept by ``query_and_kept``, of these positions and of cached ones."""
        k_BSGC, v_BSGC = kept
        return k_BSGC, v_BSGC


class GroupedQueryAttention(Attention):
    """Grouped-query attention: several query heads share each key-value head (Ainslie et al. 2023, arXiv:2305.13245).

    Queries and keys may be normed (QK norm), before or after they are rotated by RoPE where the model has it.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        d_model, d_head, bias = config.d_model, config.head_dim, config.qkv_bias
        self.d_head = d_head
        self.q = Linear(config.n_heads * d_head, d_model, ("heads", "d_model"), bias=bias)
        self.k = Linear(config.n_kv_heads * d_head, d_model, ("kv_heads", "d_model"), bias=bias)
        self.v = Linear(config.n_kv_heads * d_head, d_model, ("kv_heads", "d_model"), bias=bias)
        if bias and config.keys_shift_alike(layer):
            self.k.stated["bias"] = replace(self.k.stated["bias"], cancels=True)
        self.o = Linear(d_model, config.n_heads * d_head, ("d_model", "heads"), is_residual=True)
        self.norms_all_heads = config.qk_norm_over == "all_heads"
        self.norms_after_rope = config.qk_norm_after_rope
        self.score_factor = 1.0 if config.score_channels is None else (d_head / config.score_channels) ** 0.5
        if config.score_scale is not None:
            self.score_factor = config.score_scale * d_head**0.5
        self.q_norm = self.k_norm = None
        adds_one = config.norm_adds_one
        if config.qk_norm and self.norms_all_heads:
            self.q_norm = RMSNorm(config.n_heads * d_head, config.norm_eps, "heads", adds_one=adds_one)
            self.k_norm = RMSNorm(config.n_kv_heads * d_head, config.norm_eps, "kv_heads", adds_one=adds_one)
        elif config.qk_norm:
            self.q_norm = RMSNorm(d_head, config.norm_eps, "d_head", adds_one=adds_one)
            self.k_norm = RMSNorm(d_head, config.norm_eps, "d_head", adds_one=adds_one)

    def heads(self, hidden_BSD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(q_BSHC, k_BSGC, v_BSGC): queries and keys are normed and rotated, and queries scaled by ``score_factor``."""
        heads = (project(hidden_BSD).unflatten(-1, (-1, self.d_head)) for project in (self.q, self.k, self.v))
        q_BSHC, k_BSGC, v_BSGC = heads
        if not self.norms_after_rope:
            q_BSHC, k_BSGC = self.normed(q_BSHC, k_BSGC)
        q_BSHC, k_BSGC = self.turned(q_BSHC, rope), self.turned(k_BSGC, rope)
        if self.norms_after_rope:
            q_BSHC, k_BSGC = self.normed(q_BSHC, k_BSGC)
        return q_BSHC if self.score_factor == 1 else q_BSHC * self.score_factor, k_BSGC, v_BSGC

    def normed(self, q_BSHC: Tensor, k_BSGC: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, where there are norms each head normed, or all heads of a token together."""
        if self.q_norm is None or self.k_norm is None:
            return q_BSHC, k_BSGC
        if not self.norms_all_heads:
            return self.q_norm(q_BSHC), self.k_norm(k_BSGC)
        q, k = self.q_norm(q_BSHC.flatten(-2)), self.k_norm(k_BSGC.flatten(-2))
        return q.unflatten(-1, (-1, self.d_head)), k.unflatten(-1, (-1, self.d_head))


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), its rotation interleaved.

    Shape letters besides: N d_nope, R d_rope, L kv_lora_rank; a query's and a key's C are N + R.
    """

    def __init__(self, config: ModelConfig, mla: MLAConfig, layer: int) -> None:
        super().__init__(config, layer)
        d_model, n_heads, q_lora_rank = config.d_model, config.n_heads, mla.q_lora_rank
        kv_lora_rank, d_nope, d_rope, d_v = mla.kv_lora_rank, mla.d_nope, mla.d_rope, mla.d_v
        self.kv_lora_rank, self.d_nope, self.d_rope, self.d_v = kv_lora_rank, d_nope, d_rope, d_v
        self.score_factor = score_factor(config.rope_scaling)
        q_width = n_heads * (d_nope + d_rope)
        if q_lora_rank is None:
            self.q = Linear(q_width, d_model, ("heads", "d_model"))
        else:
            self.q_a = Linear(q_lora_rank, d_model, ("q_latent", "d_model"))
            self.q_a_norm = RMSNorm(q_lora_rank, LATENT_NORM_EPS, "q_latent")
            self.q_b = Linear(q_width, q_lora_rank, ("heads", "q_latent"))
        self.has_q_latent = q_lora_rank is not None
        self.kv_a = Linear(kv_lora_rank + d_rope, d_model, ("kv_latent_rope", "d_model"))
        self.kv_a_norm = RMSNorm(kv_lora_rank, LATENT_NORM_EPS, "kv_latent")
        self.kv_b = Linear(n_heads * (d_nope + d_v), kv_lora_rank, ("heads", "kv_latent"))
        self.o = Linear(d_model, n_heads * d_v, ("d_model", "heads"), is_residual=True)

    def query_and_kept(self, hidden_BSD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """q_BSHC, and what a cache keeps: the normed latent, and the channels of the keys that are rotated.

        Each query's last d_rope channels are rotated too.
        """
        q = self.q_b(self.q_a_norm(self.q_a(hidden_BSD))) if self.has_q_latent else self.q(hidden_BSD)
        q_BSHN, q_BSHR = q.unflatten(-1, (-1, self.d_nope + self.d_rope)).split([self.d_nope, self.d_rope], dim=-1)
        latent_BSL, k_BSR = self.kv_a(hidden_BSD).split([self.kv_lora_rank, self.d_rope], dim=-1)
        q_BSHC = torch.cat([q_BSHN, self.turned(pairs_to_halves(q_BSHR), rope)], dim=-1)
        k_BS1R = self.turned(pairs_to_halves(k_BSR[:, :, None]), rope)
        return q_BSHC if self.score_factor == 1 else q_BSHC * self.score_factor, (self.kv_a_norm(latent_BSL), k_BS1R)

    def keys_and_values(self, *kept: Tensor) -> tuple[Tensor, Tensor]:
        """(k_BSHC, v_BSHC) of all heads, expanded from the latents.

        The rotated channels are the same in the keys of all heads.
        """
        latent_BSL, k_BS1R = kept
        kv = self.kv_b(latent_BSL).unflatten(-1, (-1, self.d_nope + self.d_v))
        k_BSHN, v_BSHC = kv.split([self.d_nope, self.d_v], dim=-1)
        return torch.cat([k_BSHN, k_BS1R.expand(-1, -1, k_BSHN.shape[2], -1)], dim=-1), v_BSHC


def gated_output(gate_BSHX: Tensor, out_BSHC: Tensor) -> Tensor:
    """sigmoid(gate) * out, of the shape and dtype of ``out_BSHC``. X is C, or 1 where each head has a single gate."""
    return gate_BSHX.sigmoid() * out_BSHC


def build_output_gate(config: ModelConfig) -> Linear | None:
    """The projection from attention's input to the gates on its output; None for a model without gates."""
    if config.attention_gate == "none":
        return None
    of_gates: Dim = "heads" if config.attention_gate == "elementwise" else "per_head"
    return Linear(config.n_gates, config.d_model, (of_gates, "d_model"))


def pairs_to_halves(heads_BSHR: Tensor) -> Tensor:
    """Channels (2c, 2c + 1) moved to (c, c + R/2), which are the pairs that ``rotate`` rotates."""
    return torch.cat([heads_BSHR[..., ::2], heads_BSHR[..., 1::2]], dim=-1)


def build_attention(config: ModelConfig, layer: int) -> Attention:
    """The attention of layer number ``layer`` (from 0)."""
    if config.mla is not None:
        return LatentAttention(config, config.mla, layer)
    return GroupedQueryAttention(config, layer)
