"""The dims of a decoder from a row of published measurements, with those inferred that the row does not give."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from launcher.closed_form import linear
from modeling.linear_attention_config import LinearAttentionConfig

HEAD_DIMS = (64, 80, 96, 128, 192, 256)


class CannotPlan(Exception):
    """A row cannot be planned; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the ranks of its projections."""

    query_rank: int | None  # None: queries are one product of the hidden state
    kv_rank: int
    d_nope: int
    d_rope: int
    d_value: int

    @property
    def down_width(self) -> int:
        """Output width of the down-projections, which are computed as one product."""
        return (self.query_rank or 0) + self.kv_rank + self.d_rope


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The dims of a decoder. ``ff_matrices`` and, in an expert, ``expert_matrices`` are 3 with a gate and 2 without."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    ff_matrices: int
    vocab_size: int
    tied: bool
    latent: Latent | None = None
    n_experts: int = 0
    top_k: int = 0
    expert_d_ff: int = 0
    expert_matrices: int = 3
    n_shared_experts: float = 0  # of the width of one expert
    has_expert_biases: bool = False
    expert_groups: tuple[int, int] | None = None  # groups of experts, and the most of them that a token's may be in
    n_dense_layers: int = 0  # in front of the layers with experts
    n_gates: int = 0  # gates on attention's output, made by one more product of its input
    linear: LinearAttentionConfig | None = None
    linear_share: float = 0.0  # share of the layers with linear attention
    window: int | None = None
    window_share: float = 0.5  # share of the layers with a sliding window

    @property
    def n_moe_layers(self) -> int:
        """The number of layers with experts."""
        return self.n_layers - self.n_dense_layers if self.n_experts else 0

    @property
    def attention_matrices(self) -> list[tuple[int, int, bool]]:
        """(inputs, outputs, whether tp divides the outputs rather than the inputs) of each projection of a layer."""
        latent = self.latent
        if latent is None:
            width = (self.n_heads + 2 * self.n_kv_heads) * self.d_head + self.n_gates
            return [(self.d_model, width, True), (self.n_heads * self.d_head, self.d_model, False)]
        d_query = latent.d_nope + latent.d_rope
        return [
            (self.d_model, latent.down_width, True),
            (latent.query_rank or self.d_model, self.n_heads * d_query, True),
            (latent.kv_rank, self.n_heads * (latent.d_nope + latent.d_value), True),
            (self.n_heads * latent.d_value, self.d_model, False),
            *([(self.d_model, self.n_gates, True)] if self.n_gates else []),
        ]

    @property
    def attention_width(self) -> float:
        """Mean of the total widths of queries and of values; attention takes four FLOPs a key for each unit of it."""
        if self.latent is None:
            return self.n_heads * self.d_head
        return self.n_heads * (self.latent.d_nope + self.latent.d_rope + self.latent.d_value) / 2

    @property
    def attention_parameters(self) -> float:
        """Parameters of one layer's attention matrices, the mean over the layers."""
        to_keys = sum(inputs * outputs for inputs, outputs, _ in self.attention_matrices)
        if self.linear is None:
            return to_keys
        own = sum(inputs * outputs for inputs, outputs, _ in linear.matrices(self.linear, self.d_model))
        return self.linear_share * own + (1 - self.linear_share) * to_keys

    @property
    def dense_parameters(self) -> int:
        """Parameters of one layer's feed-forward block without experts."""
        return self.ff_matrices * self.d_model * self.d_ff

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return self.expert_matrices * self.d_model * self.expert_d_ff

    @property
    def embedding_parameters(self) -> int:
        """Parameters of one matrix of vocab_size x d_model."""
        return self.vocab_size * self.d_model

    @property
    def parameters(self) -> float:
        """Parameters of the whole model, without norms and biases."""
        moe, dense = self.n_moe_layers, self.n_layers - self.n_moe_layers
        experts = (self.n_experts + self.n_shared_experts) * self.expert_parameters + self.n_experts * self.d_model
        layers = self.n_layers * self.attention_parameters + dense * self.dense_parameters + moe * experts
        return layers + (1 if self.tied else 2) * self.embedding_parameters

    @property
    def active_parameters(self) -> float:
        """Parameters that one token is multiplied by: the head is counted, the embedding is not."""
        moe, dense = self.n_moe_layers, self.n_layers - self.n_moe_layers
        experts = (self.top_k + self.n_shared_experts) * self.expert_parameters + self.n_experts * self.d_model
        layers = self.n_layers * self.attention_parameters + dense * self.dense_parameters + moe * experts
        return layers + self.embedding_parameters

    def attended(self, seq_len: int, tile: int = 0) -> float:
        """Keys of a query under the causal mask, the mean over positions and layers.

        ``tile``: keys that a kernel computes at a time; half of those at each edge of the mask are computed in vain.
        """
        whole = (seq_len + tile) / 2
        if self.window is None or self.window >= seq_len:
            return whole
        near = min(whole, self.window - self.window**2 / (2 * seq_len) + tile)
        return (1 - self.window_share) * whole + self.window_share * near


