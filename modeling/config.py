"""The configuration of a decoder: plain values, no torch.

The type of each number gives its range. The error about a number outside its range suggests the field's default, or the
``usual`` value in the field's metadata. `roundtable prove` runs a small model: it sets a number that is neither 0 nor
None to at most its metadata's ``small``, and to at least its ``strong``, so that a fault shows. ``problems()`` yields a
message for each broken rule between the fields of a section.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, get_args

from annotated_types import Interval

from modeling.expert_layers import count_with_experts, expert_layer_problems, has_experts
from modeling.init_config import DepthScaledInit, InitConfig, MupInit
from modeling.linear_attention_config import LinearAttentionConfig
from modeling.moe_config import MoEConfig
from modeling.mtp_config import MTPConfig
from modeling.ranges import Coefficient, Count, Layer, Width
from modeling.rope_scaling import RopeScaling, rope_scaling_problems

# The one list of families; modeling/families has a module for each.
FamilyName = Literal[
    "llama",
    "gpt2",
    "gpt_neox",
    "bloom",
    "mistral",
    "ministral",
    "ministral3",
    "qwen2",
    "qwen3",
    "phi3",
    "smollm3",
    "seed_oss",
    "granite",
    "granite_swa",
    "hyperclovax",
    "ernie4_5",
    "glm",
    "glm4",
    "starcoder2",
    "stablelm",
    "arcee",
    "nemotron",
    "jais2",
    "cwm",
    "exaone4",
    "hunyuan_v1_dense",
    "olmo2",
    "olmo3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "vaultgemma",
    "youtu",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmoe",
    "granitemoe",
    "granitemoeshared",
    "granitemoe_swa",
    "glm4_moe",
    "afmoe",
    "glm4_moe_lite",
    "minimax_m2",
    "dots1",
    "exaone_moe",
    "hunyuan_v1_moe",
    "hy_v3",
    "mellum",
    "flex_olmo",
    "solar_open",
    "ernie4_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
]
FAMILIES: tuple[FamilyName, ...] = get_args(FamilyName)

ModelFamily = Literal[FamilyName, "none"]
NO_FAMILY = "none"  # a model without a class in `transformers`: it may combine all blocks, and cannot be exported


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    The keys and values of all heads are expanded from one small vector of each token, the latent. A head's query and
    key have d_nope channels without position and d_rope that RoPE rotates; the latter are the same in all heads' keys.
    """

    noun: ClassVar[str] = "latent attention"

    kv_lora_rank: Count = field(default=512, metadata={"small": 16})  # width of the latent of keys and values
    # width of the latent of queries; None: queries are projected at once
    q_lora_rank: Count | None = field(default=1536, metadata={"small": 40})
    d_nope: Count = field(default=128, metadata={"small": 16})  # channels of a head's query and key without position
    d_rope: Count = field(default=64, metadata={"small": 8})  # those that turn; even
    d_v: Count = field(default=128, metadata={"small": 8})  # channels of a head's value

    def problems(self) -> Iterator[str]:
        """One message for each broken rule between the fields."""
        if min(self.d_nope, self.d_rope) < 1:
            return
        if self.d_rope % 2:
            yield (
                f"model.mla.d_rope={self.d_rope} must be even (rotary embedding turns channels in pairs); "
                f"try {self.d_rope + 1}"
            )
        if self.d_v > self.d_nope + self.d_rope:
            yield (
                f"model.mla.d_v={self.d_v} must be at most model.mla.d_nope={self.d_nope} + "
                f"model.mla.d_rope={self.d_rope} (attention's kernels take no wider values); "
                f"try {self.d_nope + self.d_rope}"
            )


