"""The memory of a Roundtable rank by closed forms: a layer's activations for its backward pass, and the training state.

Which tensors a layer keeps follows docs/speed.md's table of `train.recompute`; what the optimizer updates is counted as
in launcher.plan.memory, without padding. Both are for ranking many layouts; tests compare them with traced plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from launcher.closed_form import linear
from launcher.closed_form.again import Kind, kind_of
from launcher.closed_form.held import LayerHeld, Stages, most_held, worst_moments
from modeling.config import ModelConfig
from modeling.logical import logical_tensors
from modeling.loss import CUDA_CHUNK_LOGITS
from modeling.optimizers.config import OptimizerConfig
from parallel.config import ParallelConfig
from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.stages import pipeline_parts
from parallel.recompute import Recompute as Mode
from parallel.sizes import DEFAULT_SIZES

FP32 = 4
LOGIT = 2  # tensors of a chunk's logits: themselves, and their gradient
LOGIT_CUT = 4  # the same where tp shards the vocabulary: both also in fp32
DEALT = 2  # tensors of a round's whole matrices under ZeRO: the received ones, and their updates
AT_WORK = 3  # tensors of the stack that is being updated: itself, and two of an iteration
WORKING = 0.5  # of a layer's bytes: gradients in the layer whose backward pass runs
AGAIN = 1.5  # the same where the layer is recomputed
ON_ITS_WAY = 2.0  # of what a layer keeps, where that is offloaded: its own, and that of the neighbouring layer
PUT_OFF = 2.0  # of a layer's bytes: activations and gradients that are held until its weight gradients are computed


@dataclass(frozen=True)
class Way:
    """The properties of a config's layout that decide how much a layer keeps for its backward pass."""

    tp: int
    exchanges: bool  # ep > 1: rows come from other ranks and are kept; else selective recomputation picks them again
    weights_stay: bool  # False under ZeRO 3, where selective recomputation keeps keys and values
    offloads: bool = False  # activations are kept on the host
    element: int = 2  # bytes of an activation


class Repeats(NamedTuple):
    """Shares of layers that recompute each part, at the pipeline position that recomputes the most."""

    attention: float
    feed_forward: float
    chains: float  # elementwise work alone

    @classmethod
    def of(cls, modes: Sequence[Mode], stages: Sequence[Sequence[Sequence[int]]]) -> "Repeats":
        """The shares in a model whose layers have these modes; ``stages``: layer numbers by position and stage."""
        shares = [cls.among([modes[layer] for stage in own for layer in stage]) for own in stages]
        return max(shares, key=sum)

    @classmethod
    def among(cls, modes: Sequence[Mode]) -> "Repeats":
        """The shares among layers with these modes."""
        selective, half, full = (modes.count(mode) / len(modes) for mode in ("selective", "feed_forward", "full"))
        return cls(full, full + half, selective)


class Layers(NamedTuple):
    """The number of layers of a pipeline position; at the head's, modules of multi-token prediction count as layers."""

    total: float
    moe: float  # layers with experts

    @property
    def dense(self) -> float:
        """The number of layers without experts."""
        return self.total - self.moe


