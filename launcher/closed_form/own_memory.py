"""The memory of a rank of ours by closed forms: what a layer leaves for its backward pass, and the training state.

The shares of whole tensors follow docs/speed.md's table of `train.recompute`; what the optimizer updates is counted as
launcher.plan.memory does, without its padding. Both are for ranking many layouts: tests hold them to traced plans.
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
LOGIT = 2  # tensors of a chunk's logits: they, and their gradient
LOGIT_CUT = 4  # the same where tp cuts the vocabulary: in fp32 besides
DEALT = 2  # tensors of a round's matrices under ZeRO: what has come, and what is made of it
AT_WORK = 3  # tensors of the stack that is worked at: itself, and an iteration's two
WORKING = 0.5  # of a layer's bytes: the gradients of the one whose backward pass runs
AGAIN = 1.5  # the same where it is computed again
ON_ITS_WAY = 2.0  # of what a layer keeps, where that goes to the host: its own, and that of the layer beside it
PUT_OFF = 2.0  # of a layer's bytes: what it kept and computed again, and gradients, until those of its weights are made


@dataclass(frozen=True)
class Way:
    """What of a layout decides how much a layer leaves."""

    tp: int
    exchanges: bool  # experts' rows come from other ranks of ep; rows of the rank's own are picked again
    weights_stay: bool  # not ZeRO 3, under which keys and values are kept
    offloads: bool = False  # what layers keep waits on the host
    element: int = 2  # bytes of an activation


class Repeats(NamedTuple):
    """Shares of the layers of the position that computes most again, which do so with..."""

    attention: float
    feed_forward: float
    chains: float  # of elementwise work alone

    @classmethod
    def of(cls, modes: Sequence[Mode], stages: Sequence[Sequence[Sequence[int]]]) -> "Repeats":
        """Those of a model whose layers have these modes; ``stages`` are the numbers of layers by position."""
        shares = [cls.among([modes[layer] for stage in own for layer in stage]) for own in stages]
        return max(shares, key=sum)

    @classmethod
    def among(cls, modes: Sequence[Mode]) -> "Repeats":
        """The shares of these layers."""
        selective, half, full = (modes.count(mode) / len(modes) for mode in ("selective", "feed_forward", "full"))
        return cls(full, full + half, selective)


class Layers(NamedTuple):
    """How many layers a pipeline position has; those that predict further tokens are layers beside the head."""

    total: float
    moe: float  # of them with experts

    @property
    def dense(self) -> float:
        """The number of layers without experts."""
        return self.total - self.moe


@dataclass(frozen=True)
class Ours:
    """What the closed forms need of a config besides its dims."""

    pipeline: PipelineConfig
    element: int  # bytes of a weight and an activation
    states: float  # fp32 numbers that the optimizer keeps of a weight
    zero: int
    pp: int
    sums_in_place: bool  # bf16 under ZeRO 1: gradients are added to their sums as they are made
    held: tuple[float, ...]  # of each position: elements that wait for backward passes, over a micro-batch's tokens
    again: Repeats
    layers: tuple[Layers, ...]  # of each position
    updates_on_host: bool  # masters and optimizer states are the host's
    sent: tuple[float, ...]  # of each position: elements that one token sends to the host
    head_at: int  # the head's position: the first one in a V
    scores: float = 0.0  # bytes of attention's scores in memory at once, where no kernel keeps them to itself
    matrix_flops: tuple[tuple[str, float], ...] = ()  # of an update's products, by dtype, over the model's elements
    update: float = 0.0  # bytes of matrices that are whole for a while, in an update that needs them so
    scatters: bool = False  # ZeRO 1 reduces each micro-batch's gradients, and sums this rank's part alone
    chunk_logits: int = CUDA_CHUNK_LOGITS  # of the head at a time

    def state(self, n_weights: float, n_updated: float) -> float:
        """Bytes of weights, sums of gradients, masters and states; ``n_updated``: weights that this rank updates."""
        if self.zero == 0:
            return (self.element + FP32 + FP32 * self.states) * n_weights
        kept = n_updated if self.zero == 3 else n_weights
        summed = n_updated if self.scatters or (self.zero >= 2 and self.pp == 1) else n_weights
        if self.updates_on_host:
            return self.element * kept + FP32 * (0.0 if self.element == FP32 and self.pp == 1 else summed)
        return self.element * kept + FP32 * summed + FP32 * (1 + self.states) * n_updated

    def buffers(self, n_weights: float, layers: float) -> float:
        """One micro-batch's gradients, where they wait, and the two buckets that they are reduced through."""
        if self.scatters:  # buckets on their way, two packed and received, and one whose gradients are being made
            return (2 * 2 * FP32 + self.element) * min(DEFAULT_SIZES.reduced, n_weights)
        if self.zero == 0 or self.sums_in_place:
            return 0.0
        buckets = 2 * min(FP32 * DEFAULT_SIZES.bucket, FP32 * n_weights)
        if self.zero == 2 and self.pp == 1:  # what has come is in the buckets
            return buckets
        return buckets + self.element * n_weights / (max(1.0, layers) if self.zero == 3 else 1)

    def left(self, n_weights: float, n_head: float) -> float:
        """The share of activations that waits while the first bucket of gradients is reduced; the head's come first."""
        others, bucket = n_weights - n_head, DEFAULT_SIZES.reduced if self.scatters else DEFAULT_SIZES.bucket
        return 1 - min(1.0, max(0.0, bucket - n_head) / others) if others > 0 else 1.0

    def head(self, tokens: float, n_weights: float, vocab_size: float, *, is_cut: bool) -> tuple[float, float]:
        """The gradient of the head's weights, summed in fp32 over chunks of the tokens; and what the last chunk needs.

        ``vocab_size``: on this rank.
        """
        chunk = min(self.chunk_logits, tokens * vocab_size)
        return FP32 * n_weights, self.element * (n_weights + (LOGIT_CUT if is_cut else LOGIT) * chunk)

    def activations(self, tokens: float, position: int) -> float:
        """What waits for the backward passes of the micro-batches in flight, and one layer's own work."""
        return tokens * self.element * self.held[position] + self.scores

    def stand_ins(self) -> list[int]:
        """By position: among those with as many layers of each kind, that whose layers leave the most.

        The first position, which has the embedding, and the head's stand for themselves.
        """
        kinds = dict[tuple[int | None, Layers], list[int]]()
        keys = [(each if each in (0, self.head_at) else None, layers) for each, layers in enumerate(self.layers)]
        for position, key in enumerate(keys):
            kinds.setdefault(key, []).append(position)
        fullest = {key: max(alike, key=self.held.__getitem__) for key, alike in kinds.items()}
        return [fullest[key] for key in keys]


