"""Assigns layers to pipeline stages, and makes the module that computes one stage's part of the decoder.

Shape letters: B batch, S sequence, D d_model.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from modeling.config import ModelConfig
from modeling.counts import multiplied_by_layer
from modeling.decoder import ENTRY, Decoder, Output
from parallel.batch import MicroBatch
from parallel.pipeline.config import PipelineConfig, stage_ranks

EMBEDDING_SHARE = 0.05  # of the head's cost: a look-up moves the same rows but multiplies nothing


@dataclass(frozen=True)
class Part:
    """The part of the decoder that one stage holds."""

    stage: int  # position in the pipeline
    n_stages: int
    layers: range

    @property
    def has_embedding(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.stage == 0

    @property
    def has_head(self) -> bool:
        """Whether the stage has the final norm, the head, the loss, and modules for multi-token prediction if any."""
        return self.stage == self.n_stages - 1


def even_layers(costs: Sequence[float], n_stages: int, first_cost: float, last_cost: float) -> list[int]:
    """The number of consecutive layers of each stage, at least one, chosen to minimize the largest cost of a stage.

    ``costs`` has each layer's cost; ``first_cost`` and ``last_cost`` are what the first and last stage compute besides
    their layers. Among equally good choices, the one with the least sum of the stages' squared costs is taken, and then
    the one that gives more layers to later stages.
    """
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        extra = first_cost * (stage == 0) + last_cost * (stage == n_stages - 1)
        return total[stop] - total[start] + extra

    def starts(stage: int) -> range:
        return range(stage, len(costs) - n_stages + stage + 1)

    def stops(stage: int, start: int) -> range:
        return range(start + 1, starts(stage + 1).stop) if stage < n_stages - 1 else range(len(costs), len(costs) + 1)

    largest = {len(costs): 0.0}  # from the last stage on: by start, the least possible largest cost from there
    for stage in reversed(range(n_stages)):
        largest = {
            start: min(max(cost(stage, start, stop), largest[stop]) for stop in stops(stage, start))
            for start in starts(stage)
        }
    limit = largest[0]

    def most_even(stage: int, start: int, squares: Mapping[int, tuple[float, int]]) -> tuple[float, int]:
        fitting = [stop for stop in stops(stage, start) if cost(stage, start, stop) <= limit]
        options = [(cost(stage, start, stop) ** 2 + squares[stop][0], stop) for stop in fitting]
        return min(options, default=(math.inf, 0))

    rows = [{len(costs): (0.0, 0)}]  # from the last stage on: by start, the sum of squares from there, the stage's stop
    for stage in reversed(range(n_stages)):
        rows.append({start: most_even(stage, start, rows[-1]) for start in starts(stage)})
    bounds = [0]
    for row in rows[:0:-1]:
        bounds.append(row[bounds[-1]][1])
    return [stop - start for start, stop in pairwise(bounds)]


def assign_layers(config: ModelConfig, n_stages: int, layers: Sequence[int] | None) -> list[range]:
    """The layers of each stage. ``layers`` says how many each has; None: evenly by cost (``even_layers``)."""
    if layers is None:
        costs, first, last = costs_of(config)
        layers = even_layers(costs, n_stages, first, last)
    assert len(layers) == n_stages and sum(layers) == config.n_layers, "parallel.pipeline.rules refuses this"
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(layers)])]


def costs_of(config: ModelConfig) -> tuple[list[float], float, float]:
    """Each layer's cost for one token, and what the first and the last stage compute besides their layers.

    Costs are numbers of weights that the token is multiplied by.
    """
    head = float(config.vocab_size * config.d_model)
    costs = [float(count) for count in multiplied_by_layer(config)]
    costs, further = costs[: config.n_layers], costs[config.n_layers :]
    return costs, EMBEDDING_SHARE * head, head + sum(cost + head * (1 + EMBEDDING_SHARE) for cost in further)


def work_of_ranks(config: ModelConfig, pipeline: PipelineConfig, pp: int) -> list[float]:
    """The cost for one token of all parts of each pp rank, in the unit of ``costs_of``."""
    costs, first, last = costs_of(config)
    return [
        sum(
            sum(costs[layer] for layer in part.layers) + first * part.has_embedding + last * part.has_head
            for part in rank_parts(config, pipeline, pp, pp_rank)
        )
        for pp_rank in range(pp)
    ]


def pipeline_parts(config: ModelConfig, pipeline: PipelineConfig, pp: int) -> list[Part]:
    """Every stage's part, in the model's order."""
    n_stages = len(stage_ranks(pipeline, pp))
    assigned = assign_layers(config, n_stages, pipeline.layers if pp > 1 else None)
    return [Part(stage, n_stages, layers) for stage, layers in enumerate(assigned)]


def rank_parts(config: ModelConfig, pipeline: PipelineConfig, pp: int, pp_rank: int) -> list[Part]:
    """The parts that one pp rank holds, in the model's order."""
    ranks = stage_ranks(pipeline, pp)
    return [part for part in pipeline_parts(config, pipeline, pp) if ranks[part.stage] == pp_rank]


