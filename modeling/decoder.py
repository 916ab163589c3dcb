"""The decoder-only transformer, in the order in which it computes: embedding, layers, final norm and head.

Shape letters: B batch, S sequence, D d_model, V vocab_size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.attention import Attention, build_attention
from modeling.balance import InjectLoss
from modeling.config import ModelConfig
from modeling.context import Context
from modeling.dims import Weight
from modeling.dropout import ATTENTION, EMBEDDING, FEED_FORWARD, Dropout
from modeling.feed_forward import FeedForward
from modeling.kv_cache import KVCache, LayerCache
from modeling.linear_attention import LinearAttention
from modeling.loss import Head
from modeling.mixer import Mixer
from modeling.moe import MoE, RoutingStats, build_moe
from modeling.mtp import Ahead, PredictionModule, build_prediction_modules
from modeling.norm import Norm, build_norm
from modeling.rope import Rotary
from modeling.rope_scaling import LongRopeScaling

WAVELENGTHS_BASE = 10000.0  # the wavelengths of sinusoidal positions lie between 2 pi and this many times 2 pi
ENTRY = (
    "embed",
    "embed_positions",
    "embed_norm",
)  # a decoder's modules before its layers, in the order in which they compute


@dataclass
class Output:
    """The result of a forward pass: the summed loss, or the logits; and the routing statistics of each MoE layer.

    A part of a decoder that has no head (a pipeline stage but the last) gives ``hidden_BSD`` in place of loss and
    logits.
    """

    loss: (
        Tensor | None
    )  # fp64, the counted targets' cross-entropies, summed; its gradient is that of all losses, z-loss included
    logits_BSV: Tensor | None
    hidden_BSD: Tensor | None = None
    z_loss: Tensor | None = None  # fp64, the sum of these targets' squared logsumexps, without the coefficient
    # fp64, one for each depth of multi-token prediction: the summed cross-entropies, detached, since their gradients
    # come with that of ``loss``
    further_losses: list[Tensor] = field(default_factory=list)
    stats: dict[int, RoutingStats] = field(default_factory=dict)  # by the number of the MoE layer


class Embedding(nn.Module):
    """The token embedding: a trained vector for each token of the vocabulary."""

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.stated = {"weight": Weight(("vocab", "d_model"), is_table=True)}

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """The embedded tokens: tokens_BS (int) -> hidden_BSD, in the weight's dtype."""
        return F.embedding(tokens_BS, self.weight)


class PositionEmbedding(nn.Module):
    """A trained vector for each position of a document (GPT-2)."""

    def __init__(self, max_positions: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions, d_model))
        self.stated = {"weight": Weight(("positions", "d_model"), is_table=True)}

    def forward(self, positions_BS: Tensor) -> Tensor:
        """The positions' vectors (B, S, D). Each position must be below the table's ``max_positions``."""
        return F.embedding(positions_BS, self.weight)