@dataclass(frozen=True)
class Ours:
    """What the closed forms need of a Roundtable config besides its dims and its layout."""

    pipeline: PipelineConfig
    element: int  # bytes of a weight and an activation
    states: float  # fp32 numbers that the optimizer keeps for a weight, the mean
    zero: int
    pp: int
    sums_in_place: bool  # bf16 under ZeRO 1: gradients are added to their sums as they are computed
    held: tuple[float, ...]  # for each position, elements kept for backward passes, per token of a micro-batch
    again: Repeats
    layers: tuple[Layers, ...]  # of each position
    updates_on_host: bool  # master weights and optimizer states are on the host
    sent: tuple[float, ...]  # for each position, elements that one token sends to the host
    head_at: int  # the head's pipeline position: the first one in a V-shaped schedule
    scores: float = 0.0  # bytes of attention scores in memory at once, where no fused kernel computes them
    matrix_flops: tuple[tuple[str, float], ...] = ()  # of an update's products, by dtype, per element of the model
    update: float = 0.0  # bytes of matrices that an update gathers whole
    scatters: bool = False  # ZeRO 1 reduces each micro-batch's gradients, and sums only this rank's shard
    chunk_logits: int = CUDA_CHUNK_LOGITS  # logits that the head computes at a time

    def state(self, n_weights: float, n_updated: float) -> float:
        """Bytes of weights, gradient sums, master weights and optimizer states on one rank.

        ``n_weights``: the rank's weights before ZeRO shards them; ``n_updated``: those that it updates.
        """
        if self.zero == 0:
            return (self.element + FP32 + FP32 * self.states) * n_weights
        kept = n_updated if self.zero == 3 else n_weights
        summed = n_updated if self.scatters or (self.zero >= 2 and self.pp == 1) else n_weights
        if self.updates_on_host:
            return self.element * kept + FP32 * (0.0 if self.element == FP32 and self.pp == 1 else summed)
        return self.element * kept + FP32 * summed + FP32 * (1 + self.states) * n_updated

    def buffers(self, n_weights: float, layers: float) -> float:
        """Bytes of a micro-batch's gradients, where they are kept apart, and of the buckets for their reduction."""
        if self.scatters:  # two buckets in reduction, packed and received, and one whose gradients are being computed
            return (2 * 2 * FP32 + self.element) * min(DEFAULT_SIZES.reduced, n_weights)
        if self.zero == 0 or self.sums_in_place:
            return 0.0
        buckets = 2 * min(FP32 * DEFAULT_SIZES.bucket, FP32 * n_weights)
        if self.zero == 2 and self.pp == 1:  # gradients are reduced from the buckets alone
            return buckets
        return buckets + self.element * n_weights / (max(1.0, layers) if self.zero == 3 else 1)

    def left(self, n_weights: float, n_head: float) -> float:
        """The share of activations still held when the first bucket of gradients is reduced; the head's come first."""
        others, bucket = n_weights - n_head, DEFAULT_SIZES.reduced if self.scatters else DEFAULT_SIZES.bucket
        return 1 - min(1.0, max(0.0, bucket - n_head) / others) if others > 0 else 1.0

    def head(self, tokens: float, n_weights: float, vocab_size: float, *, is_cut: bool) -> tuple[float, float]:
        """Bytes of the gradient of the head's weights, summed in fp32 over chunks of tokens, and of a chunk's tensors.

        ``vocab_size``: that of this rank. ``is_cut``: tp shards the vocabulary.
        """
        chunk = min(self.chunk_logits, tokens * vocab_size)
        return FP32 * n_weights, self.element * (n_weights + (LOGIT_CUT if is_cut else LOGIT) * chunk)

    def activations(self, tokens: float, position: int) -> float:
        """Bytes of activations at a position at its worst moment; ``tokens``: of a micro-batch on this rank."""
        return tokens * self.element * self.held[position] + self.scores

    def stand_ins(self) -> list[int]:
        """For each position, the fullest one among those with the same number of layers of each kind.

        The first position, which has the embedding, and the head's position are kinds of their own.
        """
        kinds = dict[tuple[int | None, Layers], list[int]]()
        keys = [(each if each in (0, self.head_at) else None, layers) for each, layers in enumerate(self.layers)]
        for position, key in enumerate(keys):
            kinds.setdefault(key, []).append(position)
        fullest = {key: max(alike, key=self.held.__getitem__) for key, alike in kinds.items()}
        return [fullest[key] for key in keys]


@lru_cache(maxsize=1024)
def layer_held(model: ModelConfig, kind: Kind, mode: Mode, way: Way) -> LayerHeld:
    """Elements for one token that a layer keeps for its backward pass, and that it needs while this runs."""
    whole, kept = layer_width(model, kind, "none", way), layer_width(model, kind, mode, way)
    working = (AGAIN if mode == "full" else WORKING) * whole
    if kind.is_linear and model.linear_attention is not None:
        working = max(working, linear.working_bytes(model.linear_attention, way.tp, way.element) / way.element)
    if way.offloads:
        return LayerHeld(0.0, working + ON_ITS_WAY * kept, PUT_OFF * whole)
    return LayerHeld(kept, working, PUT_OFF * whole)