def keep_parts(model: Decoder, parts: Sequence[Part]) -> None:
    """Drops from a meta-device decoder everything but ``parts``; the remaining modules keep their names.

    Modules for multi-token prediction stay with the head. For them, or where embeddings are tied, the rank of the head
    keeps the embedding too, so that both copies are one logical tensor, ``embed.weight``. Where embeddings are tied and
    there are no such modules, that embedding only names the head's weight.
    """
    has_head = any(part.has_head for part in parts)
    kept = {str(layer) for part in parts for layer in part.layers} | ({*model.mtp} if has_head else set())
    for name in list(model.layers):
        if name not in kept:
            del model.layers[name]
    embeds_at_end = model.head.weight is model.embed.weight or len(model.mtp) > 0
    if not any(part.has_embedding for part in parts):
        for name in ENTRY:
            if not (name == "embed" and embeds_at_end and has_head):
                model.register_module(name, None)
    if not has_head:
        model.register_module("final_norm", None)
        model.register_module("head", None)
        model.mtp.clear()


def stage_weights(model: Decoder, parts: Sequence[Part]) -> list[list[nn.Parameter]]:
    """The weights of each of this rank's stages, in the model's order. Call it on the materialized model."""
    stages = (model.part_of(part.layers, has_embedding=part.has_embedding, has_head=part.has_head) for part in parts)
    return [list(stage.parameters()) for stage in stages]


def tied_weight(model: Decoder, config: ModelConfig, parts: Sequence[Part], n_ranks: int) -> nn.Parameter | None:
    """The embedding's weight if another pp rank holds a copy of it, else None. Call it on the materialized model.

    Both copies must start equal and get the sum of both gradients. Norms and checkpoints count only the first stage's
    (``is_second_copy``).
    """
    holds_one_end = any(part.has_embedding for part in parts) != any(part.has_head for part in parts)
    if not config.embeds_at_end or n_ranks == 1 or not holds_one_end:
        return None
    return model.embed.weight


def is_second_copy(parts: Iterable[Part]) -> bool:
    """Whether a rank with these parts holds the embedding only as a copy, which norms and checkpoints leave out."""
    return not any(part.has_embedding for part in parts)


class Stage(nn.Module):
    """The module of one pipeline stage: tokens or hidden states in, hidden states or the summed loss out.

    ``decoder`` shares the whole decoder's modules. Every rank sets the micro-batches before a step and refers to them
    by number, so that only hidden states are sent between stages.
    """

    def __init__(self, model: Decoder, part: Part) -> None:
        super().__init__()
        self.part = part
        self.decoder = model.part_of(part.layers, has_embedding=part.has_embedding, has_head=part.has_head)
        self.micro_batches: Sequence[MicroBatch] = ()
        self.outputs: dict[int, Output] = {}  # micro-batch -> this stage's statistics and, from the head, its losses

    def forward(self, carried: Tensor, number: Tensor) -> Tensor:
        """The stage's hidden states (B, S, D), or in the last stage the summed loss (fp64 scalar).

        ``carried``: the hidden states (B, S, D) from the previous stage, which the first stage ignores. ``number``: the
        micro-batch's number, of shape (1,).
        """
        index = int(number)
        micro_batch = self.micro_batches[index]
        inputs = micro_batch.tokens_BS if self.part.has_embedding else carried
        output = self.decoder(inputs, micro_batch.context, micro_batch.targets_BS, ahead=micro_batch.ahead)
        loss = None if output.loss is None else output.loss.detach()
        self.outputs[index] = replace(output, loss=loss, hidden_BSD=None)
        return output.hidden_BSD if output.loss is None else output.loss

    def open(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Sets the micro-batches of the next passes, with no outputs yet."""
        self.micro_batches = micro_batches
        self.outputs = {}

    def close(self) -> dict[int, Output]:
        """The outputs of all passes since ``open``, by micro-batch; drops these and the micro-batches."""
        outputs, self.outputs, self.micro_batches = self.outputs, {}, ()
        return outputs


def merge_outputs(outputs: Sequence[dict[int, Output]], n_micro_batches: int) -> list[Output]:
    """One Output for each micro-batch: the statistics of all this rank's layers, and the losses if it has the head."""
    merged = [Output(None, None) for _ in range(n_micro_batches)]
    for stage in outputs:
        for number, output in stage.items():
            merged[number].stats |= output.stats
            if output.loss is not None:
                merged[number].loss, merged[number].z_loss = output.loss, output.z_loss
                merged[number].further_losses = output.further_losses
    return merged


def meta_example(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the meta device from which torch's pipeline reads the shape and dtype of what is sent."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