class SinusoidalPositions(nn.Module):
    """Sines and cosines of a position's angles, not trained (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, positions_BS: Tensor) -> Tensor:
        """The positions' vectors, fp32 (B, S, D): sines in even channels, cosines in odd ones."""
        rotary = Rotary(self.d_model, WAVELENGTHS_BASE)
        cos_BSR, sin_BSR = rotary.tables(positions_BS)
        return torch.stack([sin_BSR, cos_BSR], dim=-1).flatten(-2)


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward layer or an MoE layer, each with a norm and a residual connection.

    By default each of the two blocks is given its normed input (pre-norm). With ``norms_outputs`` the same two norms
    are applied to the blocks' outputs instead, before these are added to the residual stream (OLMo 2). Where post norms
    are given, both a block's input and its output are normed (Gemma 2).

    What is added to the residual stream is first multiplied by ``residual_scale``, and in training dropped out with
    probability ``residual_dropout``. With ``is_parallel`` both blocks read the layer's input (GPT-J); otherwise the
    feed-forward layer reads the sum of that and attention's output.
    """

    def __init__(
        self,
        layer: int,
        attention_norm: Norm,
        attention: Mixer,
        feed_forward_norm: Norm,
        feed_forward: FeedForward | MoE,
        *,
        norms_outputs: bool,
        is_parallel: bool = False,
        attention_post_norm: Norm | None = None,
        feed_forward_post_norm: Norm | None = None,
        residual_scale: float = 1.0,
        residual_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward
        self.norms_outputs = norms_outputs
        self.is_parallel = is_parallel
        self.attention_post_norm = attention_post_norm
        self.feed_forward_post_norm = feed_forward_post_norm
        self.residual_scale = residual_scale
        self.residual_dropout = residual_dropout
        self.drop_attention = Dropout(residual_dropout, layer, ATTENTION)
        self.drop_feed_forward = Dropout(residual_dropout, layer, FEED_FORWARD)

    def forward(
        self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None = None
    ) -> tuple[Tensor, RoutingStats | None]:
        """The hidden states (B, S, D) after this layer, and its router's statistics (None for a dense layer).

        With a cache, ``hidden_BSD`` are new tokens that continue the cached sequences.
        """
        in_BSD = hidden_BSD if self.norms_outputs else self.attention_norm(hidden_BSD)
        after = self.attention_norm if self.norms_outputs else self.attention_post_norm
        out_BSD = self.attention(in_BSD, context, cache)
        sum_BSD = self.joined(hidden_BSD, out_BSD, after, self.drop_attention, context)
        return self.add_feed_forward(sum_BSD, hidden_BSD if self.is_parallel else sum_BSD, context)

    def joined(
        self, hidden_BSD: Tensor, out_BSD: Tensor, norm: Norm | None, dropout: Dropout, context: Context
    ) -> Tensor:
        """The residual stream plus a block's output, after the output's norm (if any), scaling and dropout."""
        out_BSD = out_BSD if norm is None else norm(out_BSD)
        out_BSD = out_BSD if self.residual_scale == 1 else out_BSD * self.residual_scale
        return hidden_BSD + dropout(out_BSD, context.between_layers.draws)

    def add_feed_forward(
        self, hidden_BSD: Tensor, seen_BSD: Tensor, context: Context
    ) -> tuple[Tensor, RoutingStats | None]:
        """``hidden_BSD`` plus the feed-forward layer's output for ``seen_BSD``, and its router's statistics or None."""
        in_BSD, stats = seen_BSD if self.norms_outputs else self.feed_forward_norm(seen_BSD), None
        if isinstance(self.feed_forward, MoE):
            out_BSD, stats = self.feed_forward(in_BSD, context.between_layers, self.layer)
        else:
            out_BSD = self.feed_forward(in_BSD)
        after = self.feed_forward_norm if self.norms_outputs else self.feed_forward_post_norm
        return self.joined(hidden_BSD, out_BSD, after, self.drop_feed_forward, context), stats


class Decoder(nn.Module):
    """The embedding, the layers, the final norm and the head; or a part of these, such as one pipeline stage.

    Layers are keyed by their numbers in the whole model, so that a part of it keeps the parameters' names. A part that
    lacks the model's beginning or its end has None in place of those modules. ``mtp`` are the modules of multi-token
    prediction, keyed by the numbers of the layers that they use, which come after the model's own.

    ``takes_tokens`` says that the input is token ids rather than hidden states. The presence of the embedding does not
    decide that, since ``mtp`` needs it too.
    """

    embed: Embedding
    embed_positions: PositionEmbedding | SinusoidalPositions | None
    embed_norm: Norm | None
    final_norm: Norm
    head: Head

    def __init__(
        self,
        embed: Embedding | None,
        layers: list[DecoderLayer],
        final_norm: Norm | None,
        head: Head | None,
        *,
        embedding_scale: float = 1.0,
        logit_divisor: float = 1.0,
        embed_positions: PositionEmbedding | SinusoidalPositions | None = None,
        embed_norm: Norm | None = None,
        embedding_dropout: float = 0.0,
        mtp: Mapping[int, PredictionModule] | None = None,
        takes_tokens: bool = True,
    ) -> None:
        super().__init__()
        self.register_module("embed", embed)
        self.register_module("embed_positions", embed_positions)
        self.register_module("embed_norm", embed_norm)
        self.layers = nn.ModuleDict({str(layer.layer): layer for layer in layers})
        self.mtp = nn.ModuleDict({str(layer): module for layer, module in (mtp or {}).items()})
        self.register_module("final_norm", final_norm)
        self.register_module("head", head)
        self.embedding_scale = embedding_scale
        self.logit_divisor = logit_divisor
        self.drop_embedding = Dropout(embedding_dropout, 0, EMBEDDING)
        self.takes_tokens = takes_tokens

    @property
    def own_layers(self) -> list[DecoderLayer]:
        """The model's own layers, in order, without those that multi-token prediction adds."""
        return [self.layer_of(name) for name in self.layers if name not in self.mtp]

    def layer_of(self, name: str) -> DecoderLayer:
        """The layer with the key ``name``, which is its number as text."""
        layer = self.layers[name]
        assert isinstance(layer, DecoderLayer)
        return layer

    @property
    def max_positions(self) -> int | None:
        """The longest sequence for which there are learned positions; None where positions are not learned.

        It is read from the shape of the weight, which must be whole.
        """
        table = self.embed_positions
        return table.weight.shape[0] if isinstance(table, PositionEmbedding) else None

    @property
    def cached_up_to(self) -> int | None:
        """The longest sequence whose cached keys stay valid, in tokens; None where there is no limit.

        LongRoPE rotates all tokens of a sequence by other angles once it is longer than this, so that every cached key
        is wrong.
        """
        halves = (cast(DecoderLayer, layer).attention for layer in self.layers.values())
        rotaries = (half.rotary for half in halves if isinstance(half, Attention))
        lengths = (each.scaling.original_seq_len for each in rotaries if isinstance(each.scaling, LongRopeScaling))
        return next(lengths, None)

    def part_of(self, layers: Iterable[int], *, has_embedding: bool, has_head: bool) -> "Decoder":
        """A decoder of the given layers of this one, sharing its modules: a pipeline stage.

        The part with the head also has the modules of multi-token prediction, their layers and the embedding.
        """
        norm, head = (self.final_norm, self.head) if has_head else (None, None)
        mtp = {int(name): cast(PredictionModule, module) for name, module in self.mtp.items()} if has_head else {}
        return Decoder(
            self.embed if has_embedding or mtp else None,
            [self.layer_of(str(layer)) for layer in (*layers, *mtp)],
            norm,
            head,
            embedding_scale=self.embedding_scale,
            logit_divisor=self.logit_divisor,
            embed_positions=self.embed_positions if has_embedding else None,
            embed_norm=self.embed_norm if has_embedding else None,
            embedding_dropout=self.drop_embedding.probability,
            mtp=mtp,
            takes_tokens=has_embedding,
        )

    def embedded(self, tokens_BS: Tensor, context: Context) -> Tensor:
        """The hidden states (B, S, D) that enter the first layer: the embedded tokens, with any added positions.

        ``embedding_scale`` is rounded to the embedding's dtype before it is multiplied by, as in Gemma.
        """
        hidden_BSD = self.embed(tokens_BS)
        if self.embedding_scale != 1:
            factor = torch.full((), self.embedding_scale, dtype=hidden_BSD.dtype, device=hidden_BSD.device)
            hidden_BSD = hidden_BSD * factor
        if self.embed_positions is not None:
            table_BSD = self.embed_positions(context.between_layers.positions_BS)
            hidden_BSD = (hidden_BSD + table_BSD).to(hidden_BSD.dtype)
        hidden_BSD = hidden_BSD if self.embed_norm is None else self.embed_norm(hidden_BSD)
        return self.drop_embedding(hidden_BSD, context.between_layers.draws)

    def forward(
        self,
        inputs: Tensor,
        context: Context,
        targets_BS: Tensor | None = None,
        cache: KVCache | None = None,
        ahead: Sequence[Ahead] = (),
    ) -> Output:
        """The summed loss against ``targets_BS``, or the logits where no targets are given.

        ``inputs`` are tokens_BS (int64), or hidden_BSD in a part of a decoder that does not begin with the embedding.
        ``ahead`` has what each module of multi-token prediction needs; it is used only together with ``targets_BS``.
        """
        hidden_BSD = self.embedded(inputs, context) if self.takes_tokens else inputs
        output = Output(None, None)
        for layer in self.own_layers:
            layer_cache = None if cache is None else cache.layers[layer.layer]
            hidden_BSD, stats = layer(hidden_BSD, context, layer_cache)
            if stats is not None:
                output.stats[layer.layer] = stats
        if self.head is None:
            output.hidden_BSD = hidden_BSD
            return output
        hidden_BSD = self.final_norm(hidden_BSD)
        result = self.head(self.divided(hidden_BSD), targets_BS)
        if targets_BS is None:
            output.logits_BSV = result
        else:
            output.loss, output.z_loss = result
            self.predict_further(hidden_BSD, context, ahead, output)
        return output

    def divided(self, hidden_BSD: Tensor) -> Tensor:
        """The hidden states divided by ``logit_divisor``, and so the logits, which are linear in them.

        Dividing the logits themselves would cost more, since there are more of them.
        """
        return hidden_BSD if self.logit_divisor == 1 else hidden_BSD / self.logit_divisor

    def predict_further(self, hidden_BSD: Tensor, context: Context, ahead: Sequence[Ahead], output: Output) -> None:
        """Adds the losses of multi-token prediction to ``output``, whose ``loss`` then carries their gradients too.

        The first module reads the hidden states that the head sees, after the final norm, and each further one those of
        the module before it. Programs that decode with these modules do the same (transformers' MtpModel, vLLM,
        SGLang).
        """
        if not ahead:
            return
        for (name, module), each in zip(self.mtp.items(), ahead, strict=True):
            assert isinstance(module, PredictionModule)
            entering_BSD = module(self.embed(each.tokens_BS), hidden_BSD)
            hidden_BSD, stats = self.layer_of(name)(entering_BSD, context)
            hidden_BSD = module.final_norm(hidden_BSD)
            loss, _ = self.head(self.divided(hidden_BSD), each.targets_BS)
            output.loss = InjectLoss.apply(output.loss, loss, each.scale)
            output.further_losses.append(loss.detach())
            if stats is not None:
                output.stats[int(name)] = stats


