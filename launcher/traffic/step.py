"""The properties of a training step on which its traffic depends, and the way bytes are counted.

Bytes are those that a rank sends to others when a collective runs around a ring of n ranks. For a buffer of x bytes
they are 2x(n-1)/n for an all-reduce, and x(n-1)/n for an all-gather (x: all parts together), a reduce-scatter (x: one
rank's input) and an all-to-all of equal parts; for an all-to-all of unequal parts, the bytes that leave the rank. Where
n does not divide x, the count is the mean over the ranks, a fraction. An axis of degree 1 sends nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Literal

from modeling.config import ModelConfig
from modeling.logical import LogicalTensor, logical_tensors, whole_decoder
from modeling.mup import widths_of
from modeling.optimizers.config import OptimizerConfig
from modeling.optimizers.rule import Group
from modeling.precision_config import Stored
from parallel.config import ParallelConfig
from parallel.layout import Layout, Place, layout_of
from parallel.mesh import Degrees
from parallel.pipeline.stages import Part, keep_parts, rank_parts
from parallel.recompute import Modes, Recompute, mode_of
from parallel.sizes import DEFAULT_SIZES, Sizes

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
FP32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """What this rank sends over one axis (a field of parallel.mesh.Mesh, or "world") by one kind of collective."""

    axis: str
    what: str
    collective: Collective
    sent_bytes: Fraction


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step as seen by one rank, that of pipeline position ``pp_rank``.

    ``replica_rank`` is its position among the dp x cp ranks, ``edp_rank`` that among the replicas of its experts, and
    ``ep_rank`` that on the ep axis. They matter because under ZeRO 1 and 2 the dp x cp ranks hold different shares of
    the weights that tp does not cut, and sum them over tp, and because under ZeRO different ranks own different
    matrices. Everything else is the same for all dp, cp and tp ranks.

    ``routed`` are the token-expert pairs of the step, summed over micro-batches: layer -> for each rank of the ep axis
    in order, for each expert, how many pairs that rank sends to it. Needed only for ep > 1.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    world_size: int
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    precision: Stored
    recompute: Recompute | Modes  # of all layers, or of each
    pp_rank: int = 0
    replica_rank: int = 0
    edp_rank: int = 0
    ep_rank: int = 0
    routed: Mapping[int, Sequence[Sequence[int]]] | None = None
    sizes: Sizes = DEFAULT_SIZES
    keeps_cut_weights: bool = False  # fp8 copies of weights are kept from update to update

    @property
    def in_buckets(self) -> bool:
        """Whether ZeRO 1 reduces gradients in buckets during backward passes."""
        return self.parallel.zero == 1 and self.parallel.grad_reduce != "step"

    @property
    def scatters(self) -> bool:
        """Whether each micro-batch's gradients are reduced during its backward pass, under ZeRO 1."""
        return self.parallel.zero == 1 and self.parallel.grad_reduce == "micro_batch"

    @property
    def degrees(self) -> Degrees:
        """The degrees of the step's axes."""
        return Degrees.of(self.parallel, self.world_size)

    @property
    def n_micro_batches(self) -> int:
        """The number of micro-batches that this rank processes in the step."""
        return self.global_batch_size // (self.degrees.dp * self.micro_batch_size)

    @property
    def positions(self) -> int:
        """The number of positions of each sequence that a cp rank holds; its tp ranks share them."""
        return self.seq_len // self.parallel.cp

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of hidden states and weights."""
        return 4 if self.precision == "fp32" else 2

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one micro-batch's hidden states at this cp rank's positions."""
        return self.micro_batch_size * self.positions * self.model.d_model * self.element_bytes

    @cached_property
    def layers(self) -> list[int]:
        """The layers of this rank's stages; with the head, also those of the multi-token-prediction modules."""
        own = [layer for part in self.parts for layer in part.layers]
        return [*own, *self.model.mtp_layers] if self.has_head else own

    @property
    def moe_layers(self) -> list[int]:
        """The numbers of this rank's layers with experts."""
        return [layer for layer in self.layers if self.model.is_moe_layer(layer)]

    @property
    def n_further(self) -> int:
        """The number of multi-token-prediction modules here; each looks up embeddings and passes through the head."""
        return len(self.model.mtp_layers) if self.has_head else 0

    @property
    def has_embedding(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.parts[0].has_embedding

    @property
    def has_head(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.parts[-1].has_head

    @cached_property
    def parts(self) -> list[Part]:
        """The stages that this rank holds."""
        return rank_parts(self.model, self.parallel.pipeline, self.parallel.pp, self.pp_rank)

    @cached_property
    def weights(self) -> dict[str, int]:
        """Weight of this rank's stages -> the number of its elements that the rank computes with."""
        return {name: self.tensors[name].numel // self._cut(place) for name, place in self.layout.items()}

    @cached_property
    def layout(self) -> Layout:
        """Weight of this rank's stages -> how it is laid out over the axes, in the model's order."""
        layout = layout_of(self.model)
        return {name: layout[name] for name in weight_names(self.model, tuple(self.parts))}

    @cached_property
    def tensors(self) -> Mapping[str, LogicalTensor]:
        """All logical tensors of the model by name."""
        return logical_tensors(self.model)

    def _cut(self, place: Place) -> int:
        return 1 if place.axis is None else int(getattr(self.parallel, place.axis))

    def group(self, name: str) -> Group:
        """The optimizer group of the weight ``name``, by what the weights of a group have in common."""
        return self._groups[name]

    @cached_property
    def _groups(self) -> dict[str, Group]:
        """The optimizer group of each weight of its stages."""
        widths = widths_of(self.model)
        tensors = {name: self.tensors[name] for name in self.weights}
        return {name: self.optimizer.group(each.weight, each.shape, widths) for name, each in tensors.items()}

    def states_of(self, name: str) -> tuple[str, ...]:
        """The names of the optimizer's state tensors for a weight."""
        return self.optimizer.states_of(self.tensors[name].weight)

    def forwards(self, half: Literal["attention", "feed_forward"], layer: int) -> int:
        """The number of forward passes of half a layer for one micro-batch, recomputation included.

        Recomputation ``selective`` repeats chains of elementwise operations only, so it does not count here.
        """
        repeats = {"feed_forward": ("feed_forward",), "full": ("attention", "feed_forward")}
        return 1 + (half in repeats.get(mode_of(self.recompute, layer), ()))

    def all_forwards(self, half: Literal["attention", "feed_forward"], layers: Sequence[int]) -> int:
        """The number of forward passes of one half of all given layers together, recomputation included."""
        return sum(self.forwards(half, layer) for layer in layers)


@lru_cache(maxsize=256)
def weight_names(model: ModelConfig, parts: tuple[Part, ...]) -> tuple[str, ...]:
    """The names of the weights of some stages of a model, in the model's order; cached for plans of many layouts."""
    decoder = whole_decoder(model)
    keep_parts(decoder, parts)
    return tuple(name for name, _ in decoder.named_parameters())


def around_ring(collective: Collective, n_bytes: int, degree: int) -> Fraction:
    """Bytes that each of ``degree`` ranks sends around a ring for a buffer of ``n_bytes``; the mean over the ranks.

    That is 2(n-1)/n of the buffer for an all-reduce and (n-1)/n for every other collective.
    """
    passes = 2 if collective == "all-reduce" else 1
    return Fraction(passes * n_bytes * (degree - 1), degree)