@lru_cache(maxsize=1024)
def layer_held(model: ModelConfig, kind: Kind, mode: Mode, way: Way) -> LayerHeld:
    """Elements that one token of a micro-batch leaves in a layer, and the room that its backward pass needs."""
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
    """Elements that one token of each position's layers sends to the host; the last layer before the head has none."""
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
    """Elements that one token leaves in a layer."""
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
    """What each position's layers leave."""
    return tuple(
        tuple(tuple(layer_held(model, kind_of(model, layer), modes[layer], way) for layer in stage) for stage in stages)
        for stages in layers_of_stages(model, pipeline, pp)
    )


@lru_cache(maxsize=1024)
def most_by_position(
    model: ModelConfig, pipeline: PipelineConfig, pp: int, modes: tuple[Mode, ...], way: Way, n_micro_batches: int
) -> tuple[float, ...]:
    """What waits for backward passes at the worst moment of each position, in elements over a micro-batch's tokens."""
    stages, moments = held_by_position(model, pipeline, pp, modes, way), worst_moments(pipeline, pp, n_micro_batches)
    return tuple(most_held(layers, own) for layers, own in zip(stages, moments, strict=True))


def residual_width(model: ModelConfig, mode: Mode, tp: int) -> float:
    """Elements of what goes into norms, and of what they put out. Products of tp take it from all of its ranks."""
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
    """Elements of queries and keys, turned (before their norm, too), of values, and of what attention puts out.

    Where that is gated, of the gates, too, and of what comes out of them.
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
    """Elements of what gates and ups put out, and of their product."""
    width = (model.d_ff if d_ff is None else d_ff) / tp
    ups = 2 if model.ff_gated else 1
    return {"none": ups + 1.0, "selective": float(ups), "feed_forward": 0.0, "full": 0.0}[mode] * width


def expert_width(model: ModelConfig, mode: Mode, tp: int, *, exchanges: bool) -> float:
    """Elements of a token's rows at their experts, and of what shared experts have."""
    moe = model.moe
    assert moe is not None
    if mode in ("feed_forward", "full"):
        return 0.0
    rows = moe.top_k / tp  # of experts that are loaded alike
    shared = dense_width(model, mode, tp, moe.shared_width)
    picked = 0 if mode == "selective" and not exchanges else 1  # rows that came from other ranks are kept
    return rows * ((picked + exchanges) * model.d_model + (3 if mode == "none" else 2) * moe.d_ff) + shared