def build_decoder(config: ModelConfig, layers: Iterable[int] | None = None) -> Decoder:
    """The decoder on the current default device, with weights uninitialized (build under torch.device('meta')).

    ``layers`` are the numbers of the layers to build, in order. None means all of them, including those of multi-token
    prediction.
    """
    numbers = config.all_layers if layers is None else layers
    embed = Embedding(config.vocab_size, config.d_model)
    head = Head(config.vocab_size, config.d_model, config.z_loss, config.logit_cap)
    if config.tie_embeddings:
        head.weight = embed.weight
    return Decoder(
        embed,
        [build_layer(config, layer) for layer in numbers],
        build_norm(config),
        head,
        embedding_scale=config.embedding_scale,
        logit_divisor=config.logit_divisor,
        embed_positions=build_positions(config),
        embed_norm=build_norm(config) if config.embedding_norm else None,
        embedding_dropout=config.embedding_dropout,
        mtp=build_prediction_modules(config),
    )


def build_positions(config: ModelConfig) -> PositionEmbedding | SinusoidalPositions | None:
    """The module that adds positions to the embedded tokens; None for a model that adds none."""
    match config.positions:
        case "sinusoidal":
            return SinusoidalPositions(config.d_model)
        case "learned":
            assert config.max_positions is not None, f"model.family={config.family} needs it"
            return PositionEmbedding(config.max_positions, config.d_model)
        case "rope" | "alibi" | "t5" | "none":  # these act inside attention, or not at all
            return None
        case _:
            assert_never(config.positions)


