"""Conversion of weights to and from the files of Hugging Face transformers (in the layout that version 5 writes)."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from modeling.config import ModelConfig
from modeling.families.family import family_of
from modeling.families.packed import Packed
from modeling.logical import logical_tensors

LAYER = re.compile(r"(?:(?<=^layers\.)|(?<=^mtp\.))\d+")


@dataclass(frozen=True)
class HFPart:
    """Where a logical tensor, or one expert of a stack, lies in a tensor of the files."""

    name: str  # of the tensor in the files
    shape: tuple[int, ...]  # of that tensor, whole
    view: Callable[
        [Tensor], Tensor
    ]  # from that tensor to a view of our part of it, in our order (its shape may have more dims)
    names: tuple[str, ...]  # all logical tensors that lie in it


def told_of(config: ModelConfig, name: str, *, stacked: bool = False) -> str | Packed:
    """The family's entry for logical tensor ``name``: its name in the files, or how it is packed there.

    Raises TypeError where the family has none. ``stacked``: the files hold all experts of a layer in one tensor.
    """
    template = LAYER.sub("{layer}", name)
    family = family_of(config.family)
    weights = {**family.weights, **family.stacked} if stacked else family.weights
    if template not in weights:
        raise TypeError(f"modeling.families.{config.family}: FAMILY.weights has no name for {template}")
    return weights[template]


def hf_template(config: ModelConfig, name: str, *, stacked: bool = False) -> str:
    """The name of logical tensor ``name`` in transformers' files. {expert} stands for the number of an expert."""
    layer = LAYER.search(name)
    told = told_of(config, name, stacked=stacked)
    template = told.name if isinstance(told, Packed) else told
    return template if layer is None else template.replace("{layer}", layer.group())


def hf_parts(config: ModelConfig, name: str, *, stacked: bool = False) -> list[HFPart]:
    """The parts of transformers' files that make up logical tensor ``name``, in order.

    ``stacked``: the files hold all experts of a layer in one tensor, where the class writes one for each expert.
    """
    told = told_of(config, name, stacked=stacked)
    template, shape = hf_template(config, name, stacked=stacked), logical_tensors(config)[name].shape
    if isinstance(told, Packed):
        return [packed_part(config, name, told)]
    if "{expert}" not in template:
        return [HFPart(template, shape, itself, (name,))]
    experts = range(shape[0])
    return [HFPart(template.replace("{expert}", str(each)), shape[1:], itself, (name,)) for each in experts]


def copies_of(config: ModelConfig, name: str) -> list[str]:
    """The names in the files of further copies of logical tensor ``name``.

    Files hold them for multi-token prediction, which computes with the model's own tensors all the same.
    """
    copied = {"embed.weight", "head.weight"} if name == "embed.weight" and config.tie_embeddings else {name}
    templates = [told for told, ours in family_of(config.family).copies.items() if ours in copied]
    return [told.replace("{layer}", str(layer)) for layer in config.mtp_layers for told in templates]


def itself(tensor: Tensor) -> Tensor:
    """The tensor as it is, where the files and Roundtable have the same."""
    return tensor


@lru_cache(maxsize=4096)
def packed_part(config: ModelConfig, name: str, told: Packed) -> HFPart:
    """The part of the files for a logical tensor that is packed with others, or lies in another order or shape."""
    layer = LAYER.search(name)
    names = tuple(part if layer is None else part.replace("{layer}", layer.group()) for part in told.parts)
    tensors = logical_tensors(config)
    rows = 1 if tensors[name].is_expert else 0  # the dim of the outputs
    groups, sizes = told.groups(config), [tensors[part].shape[rows] for part in names]
    shape = list(tensors[name].shape)
    shape[rows] = sum(sizes)
    if told.transposed:
        shape[rows], shape[rows + 1] = shape[rows + 1], shape[rows]
    if told.as_row:
        shape.insert(0, 1)
    if told.as_column:
        shape.insert(rows + 1, 1)
    number = names.index(name)
    start, size = sum(sizes[:number]) // groups, sizes[number] // groups

    def view(whole: Tensor) -> Tensor:
        whole = whole.squeeze(0) if told.as_row else whole
        whole = whole.squeeze(rows + 1) if told.as_column else whole
        whole = whole.transpose(rows, rows + 1) if told.transposed else whole
        share = whole.unflatten(rows, (groups, -1)).narrow(rows + 1, start, size)
        return share.unflatten(rows + 1, (-1, 2)).transpose(rows + 1, rows + 2) if told.in_pairs else share

    in_files = told.name if layer is None else told.name.replace("{layer}", layer.group())
    return HFPart(in_files, tuple(shape), view, names)


def to_hf(config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors of the files for logical ``tensors``.

    Only tensors that several logical ones share, or that lie otherwise in the files, are copies. A shared one is
    yielded when the last of its parts has come, and never if one is missing. A tensor that the files hold several times
    is yielded as often. A router without a selection bias, in a class that has one, also yields a bias of zeros.
    """
    begun: dict[str, tuple[Tensor, set[str]]] = {}  # name in the files -> the tensor, and the parts still to come
    for name, tensor in tensors:
        parts = hf_parts(config, name)
        if parts[0].view is itself:
            pieces = tensor if len(parts) > 1 or parts[0].shape != tensor.shape else [tensor]
            yield from ((part.name, piece) for part, piece in zip(parts, pieces, strict=True))
            yield from ((copy, tensor) for copy in copies_of(config, name))
        else:
            (part,) = parts
            whole, missing = begun.setdefault(part.name, (tensor.new_empty(part.shape), set(part.names)))
            place = part.view(whole)
            place.copy_(tensor.detach().reshape(place.shape))
            missing.remove(name)
            if not missing:
                yield part.name, begun.pop(part.name)[0]
        if lacks_bias(config, name):
            told = told_of(config, name.replace("router.weight", "router.bias"))
            shape = (1, len(tensor)) if isinstance(told, Packed) and told.as_row else (len(tensor),)
            yield hf_template(config, name.replace("router.weight", "router.bias")), torch.zeros(shape)


def lacks_bias(config: ModelConfig, name: str) -> bool:
    """Whether ``name`` is the weight of a router whose class has a selection bias, which this model does not have."""
    has_bias = config.moe is not None and config.moe.balance.moves_bias
    return family_of(config.family).has_selection_bias and name.endswith("router.weight") and not has_bias