@lru_cache(maxsize=1024)
def sent_by_position(
    model: ModelConfig, pipeline: PipelineConfig, pp: int, modes: tuple[Mode, ...], way: Way
) -> tuple[float, ...]:
    """Elements that one token sends to the host, for each position; the last layer before the head sends none."""
    stages = layers_of_stages(model, pipeline, pp)
    last = max(model.all_layers)
    return tuple(
        sum(
            layer_width(model, kind_of(model, layer), modes[layer], way)
            for stage in own
            for layer in stage
            if way.offloads and layer != last
        )
        for own in stages
    )


def layer_width(model: ModelConfig, kind: Kind, mode: Mode, way: Way) -> float:
    """Elements that one token keeps in a layer for the backward pass under this mode, on one rank."""
    if kind.is_linear and model.linear_attention is not None:
        attended = linear.width(model.linear_attention, mode, way.tp, way.element)
    else:
        attended = attention_width(model, mode, way.tp, weights_stay=way.weights_stay)
    if kind.is_moe:
        fed = expert_width(model, mode, way.tp, exchanges=way.exchanges)
    else:
        fed = dense_width(model, mode, way.tp)
    return residual_width(model, mode, way.tp) + attended + fed


@lru_cache(maxsize=1024)
def held_by_position(
    model: ModelConfig, pipeline: PipelineConfig, pp: int, modes: tuple[Mode, ...], way: Way
) -> tuple[Stages, ...]:
    """What each layer keeps and needs for one token, by position and stage."""
    return tuple(
        tuple(tuple(layer_held(model, kind_of(model, layer), modes[layer], way) for layer in stage) for stage in stages)
        for stages in layers_of_stages(model, pipeline, pp)
    )


@lru_cache(maxsize=1024)
def most_by_position(
    model: ModelConfig, pipeline: PipelineConfig, pp: int, modes: tuple[Mode, ...], way: Way, n_micro_batches: int
) -> tuple[float, ...]:
    """For each position, the elements kept for backward passes at its worst moment, per token of a micro-batch."""
    stages, moments = held_by_position(model, pipeline, pp, modes, way), worst_moments(pipeline, pp, n_micro_batches)
    return tuple(most_held(layers, own) for layers, own in zip(stages, moments, strict=True))


def residual_width(model: ModelConfig, mode: Mode, tp: int) -> float:
    """Elements of norms' inputs and outputs that one token keeps in a layer; under tp, products gather the outputs."""
    own = model.d_model / tp
    made = model.d_model if tp > 1 else own
    match mode:
        case "none":
            return 2 * own + 2 * made
        case "selective":
            return 2 * own + (2 * made if tp > 1 else 0.0)
        case "feed_forward":
            return 2 * own + (made if tp > 1 else 0.0)
        case "full":
            return own


def attention_width(model: ModelConfig, mode: Mode, tp: int, *, weights_stay: bool) -> float:
    """Elements that one token keeps of queries, keys, values and attention's output, on a rank of tp.

    With qk_norm the inputs of that norm are kept too; with gated attention the gates and the gated output.
    """
    if mode == "full":
        return 0.0
    gates = model.n_gates / tp
    gated = model.n_heads * model.v_head_dim / tp if gates and mode != "selective" else 0.0
    if model.mla is not None:
        mla = model.mla
        heads = model.n_heads * (2 * (mla.d_nope + mla.d_rope) + 2 * mla.d_v + mla.d_nope) / tp
        return heads + mla.kv_lora_rank + (mla.q_lora_rank or 0) + gates + gated
    d_head = model.d_head or model.d_model // model.n_heads
    queries, keys = model.n_heads * d_head / tp, model.n_kv_heads * d_head / tp
    if mode == "selective":
        return queries + (0.0 if weights_stay else queries + 2 * keys + gates)
    normed = queries + keys if model.qk_norm else 0.0  # what goes into the norm, beside what comes out turned
    return 2 * (queries + keys) + normed + gates + gated


def dense_width(model: ModelConfig, mode: Mode, tp: int, d_ff: float | None = None) -> float:
    """Elements that one token keeps in a feed-forward block: outputs of its first products, and their activation."""
    width = (model.d_ff if d_ff is None else d_ff) / tp
    ups = 2 if model.ff_gated else 1
    return {"none": ups + 1.0, "selective": float(ups), "feed_forward": 0.0, "full": 0.0}[mode] * width


