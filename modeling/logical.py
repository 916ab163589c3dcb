"""The logical tensors of a model: each weight and buffer by its full name, whole, as if nothing were parallel."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from modeling.config import ModelConfig
from modeling.decoder import ENTRY, Decoder, DecoderLayer, build_decoder
from modeling.dims import Weight, stated_weights

Half = Literal["attention", "feed_forward"]


@dataclass(frozen=True)
class LogicalTensor:
    """What one tensor of the model is, its whole shape, and its place in the decoder."""

    weight: Weight
    shape: tuple[int, ...]
    is_buffer: bool  # not trained by gradients: a router's selection bias
    layer: int | None  # None for what lies before the layers, the final norm and the head
    # of its layer, the norm before a half included; None outside layers, and in mtp for what enters or leaves the layer
    half: Half | None

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def fans(self) -> tuple[int, int]:
        """(fan_in, fan_out) of a matrix, or of each matrix in a stack of experts: its numbers of inputs and of outputs.

        They are those of the whole matrix, whatever part of it a rank holds.
        """
        assert self.weight.is_multiplied, self.weight
        return self.shape[-1], self.shape[-2]

    @property
    def is_expert(self) -> bool:
        """Whether it is a stack of experts."""
        return "experts" in self.weight.dims


@lru_cache(maxsize=64)
def logical_tensors(config: ModelConfig) -> Mapping[str, LogicalTensor]:
    """Every logical tensor of the model by name: parameters in the model's order, then buffers.

    Do not change the mapping.

    Only one layer of each kind (``ModelConfig.layer_kind``) is built, on the meta device, and stands for all layers of
    its kind. Raises TypeError where a module does not state what one of its tensors is.
    """
    examples = {config.layer_kind(layer): layer for layer in reversed(config.all_layers)}
    with torch.device("meta"):
        model = build_decoder(config, layers=sorted(examples.values()))
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    places = _places(model)
    within: dict[int, list[tuple[str, LogicalTensor]]] = {layer: [] for layer in examples.values()}
    found: dict[str, LogicalTensor] = {}
    for name, weight in stated_weights(model).items():
        tensor, (layer, half) = tensors[name], places.get(name, (None, None))
        row = LogicalTensor(weight, tuple(tensor.shape), not isinstance(tensor, nn.Parameter), layer, half)
        if layer is None:
            found[name] = row
        elif name.startswith("layers."):
            within[layer].append((name.removeprefix(f"layers.{layer}."), row))
        else:
            found[name] = row
    for layer in config.all_layers:
        for name, row in within[examples[config.layer_kind(layer)]]:
            found[f"layers.{layer}.{name}"] = replace(row, layer=layer)
    return {name: found[name] for name in sorted(found, key=lambda name: _order(name, found[name]))}


def logical_parameters(config: ModelConfig) -> dict[str, LogicalTensor]:
    """The logical tensors that gradients train, by name, in the model's order."""
    return {name: tensor for name, tensor in logical_tensors(config).items() if not tensor.is_buffer}


def logical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The whole shape of every logical tensor, in the order of ``logical_tensors``."""
    return {name: tensor.shape for name, tensor in logical_tensors(config).items()}


def whole_decoder(config: ModelConfig) -> Decoder:
    """The whole model on the meta device, checked: its weights and buffers are those of ``logical_tensors``.

    Raises TypeError where they differ, because layers of one ``ModelConfig.layer_kind`` have different tensors.
    """
    with torch.device("meta"):
        model = build_decoder(config)
    built = {name: tuple(each.shape) for name, each in (*model.named_parameters(), *model.named_buffers())}
    differing = {name for name, _ in built.items() ^ logical_shapes(config).items()}
    if differing:
        raise TypeError(
            f"{', '.join(sorted(differing))}: layers that ModelConfig.layer_kind takes for alike differ in it; "
            "return what tells them apart there"
        )
    return model


def is_entry(name: str) -> bool:
    """Whether a logical tensor lies before the layers, and so in the first stage of a pipeline."""
    return name.partition(".")[0] in ENTRY


def _order(name: str, tensor: LogicalTensor) -> tuple[bool, int, int]:
    """The sort key of the model's order: parameters before buffers, then by place in the model.

    The places are: before the layers; the layers by number; the further weights of multi-token prediction; the final
    norm and the head.
    """
    if tensor.layer is not None:
        return tensor.is_buffer, 1 if name.startswith("layers.") else 2, tensor.layer
    return tensor.is_buffer, 0 if is_entry(name) else 3, 0


def _places(model: Decoder) -> dict[str, tuple[int, Half | None]]:
    """The layer and the half of each tensor that belongs to a layer, by the tensor's full name."""
    found: dict[str, tuple[int, Half | None]] = {}
    for number, module in model.mtp.items():
        found |= {f"mtp.{number}.{name}": (int(number), None) for name, _ in module.named_parameters()}
    for number, layer in model.layers.items():
        assert isinstance(layer, DecoderLayer)
        of_attention = ("attention_norm", "attention", "attention_post_norm")
        for child, module in layer.named_children():
            half: Half = "attention" if child in of_attention else "feed_forward"
            for name, _ in (*module.named_parameters(), *module.named_buffers()):
                found[f"layers.{number}.{child}.{name}"] = (layer.layer, half)
    return found
