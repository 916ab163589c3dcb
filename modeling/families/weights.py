"""Conversion of weights to and from the files of Hugging Face transformers (in the layout that version 5 writes)."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

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
        return [*packed_parts(config, name, told)]
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
def packed_parts(config: ModelConfig, name: str, told: Packed) -> tuple[HFPart, ...]:
    """The parts of the files for a logical tensor that is packed with others, or lies in another order or shape.

    There is one part, unless pairs of channels lie together and only some of a head's channels are rotated. Then each
    head has two: its rotated channels, whose order differs, and the others.
    """
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

    def share(whole: Tensor) -> Tensor:
        whole = whole.squeeze(0) if told.as_row else whole
        whole = whole.squeeze(rows + 1) if told.as_column else whole
        whole = whole.transpose(rows, rows + 1) if told.transposed else whole
        return whole.unflatten(rows, (groups, -1)).narrow(rows + 1, start, size)

    def in_pairs(whole: Tensor) -> Tensor:
        return share(whole).unflatten(rows + 1, (-1, 2)).transpose(rows + 1, rows + 2)

    def rotated(head: int, whole: Tensor) -> Tensor:
        channels = share(whole).select(rows, head).narrow(rows, 0, config.rope_dim)
        return channels.unflatten(rows, (-1, 2)).transpose(rows, rows + 1)

    def others(head: int, whole: Tensor) -> Tensor:
        return share(whole).select(rows, head).narrow(rows, config.rope_dim, size - config.rope_dim)

    views: list[Callable[[Tensor], Tensor]] = [in_pairs if told.in_pairs else share]
    if told.in_pairs and config.rope_dim < size:
        views = [partial(view, head) for head in range(groups) for view in (rotated, others)]
    in_files = told.name if layer is None else told.name.replace("{layer}", layer.group())
    return tuple(HFPart(in_files, tuple(shape), view, names) for view in views)


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
            first = parts[0]
            whole, missing = begun.setdefault(first.name, (tensor.new_empty(first.shape), set(first.names)))
            places = [part.view(whole) for part in parts]
            pieces = tensor.detach().flatten().split([place.numel() for place in places])
            for place, piece in zip(places, pieces, strict=True):
                place.copy_(piece.view(place.shape))
            missing.remove(name)
            if not missing:
                yield first.name, begun.pop(first.name)[0]
        if lacks_bias(config, name):
            told = told_of(config, name.replace("router.weight", "router.bias"))
            shape = (1, len(tensor)) if isinstance(told, Packed) and told.as_row else (len(tensor),)
            yield hf_template(config, name.replace("router.weight", "router.bias")), torch.zeros(shape)


def lacks_bias(config: ModelConfig, name: str) -> bool:
    """Whether ``name`` is the weight of a router whose class has a selection bias, which this model does not have."""
    has_bias = config.moe is not None and config.moe.balance.moves_bias
    return family_of(config.family).has_selection_bias and name.endswith("router.weight") and not has_bias