DEEPSEEK = Latent(query_rank=1536, kv_rank=512, d_nope=128, d_rope=64, d_value=128)
GROUPS = (8, 4)  # arXiv 2412.19437, sections 2.1.2 and 4.2: eight groups, and a token's experts in at most four
# Facts from public configurations that rows have no field for: (beginning of the model's name, facts); the first match
# counts.
KNOWN: list[tuple[str, dict[str, Any]]] = [
    (
        "deepseek-v3",
        {"latent": DEEPSEEK, "n_dense_layers": 3, "expert_groups": GROUPS},
    ),  # arXiv 2412.19437, section 4.2
    ("deepseek-r1", {"latent": DEEPSEEK, "n_dense_layers": 3, "expert_groups": GROUPS}),
    ("deepseek-v2", {"latent": DEEPSEEK, "n_dense_layers": 1}),  # arXiv 2405.04434, section 3.1.2
    ("kimi-k2", {"latent": DEEPSEEK, "n_dense_layers": 1}),  # config.json of moonshotai/Kimi-K2-Base
    ("qwen3", {"d_head": 128}),  # config.json of Qwen/Qwen3-30B-A3B and -235B-A22B
    ("glm-4-5-air", {"d_head": 128, "n_dense_layers": 1}),  # config.json of zai-org/GLM-4.5-Air
    ("glm-4-5", {"d_head": 128, "n_dense_layers": 3}),  # config.json of zai-org/GLM-4.5
    ("gemma-2-27b", {"d_head": 128, "window": 4096}),  # config.json of google/gemma-2-27b
    ("gemma-2", {"d_head": 256, "window": 4096}),  # config.json of google/gemma-2-2b and -9b
    ("gpt-oss", {"d_head": 64, "window": 128, "has_expert_biases": True}),  # config.json of openai/gpt-oss-120b
]


def known_facts(name: str) -> dict[str, Any]:
    """Facts on a model of this name from KNOWN, which rows have no field for; empty where it is not known."""
    plain = re.sub(r"[\s_.]+", "-", name.strip().lower())
    plain = re.sub(r"^deepseek(?=v\d)", "deepseek-", plain)
    return next((facts for beginning, facts in KNOWN if plain.startswith(beginning)), {})


MOST = {"layers": 10_000}  # larger values in a row are taken for mistakes
MOST_OF_OTHERS = 10**9
MOST_PARAMETERS = 1e15


def positive(model: Mapping[str, Any], key: str) -> int | None:
    """A whole number above 0, or None where the row has none. Raises CannotPlan for anything else."""
    value = model.get(key)
    if value is None or (value == 0 and not isinstance(value, bool)):
        return None
    most = MOST.get(key, MOST_OF_OTHERS)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most or value != int(value):
        raise CannotPlan(f"{key}={str(value)[:40]} is no whole number from 1 to {most}")
    return int(value)


def stated_parameters(model: Mapping[str, Any]) -> float | None:
    """The number of parameters that the row states, or that the model's name contains (gpt-7.1B); None if neither."""
    stated = model.get("params")
    if isinstance(stated, int | float) and not isinstance(stated, bool) and 1 <= stated <= MOST_PARAMETERS:
        return float(stated)
    found = re.search(r"(\d+(?:\.\d+)?)([BbMm])\b", str(model.get("name") or ""))
    return float(found[1]) * {"b": 1e9, "m": 1e6}[found[2].lower()] if found else None


