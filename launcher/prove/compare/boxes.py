"""Boxes of logical tensors, which each rank hands to the comparison, and the whole tensors put together from them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.checkpoint.boxes import Box, coverage_error
from parallel.zero.engine import Engine
from parallel.zero.fragments import Fragment


@dataclass(frozen=True)
class TensorBox:
    """The elements ``box`` of the logical tensor ``name``; ``value`` is fp32, on the CPU, of the box's shape.

    Where tp replicates a tensor, one rank is its owner; the other ranks' pieces are copies, which have to be equal.
    """

    name: str
    box: Box
    value: Tensor
    is_owner: bool = True


class Uncovered(Exception):
    """The ranks' pieces do not hold every element of a logical tensor exactly once; the message names the tensor."""


def fragment_boxes(fragment: Fragment, flat: Tensor) -> Iterator[TensorBox]:
    """A fragment's elements, given flat, as boxes of the logical tensor. The values are copies."""
    done = 0
    for box in fragment.boxes():
        value = flat.narrow(0, done, box.numel).to("cpu", torch.float32, copy=True)
        yield TensorBox(fragment.name, box, value.view(box.shape), fragment.is_owner)
        done += box.numel


def weight_boxes(engine: Engine) -> list[TensorBox]:
    """This rank's part of the fp32 weights."""
    flats = ((fragment, engine.pieces(fragment)["weight"]) for fragment in engine.fragments)
    return [piece for fragment, flat in flats for piece in fragment_boxes(fragment, flat)]


def assemble(pieces: Iterable[TensorBox], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Whole logical tensors from all ranks' own pieces (copies are left out), in the order of ``shapes``.

    Raises Uncovered unless the pieces hold every element of every tensor exactly once.
    """
    by_name: dict[str, list[TensorBox]] = {name: [] for name in shapes}
    for piece in pieces:
        if piece.name not in by_name:
            raise Uncovered(f"{piece.name} is not a tensor of this model")
        if piece.is_owner:
            by_name[piece.name].append(piece)
    return {name: _whole(name, shapes[name], parts) for name, parts in by_name.items()}


def _whole(name: str, shape: tuple[int, ...], parts: list[TensorBox]) -> Tensor:
    problem = coverage_error(shape, [part.box for part in parts])
    if problem is not None:
        raise Uncovered(f"{name}: {problem}")
    whole = torch.empty(shape)
    for part in parts:
        whole[part.box.slices] = part.value
    return whole
