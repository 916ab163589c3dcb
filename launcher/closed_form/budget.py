"""The recomputation mode of each layer: `train.recompute` in all, or the least that `train.activation_gib` allows.

It follows from the config and the number of processes, so that every rank finds the same modes. Each pipeline position
has its own: the first ones, which have more micro-batches in flight, recompute more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from launcher.closed_form.again import again_of, kind_of
from launcher.closed_form.choose import Chosen, Option, choose
from launcher.closed_form.held import worst_moments
from launcher.closed_form.own_memory import Way, layer_held, layers_of_stages
from launcher.config.tree import RunConfig
from modeling.config import ModelConfig
from parallel.mesh import Degrees
from parallel.pipeline.config import PipelineConfig
from parallel.recompute import Modes, Recompute

GIB = 2.0**30
MODES: tuple[Recompute, ...] = ("none", "selective", "feed_forward", "full")


@dataclass(frozen=True)
class Budgeted:
    """The modes of all layers, and the bytes of activations of each pipeline position's rank under them."""

    modes: Modes
    held: tuple[float, ...]

    @property
    def most(self) -> float:
        """Bytes that the fullest pipeline position holds."""
        return max(self.held)


def modes_of(config: RunConfig, world_size: int) -> Modes:
    """The recomputation mode of each layer, modules of multi-token prediction included. The same on all ranks."""
    if config.train.activation_gib is None:
        return (config.train.recompute,) * len(config.model.all_layers)
    return within(config, world_size, config.train.activation_gib).modes


def within(config: RunConfig, world_size: int, gib: float) -> Budgeted:
    """The least recomputation with which each rank's activations take at most ``gib`` GiB.

    A pipeline position that cannot keep within it takes the modes that hold the least, and so holds more.
    """
    parallel, train = config.parallel, config.train
    n = train.batches.sizes[-1] // (Degrees.of(parallel, world_size).dp * train.micro_batch_size)
    element = 4 if train.stored == "fp32" else 2
    return budgeted(
        config.model,
        parallel.pipeline,
        parallel.pp,
        way_of(config),
        max(1, n),
        config.data.seq_len,
        train.micro_batch_size * config.data.seq_len / parallel.cp * element,
        gib * GIB,
    )


def way_of(config: RunConfig) -> Way:
    """The properties of the config that decide how much a layer keeps for its backward pass."""
    parallel = config.parallel
    offloads = config.train.offload_activations
    element = 4 if config.train.stored == "fp32" else 2
    exchanges, weights_stay = parallel.ep > 1, parallel.zero < 3
    return Way(parallel.tp, exchanges=exchanges, weights_stay=weights_stay, offloads=offloads, element=element)


@lru_cache(maxsize=1024)
def budgeted(
    model: ModelConfig,
    pipeline: PipelineConfig,
    pp: int,
    way: Way,
    n_micro_batches: int,
    seq_len: int,
    width_bytes: float,
    limit: float,
) -> Budgeted:
    """The least recomputation with which each pipeline position holds at most ``limit`` bytes of activations.

    ``width_bytes``: the bytes of one element for each of a micro-batch's tokens.
    """
    modes, held = dict[int, Recompute](), list[float]()
    moments = worst_moments(pipeline, pp, n_micro_batches)
    for layers, own in zip(layers_of_stages(model, pipeline, pp), moments, strict=True):
        options = [[options_of(model, layer, way, seq_len) for layer in stage] for stage in layers]
        chosen: Chosen = choose(options, own, limit / width_bytes)
        held.append(chosen.held * width_bytes)
        for stage, taken in zip(layers, chosen.options, strict=True):
            modes |= {layer: MODES[option] for layer, option in zip(stage, taken, strict=True)}
    return Budgeted(tuple(modes[layer] for layer in model.all_layers), tuple(held))


def options_of(model: ModelConfig, layer: int, way: Way, seq_len: int) -> tuple[Option, ...]:
    """For each mode of MODES, what the layer holds for a token, and the work that it recomputes."""
    kind = kind_of(model, layer)
    return tuple(
        Option(
            layer_held(model, kind, mode, way),
            again_of(model, kind, mode, seq_len, exchanges=way.exchanges, weights_stay=way.weights_stay).work,
        )
        for mode in MODES
    )


def least_gib(config: RunConfig, world_size: int) -> tuple[float, int]:
    """The smallest budget in GiB that can be kept, rounded up, and the pipeline position that needs it."""
    found = within(config, world_size, 0.0)
    return rounded_up(found.most / GIB), found.held.index(found.most)


def halfway_gib(config: RunConfig, world_size: int) -> float:
    """A budget in GiB half way between the smallest that can be kept and what is held without recomputation."""
    least, most = (within(config, world_size, gib).most / GIB for gib in (0.0, math.inf))
    return rounded_up((least + most) / 2)


def rounded_up(number: float) -> float:
    """The number rounded up to three significant digits; 0 for negative ones."""
    if number <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return float(f"{math.ceil(number / unit) * unit:.3g}")


def told_of_budget(config: RunConfig, world_size: int) -> dict[str, Any]:
    """The layers' modes under the budget in words, the GiB that the fullest rank's activations take, and the budget."""
    assert config.train.activation_gib is not None
    found = within(config, world_size, config.train.activation_gib)
    return {"layers": told(found.modes), "planned_gib": found.most / GIB, "budget_gib": config.train.activation_gib}


def told(modes: Sequence[Recompute]) -> str:
    """The layers' modes in words: "full in 0-3, none in 4-31"."""
    runs = [(mode, [layer for layer, _ in own]) for mode, own in groupby(enumerate(modes), key=lambda each: each[1])]
    words = [f"{mode} in {own[0]}-{own[-1]}" if len(own) > 1 else f"{mode} in {own[0]}" for mode, own in runs]
    return ", ".join(words)