# modeling.feed_forward.ACTIVATIONS has each one's formula, modeling.families.shared.ACTIVATIONS what `transformers`
# calls it
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
AttentionGate = Literal["none", "elementwise", "headwise"]
PositionsName = Literal["rope", "alibi", "learned", "sinusoidal", "t5", "none"]
Theta = Annotated[float, Interval(ge=1.0, le=1e12)]
Cap = Annotated[float, Interval(ge=1e-3, le=1e6)]
DROPOUTS = ("embedding_dropout", "residual_dropout", "attention_dropout")
LEAST_DROPOUT = 1e-3  # masks resolve probabilities in steps of 2**-16 (modeling/dropout.py): here to within 1%
DropoutProbability = Annotated[float, Interval(ge=0.0, le=0.9)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder. ``family`` names the `transformers` architecture that an export becomes."""

    # the `transformers` architecture that an export becomes; none: every block is free, and nothing is exported
    family: ModelFamily = "llama"
    vocab_size: Width = 8192  # rows of the embedding; at least as many as the tokenizer has ids
    d_model: Annotated[int, Interval(ge=1, le=2**20)] = 512  # width of the residual stream
    n_layers: Annotated[int, Interval(ge=1, le=10_000)] = 8  # layers
    n_heads: Count = 8  # query heads
    n_kv_heads: Count = field(default=8, metadata={"usual": 1})  # key and value heads; divides n_heads
    # channels of a head, even; None: d_model / n_heads
    d_head: Count | None = field(default=None, metadata={"usual": 64})
    d_ff: Width = 1408  # width of a dense feed-forward layer
    tie_embeddings: bool = False  # the head is the embedding's weight
    # where a block is normed: its input, its output before that joins the residual stream, or both
    norm_placement: Literal["pre", "post", "both"] = "pre"
    # attention and feed-forward see the same input and are added together (GPT-J); otherwise the second sees their sum
    parallel_block: bool = False
    # of blocks and before the head; rms: RMSNorm; layer: LayerNorm, with a bias
    norm: Literal["rms", "layer"] = "rms"
    embedding_norm: bool = False  # embedded tokens are normed before the first layer
    norm_adds_one: bool = False  # norms multiply by one and their weight, which starts at zero
    qk_norm: bool = False  # RMSNorm on queries and keys
    qk_norm_over: Literal["head", "all_heads"] = "head"  # which channels a norm of queries or keys is over
    qk_norm_after_rope: bool = False  # queries and keys are normed after their channels turn; otherwise before
    qkv_bias: bool = False  # the projections to queries, keys and values have biases
    o_bias: bool = False  # attention's output projection has a bias
    ff_gated: bool = True  # dense feed-forward layers multiply by a gate; experts always do
    ff_bias: bool = False  # dense feed-forward layers' projections have biases
    # of the gates in dense feed-forward layers and shared experts, or of layers without gates
    activation: ActivationName = "silu"
    embedding_scale: Annotated[float, Interval(ge=1e-6, le=1e6)] = 1.0  # factor of the embedded tokens
    # factor of what a block adds to the residual stream
    residual_scale: Annotated[float, Interval(ge=1e-6, le=1e6)] = 1.0
    logit_divisor: Annotated[float, Interval(ge=1e-6, le=1e6)] = 1.0  # the head's logits are divided by it
    # attention's scores are multiplied by it; None: by the inverse root of score_channels
    score_scale: Annotated[float, Interval(ge=1e-6, le=1e3)] | None = field(default=None, metadata={"usual": 0.125})
    # attention's scores are divided by its root; None: channels of a head
    score_channels: Annotated[float, Interval(ge=1e-6, le=1e12)] | None = field(default=None, metadata={"usual": 64.0})
    # a token sees itself and so many less one before it; None: all
    sliding_window: Width | None = field(default=None, metadata={"usual": 1024})
    # layers (from 0) whose tokens see all before them all the same, or whose attention is not linear
    full_attention_layers: tuple[Layer, ...] = field(default=(), metadata={"usual": 0})
    # attention's scores s become cap x tanh(s / cap) (Gemma 2, arXiv:2408.00118, section 2); None: they stay
    score_cap: Cap | None = field(default=None, metadata={"usual": 50.0})
    # the head's logits do; None: they stay
    logit_cap: Cap | None = field(default=None, metadata={"usual": 30.0})
    sinks: bool = False  # each head has a trained logit that joins its softmax and carries no value
    # what attention puts out is multiplied by a sigmoid of a projection of its input (Qiu et al. 2025,
    # arXiv:2505.06708, section 2.2): to one number a channel of a head, or one a head
    attention_gate: AttentionGate = "none"
    # how tokens are told apart by place; rope: channels turn; alibi: scores fall with the distance;
    # learned: a table's row is added to each embedded token; sinusoidal: a row of sines and cosines is;
    # t5: a trained bias of each head is added to scores, by the distance; none: by the causal mask alone
    positions: PositionsName = "rope"
    # layers (from 0) in which no channel turns, though positions=rope
    nope_layers: tuple[Layer, ...] = field(default=(), metadata={"usual": 0})
    # rows of the table of learned positions, and so the longest sequence; None: there is no table
    max_positions: Width | None = field(default=None, metadata={"usual": 1024})
    t5_buckets: Annotated[int, Interval(ge=2, le=2**16)] = 32  # of distances, each with its bias where positions=t5
    t5_max_distance: Annotated[int, Interval(ge=2, le=2**40)] = 128  # distances beyond share the last bucket
    rope_theta: Theta = 10000.0  # base of the rotary frequencies
    # base of the frequencies in layers with a sliding window, which are not scaled; None: rope_theta, scaled as in all
    local_rope_theta: Theta | None = field(default=None, metadata={"usual": 10000.0})
    # so large a part of a head's channels turns, the first ones
    rope_fraction: Annotated[float, Interval(ge=1e-3, le=1.0)] = 1.0
    rope_scaling: RopeScaling | None = None
    # the probability that training drops a channel of an embedded token
    embedding_dropout: DropoutProbability = field(default=0.0, metadata={"usual": 0.1, "strong": 0.1})
    # that it drops a channel of what attention or a feed-forward layer adds to the residual stream
    residual_dropout: DropoutProbability = field(default=0.0, metadata={"usual": 0.1, "strong": 0.1})
    # that it drops the weight which a query gives to a key; attention then takes the plain formula
    attention_dropout: DropoutProbability = field(default=0.0, metadata={"usual": 0.1, "strong": 0.1})
    # the bound is where its root's cube, in gradients of a row of zeros, is still within fp32
    norm_eps: Annotated[float, Interval(ge=1e-25, le=1.0)] = 1e-6  # added to the mean square, or the variance
    init_std: Annotated[float, Interval(ge=1e-10, le=100.0)] = 0.02  # deviation of the first weights
    init: InitConfig = field(default_factory=DepthScaledInit)
    # coefficient of the z-loss on the head's logits (PaLM, arXiv:2204.02311, section 5)
    z_loss: Coefficient = field(default=0.0, metadata={"usual": 0.0001, "strong": 1e-2})
    mla: MLAConfig | None = None
    linear_attention: LinearAttentionConfig | None = None
    moe: MoEConfig | None = None
    mtp: MTPConfig | None = None

    @property
    def mtp_layers(self) -> range:
        """The numbers of the layers of multi-token prediction, which come after the model's own."""
        return range(self.n_layers, self.n_layers + (0 if self.mtp is None else self.mtp.depth))

    @property
    def all_layers(self) -> range:
        """The numbers of all layers: the model's own, and those of multi-token prediction."""
        return range(self.mtp_layers.stop)

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts, those of multi-token prediction included."""
        return any(map(self.is_moe_layer, self.all_layers))

    @property
    def embeds_at_end(self) -> bool:
        """Whether the embedding's weight is needed at the head too: as a tied head, or for multi-token prediction."""
        return self.tie_embeddings or self.mtp is not None

    @property
    def has_dropout(self) -> bool:
        """Whether anything is dropped in training."""
        return any(getattr(self, key) for key in DROPOUTS)

    @property
    def has_kv_heads(self) -> bool:
        """Whether keys and values are projected from the hidden state for each head, rather than from latents (MLA)."""
        return self.mla is None

    def keys_shift_alike(self, layer: int) -> bool:
        """Whether a vector added to all keys of a layer shifts all scores of a query by the same amount.

        The softmax does not change then, so a bias of the keys has no gradient.
        """
        return self.rope_dim_of(layer) == 0 and not self.qk_norm and not self.sinks and self.score_cap is None

    @property
    def head_dim(self) -> int:
        """Channels of one head: d_head, or d_model / n_heads."""
        return self.d_head if self.d_head is not None else self.d_model // self.n_heads

    @property
    def qk_head_dim(self) -> int:
        """Channels of one head's query, and of its key."""
        return self.head_dim if self.mla is None else self.mla.d_nope + self.mla.d_rope

    @property
    def v_head_dim(self) -> int:
        """Channels of one head's value, and of its output."""
        return self.head_dim if self.mla is None else self.mla.d_v

    @property
    def n_gates(self) -> int:
        """How many gates multiply attention's output in one layer."""
        return {"none": 0, "elementwise": self.n_heads * self.v_head_dim, "headwise": self.n_heads}[self.attention_gate]

    @property
    def rope_dim(self) -> int:
        """Channels of a head that the rotary embedding rotates."""
        if self.positions != "rope":
            return 0
        return int(self.head_dim * self.rope_fraction) if self.mla is None else self.mla.d_rope

    @property
    def widest(self) -> int:
        """An upper bound on the rows and the columns of any matrix in a layer."""
        experts = self.moe.d_ff + self.moe.shared_width if self.moe is not None else 0
        heads, latents = self.n_heads * self.qk_head_dim, 0
        if self.mla is not None:
            heads = max(heads, self.n_heads * (self.mla.d_nope + self.mla.d_v))
            latents = max(self.mla.kv_lora_rank + self.mla.d_rope, self.mla.q_lora_rank or 0)
        joined = 0 if self.mtp is None else 2 * self.d_model
        if self.linear_attention is not None:
            heads = max(heads, self.linear_attention.k_width, self.linear_attention.v_width)
        return max(self.d_model, joined, self.d_ff, heads, latents, experts)

    @property
    def n_moe_layers(self) -> int:
        """The number of layers with experts."""
        return count_with_experts(self.moe, self.n_layers) if self.moe is not None else 0

    def problems(self) -> Iterator[str]:
        """One message for each broken rule between the fields, those of the optional sections included."""
        yield from self.layer_list_problems()
        if self.positions == "rope" and self.n_heads > 0:  # no heads: reported where ranges are checked
            yield from rope_scaling_problems(self.rope_scaling, self.rope_dim, self.rope_theta)
        yield from self.position_problems()
        if isinstance(self.init, MupInit):
            yield from self.mup_problems(self.init)
        for key in DROPOUTS:
            if 0 < (probability := getattr(self, key)) < LEAST_DROPOUT:
                yield (
                    f"model.{key}={probability} must be 0 or at least {LEAST_DROPOUT} (masks are drawn in steps of "
                    f"1/65536); try {LEAST_DROPOUT}"
                )
        if self.mla is not None:
            if self.n_kv_heads != self.n_heads:
                yield (
                    f"model.n_kv_heads={self.n_kv_heads} must be model.n_heads={self.n_heads} where model.mla is given "
                    f"(every head has keys and values of its own); try {self.n_heads}"
                )
            yield from self.mla.problems()
        if self.linear_attention is not None:
            yield from self.linear_attention.problems()
            if len(self.full_attention_layers) == self.n_layers:
                listed = list(self.full_attention_layers)
                rule = "must leave out a layer where model.linear_attention is given (no layer's attention is linear)"
                yield f"model.full_attention_layers={listed} {rule}; try {listed[:-1]}"
        if self.moe is not None:
            yield from self.moe.problems()
            yield from expert_layer_problems(self.moe, self.n_layers)

    def mup_problems(self, mup: MupInit) -> Iterator[str]:
        """One message for each broken rule between muP's numbers and the model's."""
        if mup.base_d_model < 1:
            return
        ratio, told = mup.ratio(self.d_model), "where model.init.name=mup"
        if self.tie_embeddings and abs(self.logit_divisor - ratio) > 1e-6 * ratio:
            yield (
                f"model.tie_embeddings=true needs model.logit_divisor={self.logit_divisor} to be model.d_model="
                f"{self.d_model} over model.init.base_d_model={mup.base_d_model}, {ratio}, {told} (a head that is "
                f"the embedding's weight can neither be smaller than that nor learn more slowly); try "
                f"model.tie_embeddings=false, or model.logit_divisor={ratio}"
            )
        if mup.base_d_ff is not None and self.n_moe_layers == self.n_layers:
            yield f"model.init.base_d_ff={mup.base_d_ff} changes nothing where no layer is dense; try null"
        if mup.base_expert_d_ff is not None and self.moe is None:
            yield f"model.init.base_expert_d_ff={mup.base_expert_d_ff} changes nothing where model.moe=null; try null"

    def layer_list_problems(self) -> Iterator[str]:
        """One message for each broken rule about the lists of layers without windows, rotation or experts."""
        is_linear = self.linear_attention is not None
        if is_linear and self.sliding_window is not None:
            yield (
                f"model.sliding_window={self.sliding_window} is not possible where model.linear_attention is given "
                "(layers but for full_attention_layers are linear, and have no window); try null"
            )
        if self.sliding_window is None and self.full_attention_layers and not is_linear:
            told = f"model.full_attention_layers={list(self.full_attention_layers)}"
            yield f"{told} must be [] where model.sliding_window=null (no layer has a window); remove it"
            return
        lists = {"full_attention_layers": self.full_attention_layers, "nope_layers": self.nope_layers}
        if self.moe is not None:
            lists["moe.dense_layers"] = self.moe.dense_layers
        for key, layers in lists.items():
            told = f"model.{key}={list(layers)}"
            if list(layers) != sorted({*layers}):
                yield f"{told} must name each layer once, ascending; try {sorted({*layers})}"
            elif layers and layers[-1] >= self.n_layers:
                fitting = [layer for layer in layers if layer < self.n_layers]
                yield f"{told} must name layers below model.n_layers={self.n_layers} (the first is 0); try {fitting}"

    def position_problems(self) -> Iterator[str]:
        """One message for each broken rule about positions: say a rotary field in a model without rotary embedding."""
        if self.positions == "t5" and self.t5_max_distance <= self.t5_buckets // 2:
            yield (
                f"model.t5_max_distance={self.t5_max_distance} must be above half of "
                f"model.t5_buckets={self.t5_buckets} (each of these is one distance); try {self.t5_buckets}"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            yield (
                f"model.d_model={self.d_model} must be even where model.positions=sinusoidal (each angle has a sine "
                f"and a cosine); try {self.d_model + 1}"
            )
        if self.positions == "rope":
            return
        if self.mla is not None:
            yield (
                f"model.positions={self.positions} must be rope where model.mla is given (channels of its keys turn); "
                "try rope"
            )
        scaling = None if self.rope_scaling is None else self.rope_scaling.name
        for key, value, usual in (
            ("rope_theta", self.rope_theta, 10000.0),
            ("local_rope_theta", self.local_rope_theta, "null"),
            ("rope_fraction", self.rope_fraction, 1.0),
            ("rope_scaling", scaling, "null"),
            ("nope_layers", list(self.nope_layers), []),
        ):
            if value not in (usual, None):
                told = f"model.{key}.name={value}" if key == "rope_scaling" else f"model.{key}={value}"
                yield (
                    f"{told} is not possible where model.positions={self.positions} (no channel turns); "
                    f"try model.{key}={usual}"
                )

    def window_of(self, layer: int) -> int | None:
        """The tokens that a token sees in layer ``layer`` (from 0), itself included; None: itself and all before it."""
        return None if self._like(layer) in self.full_attention_layers else self.sliding_window

    def is_linear_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) has linear attention."""
        return self.linear_attention is not None and self._like(layer) not in self.full_attention_layers

    def rope_dim_of(self, layer: int) -> int:
        """Channels of a head that are rotated in layer ``layer`` (from 0)."""
        return 0 if self._like(layer) in self.nope_layers else self.rope_dim

    def _like(self, layer: int) -> int:
        """The model's own layer with the same kind of attention: the last one for a layer of multi-token prediction."""
        return min(layer, self.n_layers - 1)

    def layer_kind(self, layer: int) -> tuple[bool, bool, bool]:
        """A key that is equal for layers (from 0) whose weights have the same names, shapes and stated dims."""
        return self.is_moe_layer(layer), self.is_linear_layer(layer), self.keys_shift_alike(layer)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) has experts."""
        return self.moe is not None and (layer >= self.n_layers or has_experts(self.moe, layer))