def expert_width(model: ModelConfig, mode: Mode, tp: int, *, exchanges: bool) -> float:
    """Elements that one token keeps in its experts, which are taken to be evenly loaded, and in shared experts."""
    moe = model.moe
    assert moe is not None
    if mode in ("feed_forward", "full"):
        return 0.0
    rows = moe.top_k / tp  # evenly loaded experts
    shared = dense_width(model, mode, tp, moe.shared_width)
    picked = 0 if mode == "selective" and not exchanges else 1  # rows that came from other ranks are kept
    return rows * ((picked + exchanges) * model.d_model + (3 if mode == "none" else 2) * moe.d_ff) + shared


@lru_cache(maxsize=1024)
def layers_by_position(model: ModelConfig, pipeline: PipelineConfig, pp: int) -> tuple[Layers, ...]:
    """The number of layers of each pipeline position, modules of multi-token prediction included."""
    own = [[layer for stage in stages for layer in stage] for stages in layers_of_stages(model, pipeline, pp)]
    return tuple(Layers(len(layers), sum(map(model.is_moe_layer, layers))) for layers in own)


@lru_cache(maxsize=1024)
def layers_of_stages(model: ModelConfig, pipeline: PipelineConfig, pp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The layer numbers by position and stage; the head's stage has the modules of multi-token prediction too."""
    if pp == 1:
        return ((tuple(model.all_layers),),)
    ranks, parts = stage_ranks(pipeline, pp), pipeline_parts(model, pipeline, pp)
    layers = [(*part.layers, *(model.mtp_layers if part.has_head else ())) for part in parts]
    return tuple(
        tuple(each for each, rank in zip(layers, ranks, strict=True) if rank == position) for position in range(pp)
    )


@lru_cache(maxsize=16)
def mean_states(model: ModelConfig, optimizer: OptimizerConfig) -> float:
    """Fp32 numbers that the optimizer keeps for a weight, the mean over the model's weights."""
    tensors = logical_tensors(model).values()
    kept = sum(each.numel * len(optimizer.states_of(each.weight)) for each in tensors)
    return kept / sum(each.numel for each in tensors)


def update_bytes(model: ModelConfig, optimizer: OptimizerConfig, parallel: ParallelConfig, n_ranks: int) -> float:
    """Bytes of the whole matrices that an update holds at once; 0 if the optimizer is elementwise.

    ``n_ranks``: ranks of a pipeline position.
    """
    largest, stack, taken = sizes_taken_whole(model, optimizer)
    most, cuts = DEFAULT_SIZES.matrices, parallel.ep if parallel.zero == 0 else n_ranks
    own = taken / (parallel.pp * n_ranks) if parallel.zero else 0.0
    return FP32 * (DEALT * min(most, own) + AT_WORK * max(largest, min(most, stack / cuts)))


@lru_cache(maxsize=16)
def sizes_taken_whole(model: ModelConfig, optimizer: OptimizerConfig) -> tuple[int, int, int]:
    """Elements of the largest matrix that an update takes whole, of the largest stack of experts', and of all such."""
    taken = [each for each in logical_tensors(model).values() if optimizer.takes_whole(each.weight)]
    largest, stack = (max((e.numel for e in taken if e.is_expert == is_stack), default=0) for is_stack in (False, True))
    return largest, stack, sum(each.numel for each in taken)


@lru_cache(maxsize=16)
def mean_matrix_flops(model: ModelConfig, optimizer: OptimizerConfig, tp: int) -> tuple[tuple[str, float], ...]:
    """FLOPs of an update's products of whole matrices by dtype, per element of the model.

    Matrices that tp shards, taken to be all but the experts', are computed whole by each rank of tp.
    """
    found: dict[str, float] = {}
    tensors = logical_tensors(model).values()
    for each in tensors:
        rows, columns = each.shape[-2:] if len(each.shape) > 1 else (1, 1)
        work = optimizer.matrix_work(rows, columns) if optimizer.takes_whole(each.weight) else None
        if work is not None:
            times = each.numel // (rows * columns) * (1 if "experts" in each.weight.dims else tp)
            found[work.dtype] = found.get(work.dtype, 0.0) + times * work.flops
    return tuple((dtype, flops / sum(each.numel for each in tensors)) for dtype, flops in found.items())
