"""Weights that lie in the files of transformers otherwise than here: several in one tensor, or with sides exchanged."""

from collections.abc import Callable
from dataclasses import dataclass

from modeling.config import ModelConfig


def one_group(config: ModelConfig) -> int:
    """The parts lie one after the other."""
    return 1


def head_groups(config: ModelConfig) -> int:
    """Each head's rows of all parts lie together."""
    return config.n_heads


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A tensor of the files that is made of weights of ours, ``parts``, joined along their rows (their outputs).

    The rows are in ``groups`` equal runs, each of which has its share of every part, in the order of ``parts``. In a
    stack of experts it is so in each expert. ``transposed``: the files have (in, out).
    """

    name: str  # in the files, with {layer}
    parts: tuple[str, ...]  # our names, with {layer}
    groups: Callable[[ModelConfig], int] = one_group
    transposed: bool = False


def packed(
    name: str, *parts: str, groups: Callable[[ModelConfig], int] = one_group, transposed: bool = False
) -> dict[str, Packed]:
    """Rows for ``Family.weights``: each of ``parts`` lies in the tensor ``name`` of the files."""
    whole = Packed(name=name, parts=parts, groups=groups, transposed=transposed)
    return dict.fromkeys(parts, whole)