@lru_cache(maxsize=1024)
def layers_by_position(model: ModelConfig, pipeline: PipelineConfig, pp: int) -> tuple[Layers, ...]:
    """How many layers each pipeline position has."""
    own = [[layer for stage in stages for layer in stage] for stages in layers_of_stages(model, pipeline, pp)]
    return tuple(Layers(len(layers), sum(map(model.is_moe_layer, layers))) for layers in own)


@lru_cache(maxsize=1024)
def layers_of_stages(model: ModelConfig, pipeline: PipelineConfig, pp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """By position: the layers of each of its stages; with the head, those that predict further tokens."""
    if pp == 1:
        return ((tuple(model.all_layers),),)
    ranks, parts = stage_ranks(pipeline, pp), pipeline_parts(model, pipeline, pp)
    layers = [(*part.layers, *(model.mtp_layers if part.has_head else ())) for part in parts]
    return tuple(
        tuple(each for each, rank in zip(layers, ranks, strict=True) if rank == position) for position in range(pp)
    )


@lru_cache(maxsize=16)
def mean_states(model: ModelConfig, optimizer: OptimizerConfig) -> float:
    """fp32 numbers that the optimizer keeps of a weight, the mean over the model's."""
    tensors = logical_tensors(model).values()
    kept = sum(each.numel * len(optimizer.states_of(each.weight)) for each in tensors)
    return kept / sum(each.numel for each in tensors)


def update_bytes(model: ModelConfig, optimizer: OptimizerConfig, parallel: ParallelConfig, n_ranks: int) -> float:
    """Bytes of whole matrices at once, where an update takes them so; ``n_ranks``: those of a pipeline position."""
    largest, stack, taken = sizes_taken_whole(model, optimizer)
    most, cuts = DEFAULT_SIZES.matrices, parallel.ep if parallel.zero == 0 else n_ranks
    own = taken / (parallel.pp * n_ranks) if parallel.zero else 0.0
    return FP32 * (DEALT * min(most, own) + AT_WORK * max(largest, min(most, stack / cuts)))


@lru_cache(maxsize=16)
def sizes_taken_whole(model: ModelConfig, optimizer: OptimizerConfig) -> tuple[int, int, int]:
    """Elements of the largest matrix that an update takes whole, of the largest stack of experts', and of all."""
    taken = [each for each in logical_tensors(model).values() if optimizer.takes_whole(each.weight)]
    largest, stack = (max((e.numel for e in taken if e.is_expert == is_stack), default=0) for is_stack in (False, True))
    return largest, stack, sum(each.numel for each in taken)


@lru_cache(maxsize=16)
def mean_matrix_flops(model: ModelConfig, optimizer: OptimizerConfig, tp: int) -> tuple[tuple[str, float], ...]:
    """FLOPs of an update's products of whole matrices by dtype, over the elements of the model.

    All ranks of tp compute the whole of what they hold parts of, taken to be all matrices but experts'.
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