def build_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    """Layer number ``layer`` of the decoder that the config describes."""
    if config.moe is not None and config.is_moe_layer(layer):
        feed_forward = build_moe(config.moe, config.d_model, config.activation)
    else:
        feed_forward = FeedForward(
            config.d_model,
            config.d_ff,
            gated=config.ff_gated,
            bias=config.ff_bias,
            activation=config.activation,
        )
    n_norms = 4 if config.norm_placement == "both" else 2
    norms = [build_norm(config) for _ in range(n_norms)]
    return DecoderLayer(
        layer,
        norms[0],
        build_mixer(config, layer),
        norms[1],
        feed_forward,
        norms_outputs=config.norm_placement == "post",
        is_parallel=config.parallel_block,
        attention_post_norm=norms[2] if n_norms == 4 else None,
        feed_forward_post_norm=norms[3] if n_norms == 4 else None,
        residual_scale=config.residual_scale,
        residual_dropout=config.residual_dropout,
    )


def build_mixer(config: ModelConfig, layer: int) -> Mixer:
    """The attention of layer number ``layer``: linear attention where the config says so, else softmax attention."""
    if config.linear_attention is not None and config.is_linear_layer(layer):
        return LinearAttention(config, config.linear_attention, layer)
    return build_attention(config, layer)