def architecture_of(model: Mapping[str, Any], pp: int = 1) -> Architecture:
    """The decoder of a row's ``model``. Raises CannotPlan where dims are missing that cannot be inferred.

    What the row leaves open (a gate or none, the width of a head, tied embeddings) is chosen to fit the stated number
    of parameters, where there is one. A missing number of layers follows from it, as a multiple of ``pp``.
    """
    d_model, n_layers = positive(model, "hidden"), positive(model, "layers")
    if d_model is None:
        raise CannotPlan("model.hidden is not known")
    facts = known_facts(str(model.get("name") or ""))
    n_experts = positive(model, "experts") or 0
    moe = experts_of(model, n_experts, facts, n_layers)
    heads = positive(model, "heads") or max(1, d_model // 128)
    d_ff = positive(model, "ffn") or moe.get("expert_d_ff") or 4 * d_model
    fixed = {
        "d_model": d_model,
        "n_heads": heads,
        "n_kv_heads": positive(model, "kv_heads") or heads,
        "d_ff": d_ff,
        "vocab_size": positive(model, "vocab") or 51200,
        **{key: facts[key] for key in ("latent", "window", "has_expert_biases", "expert_groups") if key in facts},
        **moe,
    }
    stated = stated_parameters(model)
    found = [
        Architecture(
            n_layers=n_layers or 1, ff_matrices=matrices, expert_matrices=matrices, d_head=d_head, tied=tied, **fixed
        )
        for d_head, matrices, tied in choices(model, facts, n_experts, d_ff, d_model, heads)
    ]
    if n_layers is None:
        if stated is None or n_experts:
            raise CannotPlan("model.layers is not known")
        return with_layers(found[0], stated, pp)
    if stated is None or "params" not in model or model["params"] is None:
        return found[0]
    return min(found, key=lambda each: abs(math.log(each.parameters / stated)))


def experts_of(
    model: Mapping[str, Any], n_experts: int, facts: Mapping[str, Any], n_layers: int | None
) -> dict[str, int]:
    """The fields of Architecture about experts; empty for a dense model. Raises CannotPlan where one is missing."""
    if not n_experts:
        return {}
    top_k, d_ff = positive(model, "topk"), positive(model, "moe_ffn") or positive(model, "ffn")
    if top_k is None or d_ff is None:
        raise CannotPlan("model.topk or model.moe_ffn is not known")
    if top_k > n_experts:
        raise CannotPlan(f"model.topk={top_k} is more than model.experts={n_experts}")
    return {
        "n_experts": n_experts,
        "top_k": top_k,
        "expert_d_ff": d_ff,
        "n_shared_experts": positive(model, "shared_experts") or 0,
        "n_dense_layers": min(int(facts.get("n_dense_layers", 0)), (n_layers or 1) - 1),
    }


def choices(
    model: Mapping[str, Any], facts: Mapping[str, Any], n_experts: int, d_ff: int, d_model: int, heads: int
) -> list[tuple[int, int, bool]]:
    """Possible (width of a head, matrices of a feed-forward, tied embeddings) for the row, the likeliest first."""
    usual = max(1, d_model // heads)
    dims = [facts["d_head"]] if "d_head" in facts else [usual, *(each for each in HEAD_DIMS if each != usual)]
    if not n_experts:
        dims = dims[:1]
    is_gated = bool(n_experts) or d_ff != 4 * d_model
    gates = [3] if n_experts else [3, 2] if is_gated else [2, 3]
    tied = [True, False] if not is_gated else [False, True]
    return list(product(dims, gates, tied))


def with_layers(one: Architecture, stated: float, pp: int) -> Architecture:
    """The decoder with the number of layers, a multiple of ``pp``, that comes nearest to the stated parameters."""
    each = one.attention_parameters + one.dense_parameters
    layers = pp * max(1, round((stated - one.embedding_parameters) / each / pp))
    return Architecture(**{**vars(one), "n_layers": layers})
